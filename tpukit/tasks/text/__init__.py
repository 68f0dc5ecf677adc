"""Texts: one class, several labels, numbers or scores of a text, or of a pair of texts."""
