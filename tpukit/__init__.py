"""tpukit: train PyTorch models on TPUs, GPUs and CPUs, and know beforehand what fits."""

__version__ = "0.2.0"
