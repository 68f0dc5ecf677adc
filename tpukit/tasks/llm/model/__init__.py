"""Causal models of transformers: loaded, in the lean form, in 4 bits, and as rows need them."""
