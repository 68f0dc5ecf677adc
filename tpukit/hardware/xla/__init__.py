"""TPUs through torch_xla: one process drives all devices of a host (SPMD)."""
