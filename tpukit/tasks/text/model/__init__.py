"""Models of transformers that read a text at once."""
