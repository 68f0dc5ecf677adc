"""CPUs and GPUs: eager PyTorch, one rank per device."""
