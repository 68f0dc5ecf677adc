"""Evaluation and prediction of summarisation runs: ROUGE, baselines, submissions."""
