"""Running cells in a real Jupyter kernel, and reading what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from runs import environment


def execute(
    notebook: nbformat.NotebookNode, cwd: Path, env: dict[str, str] | None = None,
    timeout: float = 300, *, allow_errors: bool = True,
) -> nbformat.NotebookNode:  # fmt: skip
    """Runs all cells in a kernel of its own, in the folder `cwd`; the notebook with outputs."""
    own = {"IPYTHONDIR": str(cwd / ".ipython"), "JUPYTER_RUNTIME_DIR": str(cwd / ".jupyter")}
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", allow_errors=allow_errors,
        resources={"metadata": {"path": str(cwd)}},
    )  # fmt: skip
    return client.execute(env=environment({**own, **(env or {})}))


def notebook_of(*cells: str) -> nbformat.NotebookNode:
    """A notebook of code cells."""
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])


def printed(cell: Any) -> str:
    """What a cell printed."""
    return "".join(o["text"] for o in cell["outputs"] if o["output_type"] == "stream")


def shown(cell: Any, kind: str) -> list[str]:
    """What a cell displays as `text/html` or `image/png`."""
    found = [o["data"] for o in cell["outputs"] if o["output_type"] == "display_data"]
    return [data[kind] for data in found if kind in data]


def error_of(cell: Any) -> list[str]:
    """The lines of the error that ended a cell, as a notebook shows them."""
    errors = [o for o in cell["outputs"] if o["output_type"] == "error"]
    return [line for error in errors for line in error["traceback"]]
