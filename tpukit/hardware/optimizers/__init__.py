"""Optimizers as the engine steps them, on any hardware."""
