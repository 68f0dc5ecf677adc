"""The conditional diffusion network."""
