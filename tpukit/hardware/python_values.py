"""Values of Python as a step reads them: whose they are, and whether they are the same."""

import io
import pickle
import random
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from operator import length_hint
from pathlib import PurePath
from types import GeneratorType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from tpukit.io.code_owner import is_model_code

NO_SETTINGS = (
    "IPython.", "_io.", "asyncio.", "concurrent.", "ipykernel.", "jax.", "logging.",
    "multiprocessing.", "threading.", "torch._", "torch.distributed.", "torch.fx.", "torch.utils.",
    "torch_tpu.", "torch_xla.", "tpukit.", "tqdm.", "traitlets.",
)  # fmt: skip
"""Beginnings of the names of modules whose objects change by themselves."""
PLAIN = (
    bool, type(None), int, float, str, bytes, complex, np.generic, PurePath, range, slice,
    torch.dtype, torch.device, torch.layout,
)  # fmt: skip
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
MOST_BYTES = 1 << 24
"""Maximum size of an array that is compared as a whole."""
SAMPLED = 1 << 14
"""Number of entries of a larger one that are compared."""


MISSING = object()


def entry_name(name: str, key: Any) -> str:
    """The name of an entry. Tensors, an optimizer's keys, would be computed to be written out."""
    return f"{name}.{key if isinstance(key, str | int) else type(key).__name__}"


# -- whose it is ----------------------------------------------------------------------------------
@cache
def of_user(module: str | None) -> bool:
    """Whether a module is of the user's code, or of a task."""
    if module == "builtins" or module in sys.builtin_module_names:
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return is_model_code(file)


@cache
def is_of_library(kind: Any) -> bool:
    """Whether objects of a class are a library's own, other than the parts of a model."""
    known = issubclass(kind, (nn.Module, Optimizer, Tensor)) or kind.__module__ == "builtins"
    return not known and not of_user(kind.__module__)


@cache
def is_namespace(kind: Any) -> bool:
    """Whether a library's objects hold what a user gives them, other namespaces too."""
    return _is_mapping(kind) or issubclass(kind, (Sequence, Namespace, SimpleNamespace))


@cache
def is_data_set(kind: Any) -> bool:
    """Whether objects of a class are samples, by number."""
    if issubclass(kind, (Dataset, DataLoader)):
        return True
    is_sized = _defines(kind, "__getitem__") and _defines(kind, "__len__")
    return is_sized and not _is_mapping(kind) and not issubclass(kind, (Sequence, nn.Module))


@cache
def is_settings(kind: Any) -> bool:
    """Whether a step may read the attributes of such objects: they are no data set."""
    if issubclass(kind, (nn.Module, Optimizer)):
        return True
    changes = not of_user(kind.__module__) and f"{kind.__module__}.".startswith(NO_SETTINGS)
    return not changes and kind.__module__ != "builtins" and not is_data_set(kind)


def _is_mapping(kind: Any) -> bool:
    # ml_collections.ConfigDict is none by its class; a DataFrame has keys too, and is data.
    is_config = _defines(kind, "keys") and _defines(kind, "__setattr__")
    return issubclass(kind, Mapping) or (is_config and not _defines(kind, "iloc"))


def _defines(kind: Any, name: str) -> bool:
    """Whether its objects have a method. A class of an Enum has more, of its metaclass."""
    return any(name in vars(each) for each in kind.__mro__ if each is not object)


# -- whether it is the same -----------------------------------------------------------------------
def same(before: Any, now: Any) -> bool:
    """Whether a step cannot tell two values apart: 1 and 1.0 it can, NaN and NaN not."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, tuple):
        return len(before) == len(now) and all(map(same, before, now))
    return isinstance(before, PLAIN) and repr(before) == repr(now)


def is_buffer(value: Any) -> bool:
    """Whether it is an array, of NumPy or another."""
    try:
        memoryview(value).release()
    except (TypeError, ValueError, BufferError):
        return isinstance(value, np.ndarray)
    return True


def mark(value: Any) -> Any:
    """What is equal for as long as an array, a generator or an iterator is in the same state."""
    if isinstance(value, Tensor):
        with suppress(RuntimeError, TypeError, NotImplementedError):  # has no memory of its own
            flat = _sampled(value.detach().reshape(-1), value.element_size())
            return flat.contiguous().view(torch.uint8).numpy().tobytes()
        return None
    if isinstance(value, np.ndarray):
        objects = value.dtype.hasobject
        flat = value.reshape(-1)
        return [*map(id, flat)] if objects else _sampled(flat, value.itemsize).tobytes()
    if type(value) in GENERATORS:
        return pickle.dumps(_state(value))
    return _position(value) if isinstance(value, Iterator) else _content(value)


def _content(buffer: Any) -> bytes:
    if memoryview(buffer).nbytes <= MOST_BYTES:
        return bytes(buffer)
    return bytes(_sampled(np.frombuffer(buffer, np.uint8), 1))


def _sampled(flat: Any, entry_bytes: int) -> Any:
    size = len(flat)
    return flat if size * entry_bytes <= MOST_BYTES else flat[:: max(1, size // SAMPLED)]


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = generator.get_state()
    return state.numpy() if isinstance(state, Tensor) else state


def set_state(generator: Any, marked: bytes) -> None:
    """Sets a random generator to what `mark` found."""
    state = pickle.loads(marked)
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        is_of_torch = isinstance(generator, torch.Generator)
        generator.set_state(torch.from_numpy(state) if is_of_torch else state)


def held_in(iterator: Any) -> dict[str, Any]:
    """What a generator function's iterator holds: it stands at the same place in each round."""
    if not isinstance(iterator, GeneratorType) or iterator.gi_frame is None:
        return {}
    return {**iterator.gi_frame.f_locals, "from": iterator.gi_yieldfrom}


def _position(value: Iterator[Any]) -> Any:
    """How far an iterator is; one that cannot say is never where it was."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        held = frame.f_locals.items() if frame else ()
        return [(name, each if isinstance(each, PLAIN) else id(each)) for name, each in held], (
            frame.f_lasti if frame else None
        )
    if hasattr(value, "__dict__") or isinstance(value, io.IOBase):
        return None  # its attributes say it; what a file holds is data
    if (left := length_hint(value, -1)) >= 0:
        return left
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.14 has no such pickles
        try:
            return pickle.dumps(value)
        except Exception:  # whatever its parts raise
            return object()
