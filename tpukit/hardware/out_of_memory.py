"""Recognises out-of-memory failures by their text: the exception's class varies."""

from __future__ import annotations

import re

TEXTS = (
    # XLA and libtpu
    r"RESOURCE_EXHAUSTED",
    r"Ran out of memory in memory space",
    r"Allocation .*would exceed memory",
    r"exceeds available HBM",
    r"Used \S+ of \S+ \w+\. Exceeded \w+ capacity",
    r"Attempting to (?:reserve|allocate) \S+.*That was not possible",
    r"Out of memory allocating \d+ bytes",
    r"Error allocating device buffer",
    # CUDA
    r"CUDA out of memory",
    r"CUDA error: out of memory",
    r"CUBLAS_STATUS_ALLOC_FAILED",
    r"CUDA driver error: out of memory",
    # accelerate, after the smallest batch failed too
    r"No executable batch size found",
    # torch and numpy on the host
    r"can't allocate memory",
    r"not enough memory: you tried to allocate",
    r"std::bad_alloc",
    r"Cannot allocate memory",
    r"Unable to allocate .* for an array",
)
TEXTS_UNDER_A_LIMIT = (
    "can't start new thread",
    "failed to map segment",
    "unable to mmap",
    "Resource temporarily unavailable",
)
"""What libraries say besides, for want of a thread's stack or a mapping, under a memory limit."""
_PATTERN = re.compile("|".join(TEXTS), re.DOTALL)


def is_out_of_memory_text(text: str) -> bool:
    """Whether a failure's text says that memory ran out."""
    return _PATTERN.search(text) is not None


def is_out_of_memory(error: BaseException, *, limited: bool = False) -> bool:
    """Whether this error, or what it was raised from, says that memory ran out.

    limited: a memory limit was set on the process, under which libraries fail in odd places.
    """
    seen: BaseException | None = error
    while seen is not None:
        is_named = isinstance(seen, MemoryError) or type(seen).__name__ == "OutOfMemoryError"
        if is_named or is_out_of_memory_text(str(seen)):
            return True
        if limited and any(text in str(seen) for text in TEXTS_UNDER_A_LIMIT):
            return True
        seen = seen.__cause__
    return False
