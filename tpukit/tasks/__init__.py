"""What is learned: one package a task."""
