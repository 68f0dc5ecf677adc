"""Mistakes in a task's own code, in two lines that name its method, file and line."""
