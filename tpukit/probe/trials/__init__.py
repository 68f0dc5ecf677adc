"""Trials in child processes: measured on this machine, or compiled for a TPU."""
