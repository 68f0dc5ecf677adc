"""A GPU that is the CPU."""

from cuda_on_cpu import compiled_without_inductor, cuda, gpu  # noqa: F401
