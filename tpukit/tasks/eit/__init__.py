"""Conditional diffusion for electrical impedance tomography."""
