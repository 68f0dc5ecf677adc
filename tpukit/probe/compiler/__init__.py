"""The TPU compiler without a TPU: tracing, compiling, and what the program needs."""
