"""The data of a run: which samples make up a step, streams, adapters."""
