"""CPUs and GPUs: eager PyTorch, one process per device."""
