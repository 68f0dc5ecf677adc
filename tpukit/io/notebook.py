"""Whether a command runs in a notebook's cell."""

from __future__ import annotations

import os
from collections.abc import Mapping

KERNEL_VARIABLES = ("JPY_PARENT_PID", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_JUPYTER_TRANSPORT")
"""What Jupyter, Kaggle and Colab set for a kernel, and so for the commands of its cells."""


def in_notebook(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a kernel of Jupyter, Kaggle, Colab or VS Code started this process, or is it.

    A cell's `!command` has a terminal that no one looks at: what is written there is kept.
    """
    if any(environment.get(name) for name in KERNEL_VARIABLES):
        return True
    # Every other ipykernel (VS Code's) shows matplotlib's pictures inline, and says so.
    return environment.get("MPLBACKEND", "").endswith("backend_inline")
