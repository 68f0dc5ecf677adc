"""Rows of texts, as tokens, in batches of a few lengths."""
