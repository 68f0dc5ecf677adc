"""A task's model whose parameters have a shape and no memory, for what is traced, not executed."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import nn

from tpukit.hardware.backend import ModelOps
from tpukit.train.task import Task
from tpukit.train.weights import built_model


def unfilled_model(task: Task, ops: ModelOps) -> nn.Module:
    """The model, without storage unless its constructor reads weights."""
    try:
        with without_storage():
            return built_model(task, ops)
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
    return built_model(task, ops)


@contextmanager
def without_storage() -> Iterator[None]:
    """Parameters that modules register inside have a shape and no storage; buffers are real.

    Ties between parameters stay: a parameter that has no storage already is left as it is.
    """
    register = nn.Module.register_parameter

    def register_shape(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.data.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", register_shape):
        yield
