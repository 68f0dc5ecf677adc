"""Child processes: torchrun and its ranks, and children that may crash."""
