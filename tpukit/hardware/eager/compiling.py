"""torch.compile of eager models: a program for each shape, and a word where Dynamo stops."""

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

SHAPES = 64
"""Programs of one forward pass. Dynamo's own 8 are fewer than training and validation may need;
beyond its limit each new shape runs uncompiled."""


_COMPILED = ContextVar("compiled", default=False)
_RECORDED = ContextVar("recorded", default=False)


class LimitReached(logging.Filter):
    """Prints a line the first time that Dynamo stops compiling, in place of its page each time."""

    hits = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if "recompile_limit" not in str(record.args) + str(record.msg):
            return True
        self.hits += 1
        if self.hits == 1:
            print(
                f"Warning: {SHAPES} shapes of batches were compiled: further ones run uncompiled,"
                " and slower. Give batches fewer shapes, or train with --no-compile.",
                file=sys.stderr,
                flush=True,
            )
        return False


LIMIT_REACHED = LimitReached()


@contextmanager
def _true(state: ContextVar[bool]) -> Iterator[None]:
    token = state.set(True)
    try:
        yield
    finally:
        state.reset(token)


def uncompiled_passes() -> AbstractContextManager[None]:
    """Forward passes within the context run uncompiled: they are part of a larger program."""
    return _true(_RECORDED)


def is_recorded() -> bool:
    """Whether operations become part of a program and are not computed yet."""
    return _RECORDED.get()


def compiled_passes() -> AbstractContextManager[None]:
    """Forward passes within the context run compiled."""
    return _true(_COMPILED)


def compile_forward(model: nn.Module, *, every_pass: bool) -> None:
    """Has a model's forward pass compiled, in place, for each shape of its inputs.

    every_pass: outside of `compiled_passes` too.
    """
    # A second's import, which eager runs do without.
    config: Any = importlib.import_module("torch._dynamo.config")
    config.recompile_limit = max(config.recompile_limit, SHAPES)
    _avoid_wrong_gradients()
    logging.getLogger("torch._dynamo.convert_frame").addFilter(LIMIT_REACHED)
    # `--precision` has decided it.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    eager: Any = model._call_impl
    call = eager
    if type(model).__module__.startswith("torch."):
        # Dynamo passes over the frames of torch's own modules: nn.Sequential would run as it is.
        external: Any = importlib.import_module("torch._dynamo.external_utils")
        call = external.wrap_inline(call)
    compiled = torch.compile(call, dynamic=False)

    def forward(*arguments: Any, **keywords: Any) -> Any:
        wanted = (every_pass or _COMPILED.get()) and not _RECORDED.get()
        return (compiled if wanted else eager)(*arguments, **keywords)

    # As `model.compile` does.
    model._compiled_call_impl = forward


def _avoid_wrong_gradients() -> None:
    """Switches off the fused reductions that make gradients of wrong shapes or values.

    torch 2.10 to 2.13 fuse the gradients of a norm's input and weight so: pytorch #178080, #193061.
    """
    triton: Any = importlib.import_module("torch._inductor.config").triton
    if hasattr(triton, "mix_order_reduction"):
        triton.mix_order_reduction = False


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0
