"""Attacks on tpukit: fuzzed input, damaged files, kills, missing resources, two writers."""
