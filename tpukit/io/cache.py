"""The one cache folder: what can be computed again and is kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "TPUKIT_CACHE_DIR"


def cache_folder() -> Path:
    """`$TPUKIT_CACHE_DIR`, else `tpukit` in the user's cache folder (`$XDG_CACHE_HOME`)."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    from platformdirs import user_cache_path

    return user_cache_path("tpukit", appauthor=False)
