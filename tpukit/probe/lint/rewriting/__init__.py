"""Rewrites the source text of the places that have one replacement."""
