"""What a run reports of itself: metrics, clocks, compilations, the best checkpoint."""
