"""The batch-size search, and the recommendation."""
