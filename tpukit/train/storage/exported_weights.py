"""A run's weights as files for code that knows nothing of tpukit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tpukit.errors import DataError
from tpukit.io.files import replacing, write_file
from tpukit.train.task import Task, overrides

WEIGHTS_FILE, README_FILE = "model.safetensors", "README.md"


def export(
    task: Task, weights: Mapping[str, Tensor], artifacts: Mapping[str, bytes], folder: Path
) -> list[Path]:
    """The task's own export of a run, or its model's state dict with a README; the files."""
    if overrides(task, "export"):
        return task.export(weights, artifacts, folder)
    tensors = task.plain_model(weights).state_dict()
    text = readme(task, tensors, artifacts)
    return write_export(folder, tensors, {**artifacts, README_FILE: text.encode()})


def write_export(
    folder: Path, tensors: Mapping[str, Tensor], contents: Mapping[str, bytes]
) -> list[Path]:
    """Writes `model.safetensors` and further files by name, each atomically; their paths.

    Tensors that share memory (tied weights) are written whole under each name. Raises `DataError`
    where the folder cannot be written.
    """
    whole = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS_FILE) as partial:
            save_file(whole, partial, {"format": "pt"})
        for name, content in contents.items():
            write_file(folder / name, content)
    except OSError as error:
        raise DataError(
            f"Cannot export to {folder}: {error.strerror or error}.", "Name another folder."
        ) from error
    return [folder / name for name in (WEIGHTS_FILE, *contents)]


def settings_of(task: Task) -> dict[str, Any]:
    """The arguments that a task object was made with: those that a config file can hold."""
    given = dict(task.given_settings)
    if dataclasses.is_dataclass(task):
        given = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    given = {n: str(v) if isinstance(v, Path) else v for n, v in given.items()}
    return {n: v for n, v in given.items() if isinstance(v, bool | int | float | str | list)}


def readme(task: Task, tensors: Mapping[str, Tensor], artifacts: Mapping[str, bytes]) -> str:
    """How to load an exported state dict, with and without tpukit."""
    cls = type(task)
    file, _, _ = (cls.source or "").rpartition(":")
    module = Path(file).stem if file.endswith(".py") else cls.__module__
    settings = ", ".join(f"{name}={value!r}" for name, value in settings_of(task).items())
    count = sum(tensor.numel() for tensor in tensors.values())
    kept = "".join(f"- `{name}`: for `{cls.__name__}.restore`\n" for name in artifacts)
    return f"""# Weights of a run of task `{task.name}`

- `{WEIGHTS_FILE}`: the best (EMA) weights, {count:,} values, as the state dict of the module that \
`{cls.__name__}.build_model` returns
{kept}
With PyTorch alone, where `model` is that module, built by your own code:

```python
from safetensors.torch import load_file
model.load_state_dict(load_file("{WEIGHTS_FILE}"))
model.eval()
```

With the task class{f" (`{cls.source}`)" if file.endswith(".py") else ""}:

```python
from safetensors.torch import load_file
from {module} import {cls.__name__}
model = {cls.__name__}({settings}).plain_model(load_file("{WEIGHTS_FILE}"))
```
"""
