"""Weights that a run begins with, weights of other code, and a run's weights for it."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from tpukit.errors import CheckpointError
from tpukit.hardware.backend import Backend, ModelOps
from tpukit.hardware.modules import is_made_later
from tpukit.io.files import replacing, require_regular, write_file, writing_errors
from tpukit.io.toml import has_form
from tpukit.train.checkpoint import EXTRA_FILE, Checkpoint
from tpukit.train.checks import expect, task_mistake
from tpukit.train.config import TrainConfig
from tpukit.train.module_state import load_weights, others_of, pack_state, parameters_in
from tpukit.train.run_folder import TrainedRun, open_run
from tpukit.train.task import Datasets, Task, overrides


def open_initial_run(task: Task, source: str, log: Callable[[str], None]) -> TrainedRun:
    """The run that `init_from` names. Raises CheckpointError for another task."""
    try:
        run = open_run(source, log)
    except CheckpointError as error:
        hint = "Give the folder of a run, or one of its checkpoints."
        raise CheckpointError(f"--init-from: {error.message}", hint) from error
    if run.task not in (task.name, *task.earlier_names):
        raise CheckpointError(
            f"--init-from {source} is a run of task {run.task!r}, not {task.name!r}.",
            "Copy what fits in the task's `initialize(model, data)`, from"
            f" `tpukit.load({source!r}).weights()`.",
        )
    return run


def built_model(task: Task, ops: ModelOps) -> nn.Module:
    """What `build_model` returns. Raises UsageError for what cannot be trained."""
    method = task.build_model
    model = expect(method(ops), nn.Module, method, "the model, an nn.Module")
    for problem, advice in _problems(model):
        raise task_mistake(method, f"returned a model {problem}", advice)
    for part in _parts_in_eval_mode(model):
        frozen = not any(parameter.requires_grad for parameter in part.parameters())
        if frozen or isinstance(part, _BatchNorm):
            part.train = partial(_as_built, part)  # type: ignore[method-assign]
    return model


def _problems(model: nn.Module) -> Iterator[tuple[str, str]]:
    """What keeps a model from being trained, each with what to do about it."""
    known = set(map(id, model.parameters()))
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            yield (
                f"whose {name!r} is an {type(part).__name__} with sparse=True: sparse gradients are"
                " neither reduced over devices nor clipped",
                "Leave sparse=True out.",
            )
        # torch makes those of a recurrent layer anew.
        for key, held in () if isinstance(part, nn.RNNBase) else vars(part).items():
            if any(p.requires_grad and id(p) not in known for p in parameters_in(held)):
                yield (
                    f"whose {type(part).__name__}.{key} holds parameters in a"
                    f" {type(held).__name__}: there they are neither trained nor saved",
                    "Make it an nn.ParameterList, nn.ModuleList or nn.ModuleDict.",
                )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            yield (
                f"whose {name!r} has no shape yet: a lazy module takes it from its first input",
                "Call the model once in `build_model`, on zeros of a batch's shape.",
            )


def _parts_in_eval_mode(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost parts that `build_model` left in eval mode, but for the model as a whole."""
    if module.training:
        for child in module.children():
            yield from _parts_in_eval_mode(child) if child.training else (child,)


def _as_built(part: nn.Module, mode: bool = True) -> nn.Module:
    """`part.train` of a frozen teacher: `model.train()` leaves it in eval mode."""
    return part


def require_savable(task: Task, model: nn.Module) -> None:
    """Raises UsageError where a checkpoint could not hold, or give back, a module's extra state."""
    for name, part in model.named_modules():
        gives = type(part).get_extra_state is not nn.Module.get_extra_state
        if gives and type(part).set_extra_state is nn.Module.set_extra_state:
            raise task_mistake(
                task.build_model,
                f"returned a model whose {name!r}, a {type(part).__name__}, has `get_extra_state`"
                " and no `set_extra_state`",
                "Add `def set_extra_state(self, state)`, which takes it back.",
            )
    pack_state(model.state_dict())


def initial_model(
    task: Task,
    backend: Backend,
    config: TrainConfig,
    checkpoint: Checkpoint | None = None,
    data: Datasets | None = None,
) -> nn.Module:
    """The model on the CPU with a checkpoint's weights, another run's or the task's own.

    data: None where only shapes matter (a memory trial). Tensors that are made later are not
    given a checkpoint's.

    Raises CheckpointError naming what does not fit.
    """
    model = built_model(task, backend)
    if data is not None:
        require_savable(task, model)
    if checkpoint is not None:
        if not any(map(is_made_later, model.parameters())):
            load_weights(model, checkpoint.weights(), str(checkpoint.path))
    elif data is not None and (source := config.init_from) is not None:
        hint = (
            "Give the settings of its model, or copy what fits in the task's"
            f" `initialize(model, data)`, from `tpukit.load({source!r}).weights()`."
        )
        weights = open_initial_run(task, source, lambda line: None).weights()
        load_weights(model, weights, f"--init-from {source}", hint)
    elif data is not None:
        task.initialize(model, data)
    return model


# -- checkpoint files of other code --------------------------------------------------------------
SHOWN = 3
"""Entries shown of what a file holds."""


def read_foreign(path: Path) -> Any:
    """What `torch.save` wrote; nothing in it is executed.

    Raises:
        CheckpointError: it is missing, damaged, or holds more than tensors and plain values.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # about the pickle's protocol
            return torch.load(require_regular(path), map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"Checkpoint {path} does not exist.", "Check the path.") from error
    except Exception as error:  # a damaged pickle raises whatever its first bad byte leads to
        raise CheckpointError(
            f"Checkpoint {path} cannot be read as tensors alone: {_reason(error)}.",
            "Download it again; a file that holds more than tensors is not loaded.",
        ) from error


def _reason(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(".: ")


def state_dict_of(content: Any, name: str) -> dict[str, Tensor] | None:
    """The tensors by name under `name`, None where there is no such thing."""
    found = content.get(name) if isinstance(content, dict) else None
    if not isinstance(found, Mapping) or not found:
        return None
    whole = all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items())
    return dict(found) if whole else None


def describe(content: Any) -> str:
    """What a file holds, in a few words: `a dict with model (dict), epoch (int)`."""
    if isinstance(content, Tensor):
        return f"a tensor {tuple(content.shape)}"
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    entries = [f"{str(k)[:40]} ({type(v).__name__})" for k, v in list(content.items())[:SHOWN]]
    more = f" and {len(content) - SHOWN} more" if len(content) > SHOWN else ""
    return f"a dict with {', '.join(entries)}{more}" if entries else "an empty dict"


# -- files of which no host holds the model ------------------------------------------------------
PIECE_NUMBERS = 2**24
"""What is read of a file at a time."""


@torch.library.custom_op("tpukit::read_tensor", mutates_args=())
def _read_tensor(file: str, name: str, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    with safe_open(file, "pt") as opened:
        shape = opened.get_slice(name).get_shape()
    found = torch.empty(shape, dtype=dtype, device=device)
    if device == torch.device("meta"):
        return found
    rows = max(1, PIECE_NUMBERS * shape[0] // max(1, found.numel())) if shape else 1
    for start in range(0, shape[0] if shape else 1, rows):
        # opened for each: pages of a mapped file count as this process's until it is closed
        with safe_open(file, "pt") as opened:
            if shape:
                found[start : start + rows] = opened.get_slice(name)[start : start + rows]
            else:
                found.copy_(opened.get_tensor(name))
    return found


def read_tensor(file: Path, name: str, dtype: torch.dtype) -> Tensor:
    """A tensor of a safetensors file, on the CPU. Where a model is made later, so is it: this is an
    operator that makes tensors, as `torch.empty` is one."""
    found: Tensor = _read_tensor(str(file), name, dtype=dtype, device=torch.device("cpu"))
    return found


def tensor_names(file: Path) -> list[str]:
    """The tensors of a file."""
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def are_made_later() -> bool:
    """Whether large tensors have no values yet: of a model that no host holds."""
    return is_made_later(torch.empty(2**20))


# -- for code that knows nothing of tpukit -------------------------------------------------------
WEIGHTS_FILE, README_FILE = "model.safetensors", "README.md"


def export(
    task: Task, weights: Mapping[str, Tensor], artifacts: Mapping[str, bytes], folder: Path
) -> list[Path]:
    """The task's own export of a run, or its model's state dict with a README; the files."""
    if overrides(task, "export"):
        return task.export(weights, artifacts, folder)
    state = task.plain_model(weights).state_dict()
    others = others_of(state)
    tensors = {name: value for name, value in state.items() if name not in others}
    extra = {EXTRA_FILE: pack_state(state)} if others else {}
    text = readme(task, tensors, artifacts, has_extra=bool(others))
    return write_export(folder, tensors, {**extra, **artifacts, README_FILE: text.encode()})


def write_export(
    folder: Path, tensors: Mapping[str, Tensor], contents: Mapping[str, bytes]
) -> list[Path]:
    """Writes `model.safetensors` and further files by name, each atomically; their paths.

    Tensors that share memory (tied weights) are written whole under each name. Raises `DataError`
    where the folder cannot be written.
    """
    whole = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    with writing_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS_FILE) as partial:
            save_file(whole, partial, {"format": "pt"})
        for name, content in contents.items():
            write_file(folder / name, content)
    return [folder / name for name in (WEIGHTS_FILE, *contents)]


def arguments_of(task: Task) -> dict[str, Any]:
    """The arguments that a task object was made with."""
    if dataclasses.is_dataclass(task):
        given = (field.name for field in dataclasses.fields(task) if field.init)
        return {name: getattr(task, name) for name in given}
    return dict(task.given_settings)


def settings_of(task: Task) -> dict[str, Any]:
    """Those arguments of a task object that a config file can hold."""
    return recordable(arguments_of(task))


def recordable(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a config file can hold, paths as texts."""
    plain = {n: str(v) if isinstance(v, Path) else v for n, v in given.items()}
    return {n: v for n, v in plain.items() if has_form(v)}


def readme(
    task: Task,
    tensors: Mapping[str, Tensor],
    artifacts: Mapping[str, bytes],
    *,
    has_extra: bool = False,
) -> str:
    """How to load an exported state dict, with and without tpukit."""
    state, imports = f'load_file("{WEIGHTS_FILE}")', "from safetensors.torch import load_file"
    if has_extra:
        state = f'{{**{state}, **torch.load("{EXTRA_FILE}", weights_only=True)}}'
        imports = f"import torch\n{imports}"
    cls = type(task)
    file, _, _ = (cls.source or "").rpartition(":")
    module = Path(file).stem if file.endswith(".py") else cls.__module__
    settings = ", ".join(f"{name}={value!r}" for name, value in settings_of(task).items())
    count = sum(tensor.numel() for tensor in tensors.values())
    kept = f"- `{EXTRA_FILE}`: the entries of that state dict beside tensors\n" * has_extra
    kept += "".join(f"- `{name}`: for `{cls.__name__}.restore`\n" for name in artifacts)
    return f"""# Weights of a run of task `{task.name}`

- `{WEIGHTS_FILE}`: the best (EMA) weights, {count:,} values, as the state dict of the module that \
`{cls.__name__}.build_model` returns
{kept}
With PyTorch alone, where `model` is that module, built by your own code:

```python
{imports}
model.load_state_dict({state})
model.eval()
```

With the task class{f" (`{cls.source}`)" if file.endswith(".py") else ""}:

```python
{imports}
from {module} import {cls.__name__}
model = {cls.__name__}({settings}).plain_model({state})
```
"""
