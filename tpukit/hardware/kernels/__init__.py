"""Fused attention for TPUs, written in Pallas, and whether a device runs it."""
