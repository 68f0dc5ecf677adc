"""Dialogues as tokens: CSV files, tokenizers, the token cache, length buckets."""
