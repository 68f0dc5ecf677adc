"""Pictures of results in a notebook's cell."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def notebook_display() -> Any:
    """`IPython.display` where pictures can be shown: in a notebook's kernel; else None."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython import display

    return display


def show_pictures(display: Any, pictures: Iterable[bytes]) -> None:
    """PNG pictures below the cell."""
    for png in pictures:
        display.display(display.Image(data=png, format="png"))


def result_pictures(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """The pictures that a command's JSON fields name: of `test`, and a training's loss curve."""
    named = [*fields.get("pictures", []), fields.get("picture")]
    if "run" in fields:
        named.append(Path(str(fields["run"]), "loss.png"))
    for path in filter(None, named):
        if Path(path).is_file():
            yield Path(path).read_bytes()
