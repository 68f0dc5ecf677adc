"""Kernels in C++ for this machine's processor: compiled once, kept in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-w")
SHARED = "cpu_vectors.h"
COMPILE_SECONDS = 120
ENVIRONMENT = "TPUKIT_CPU_KERNEL"
"""Set to 0, it keeps the kernels out."""


@cache
def kernel(name: str) -> ctypes.CDLL | None:
    """The library of `name`.cpp beside this file; None where it cannot be had on this machine.

    They need AVX512-BF16 and a C++ compiler (`CXX`, else g++).
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if os.environ.get(ENVIRONMENT) == "0" or compiler is None or not _has_bf16_dot():
        return None
    try:
        return ctypes.CDLL(str(_built(Path(__file__).with_name(f"{name}.cpp"), compiler)))
    except (OSError, subprocess.SubprocessError):
        return None


def _has_bf16_dot() -> bool:
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False


def _built(source: Path, compiler: str) -> Path:
    """The library's path, under a name that tells sources, compiler and processor."""
    version = subprocess.run(
        [compiler, "-march=native", "-Q", "--help=target", "--version"],
        capture_output=True, check=True, timeout=COMPILE_SECONDS,
    ).stdout  # fmt: skip
    texts = (source.read_bytes(), source.with_name(SHARED).read_bytes())
    digest = hashlib.sha256(b"".join((*texts, version, " ".join(FLAGS).encode()))).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tpukit"
    library = folder / f"{source.stem}-{digest[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            built = Path(beside) / library.name
            subprocess.run(
                [compiler, *FLAGS, str(source), "-o", str(built)],
                capture_output=True, check=True, timeout=COMPILE_SECONDS,
            )  # fmt: skip
            built.replace(library)
    return library
