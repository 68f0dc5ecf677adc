"""Writes the notebooks beside it from cells.md and llm.md: python notebooks/make.py"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

HERE = Path(__file__).parent
FENCE = re.compile(r"^```(\w+)\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
"""A code cell: its tag, and its text."""


@dataclass(frozen=True)
class Place:
    """What differs between the notebooks."""

    title: str
    settings: str
    """How the accelerator is chosen."""
    attached: str
    """How tpukit gets there."""
    tpukit: str
    """The default source to install from."""
    work: str
    """The folder whose files are kept."""
    devices: str
    """What a training does with the devices."""
    next_day: str
    """How its runs go on."""
    cells: str = "cells.md"
    first: str = ""
    """A cell before the parameters."""
    torch_xla: str = ""
    """A cell that installs torch_xla."""
    metadata: dict[str, Any] = field(default_factory=dict)


ON_TPU = (
    "All chips are used by one process, in bf16. The first minutes compile one program for each "
    "shape of a batch; the log counts them, and none should follow later. Import no `torch_xla` "
    "and create no tensor on a device in the notebook itself: the first process that opens a TPU "
    "keeps it, and each `%tpukit` line is a process of its own."
)
ATTACHED = "*Add input*: a data set of yours with tpukit's wheel, or with a checkout of it."
INTERNET = "*Internet* on (or attach the files that `docs/kaggle.md`, *Without a network*, lists)."
VERSIONS = (
    "*Save version* keeps `/kaggle/working`, and with it the runs. In the next session attach that "
    "output (*Add input*, *Notebook output*), set `YESTERDAY` to its folder and run all cells: "
    "each training goes on from its newest checkpoint, and a finished one says so. The attached "
    "folder stays as it is."
)
DRIVE = (
    "The runs lie in Google Drive: run all cells again, and each training goes on from its newest "
    "checkpoint; a finished one says so. `YESTERDAY` is for runs that lie elsewhere."
)
MOUNT = """
```first
from google.colab import drive

drive.mount("/content/drive")
```
"""
TORCH_XLA = """
```install
from importlib.util import find_spec

if find_spec("torch_xla") is None:  # the extra brings it, with the torch that it needs
    address = source if "://" in str(source) else Path(source).as_uri()
    !pip install --quiet {options} "tpukit[tpu] @ {address}"
```
"""
ON_KAGGLE = {
    "attached": ATTACHED, "tpukit": "/kaggle/input/tpukit", "work": "/kaggle/working",
    "next_day": VERSIONS,
}  # fmt: skip
PLACES = {
    "kaggle_tpu": Place(
        title="tpukit on Kaggle: TPU v5e-8",
        settings=f"*Settings*: accelerator **TPU v5e-8**, {INTERNET}",
        **ON_KAGGLE,
        devices=ON_TPU,
        metadata={"kaggle": {"isInternetEnabled": True}},
    ),
    "kaggle_t4x2": Place(
        title="tpukit on Kaggle: 2 x T4",
        settings=f"*Settings*: accelerator **GPU T4 x2**, {INTERNET}",
        **ON_KAGGLE,
        devices="A training starts two ranks, one a GPU, in fp16 with a gradient scaler; "
        "`--devices 1` uses one GPU.",
        metadata={"kaggle": {"accelerator": "nvidiaTeslaT4", "isInternetEnabled": True}},
    ),
    "kaggle_llm": Place(
        title="tpukit on Kaggle: an adapter of a language model",
        settings=f"*Settings*: accelerator **TPU v5e-8** or **GPU T4 x2**, {INTERNET}",
        **ON_KAGGLE,
        devices=f"On a TPU: {ON_TPU[0].lower()}{ON_TPU[1:]} On 2 x T4 a training starts two ranks, "
        "one a GPU, in fp16 with a gradient scaler.",
        cells="llm.md",
        metadata={"kaggle": {"isInternetEnabled": True}},
    ),
    "colab_tpu": Place(
        title="tpukit on Colab: TPU",
        settings="*Runtime*, *Change runtime type*: **v5e-1 TPU**.",
        attached="Copy tpukit's wheel into the folder `tpukit` of your Google Drive, or give an "
        "address below.",
        tpukit="/content/drive/MyDrive/tpukit",
        work="/content/drive/MyDrive/tpukit-runs",
        devices=ON_TPU,
        next_day=DRIVE,
        first=MOUNT,
        torch_xla=TORCH_XLA,
        metadata={"accelerator": "TPU", "colab": {"gpuType": "V5E1"}},
    ),
}


def notebook(place: Place) -> dict[str, Any]:
    """The notebook's JSON; each code cell is tagged with its part."""
    cells, own = ((HERE / f).read_text(encoding="utf-8") for f in ("cells.md", place.cells))
    install = cells[cells.index("## Install") : cells.index("## Electrical")]
    text = Template(own.replace("$install", install)).substitute(vars(place))
    pieces = FENCE.split(text)  # text, tag, code, text, tag, code, ..., text
    kinds = ["markdown" if n % 3 == 0 else pieces[n - 1] for n in range(len(pieces))]
    cells = [(kinds[n], pieces[n].strip()) for n in range(len(pieces)) if n % 3 != 1]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": [_cell(*cell, f"cell-{n:02}") for n, cell in enumerate(c for c in cells if c[1])],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}, **place.metadata},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(kind: str, text: str, name: str) -> dict[str, Any]:
    source = text.splitlines(keepends=True)
    if kind == "markdown":
        return {"cell_type": "markdown", "id": name, "metadata": {}, "source": source}
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": name,
        "metadata": {"tags": [kind]},
        "outputs": [],
        "source": source,
    }


def texts() -> dict[str, str]:
    """File name -> content."""
    return {
        f"{name}.ipynb": json.dumps(notebook(place), indent=1, ensure_ascii=False) + "\n"
        for name, place in PLACES.items()
    }


if __name__ == "__main__":
    for name, text in texts().items():
        (HERE / name).write_text(text, encoding="utf-8")
