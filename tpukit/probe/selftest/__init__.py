"""What `doctor` computes in child processes: the live checks, and `--selftest`."""
