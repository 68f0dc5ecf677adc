"""What watches a run: validation, the best metric, compilations, a profiler."""
