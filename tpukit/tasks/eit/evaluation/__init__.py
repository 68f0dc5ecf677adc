"""Evaluation and prediction of EIT runs: metrics, baselines, pictures."""
