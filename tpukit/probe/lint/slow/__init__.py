"""Finds code that works, but is slow or wrong on TPU."""
