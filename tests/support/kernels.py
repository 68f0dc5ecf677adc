"""Running and interrupting cells in a real Jupyter kernel, and reading what they show."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from forked import SHARED, own_server
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from runs import SUPPORT, environment, wait_until

STARTUP = f"""
import subprocess, sys
sys.path.append({str(SUPPORT)!r})
from forked import CommandsAsForks
sys.path.pop()
subprocess.Popen = CommandsAsForks
"""
"""What a kernel runs first: its `%tpukit` commands are forks, as those of tests are."""


def execute(
    notebook: nbformat.NotebookNode, cwd: Path, env: dict[str, str] | None = None,
    timeout: float = 600, *, allow_errors: bool = True,
) -> nbformat.NotebookNode:  # fmt: skip
    """Runs all cells in a kernel of its own, in the folder `cwd`; the notebook with outputs."""
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", allow_errors=allow_errors,
        resources={"metadata": {"path": str(cwd)}},
    )  # fmt: skip
    return client.execute(env=kernel_environment(cwd, env or {}))


def kernel_environment(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    """The environment of a kernel that keeps what is its own in `folder`."""
    startup = folder / ".ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    (startup / "forks.py").write_text(STARTUP)
    return environment({
        "IPYTHONDIR": str(folder / ".ipython"), "JUPYTER_RUNTIME_DIR": str(folder / ".jupyter"),
        SHARED: os.environ.get(SHARED) or own_server("torch")[0], **variables,
    })  # fmt: skip


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


class Kernel:
    """Runs cells one after the other; what they leave is kept in `notebook`."""

    def __init__(self, client: NotebookClient) -> None:
        self.client = client
        self.notebook = client.nb
        self.process = int(self.run("import os; print(os.getpid())"))

    def run(self, code: str, *, interrupt_when: Callable[[], bool] | None = None) -> str:
        """What the cell printed; it is interrupted as soon as `interrupt_when` is true."""
        cell = nbformat.v4.new_code_cell(code)
        self.notebook.cells.append(cell)
        if interrupt_when is not None:
            threading.Thread(target=self._interrupt, args=(interrupt_when,)).start()
        try:
            self.client.execute_cell(cell, len(self.notebook.cells) - 1)
        except CellExecutionError as error:
            if error.ename != "KeyboardInterrupt":
                raise
        return printed(cell)

    def _interrupt(self, is_time: Callable[[], bool]) -> None:
        wait_until(is_time)
        os.killpg(os.getpgid(self.process), signal.SIGINT)


@contextmanager
def kernel(folder: Path, **variables: str) -> Iterator[Kernel]:
    """A kernel that works in `folder`."""
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=300, kernel_name="python3")
    with client.setup_kernel(env=kernel_environment(folder, variables), cwd=str(folder)):
        yield Kernel(client)
