"""Evaluation and prediction of image classifiers: metrics, pictures, submissions."""
