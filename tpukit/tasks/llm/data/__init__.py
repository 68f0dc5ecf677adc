"""Dialogues as tokens: CSV files, tokenizers, the token cache, packed rows."""
