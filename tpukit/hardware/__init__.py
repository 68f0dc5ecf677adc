"""Where it runs: the one seam for hardware and its backends."""
