"""The facts of a machine and the checks of `doctor`, without importing torch."""
