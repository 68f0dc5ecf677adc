"""Prompts and completions as tokens: files, tokenizers, the token cache, packed rows."""
