"""The batch-size search: trials in child processes, and the recommendation."""
