"""Child processes: torchrun, its ranks, and children that may die."""
