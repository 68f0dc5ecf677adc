"""The run folder on disk: checkpoints, logs, and resuming from them."""
