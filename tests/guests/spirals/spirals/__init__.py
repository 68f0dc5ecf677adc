"""Points on a spiral by a diffusion model."""
