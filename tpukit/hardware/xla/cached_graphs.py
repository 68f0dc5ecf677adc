"""torch_xla's private functions that find a traced graph's arguments and run its program again.

They are those of its bridge to Dynamo, of 2.8 and 2.9. No other module calls them for this: where
one is missing, ImportError says which.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from _XLAC import (
    _check_device_tensor_need_materialization,
    _check_tensor_need_materialization,
    _get_base_seed_as_tensor,
    _get_graph_hash,
    _get_seed_info_id,
    _get_tensors_handle,
    _get_tensors_xla_device_data_node,
    _get_xla_sharding_specs,
    _replace_xla_tensor,
    _run_cached_graph,
    _set_buffer_donation,
    _xla_get_tensor_id,
    _xla_warm_up_cache,
)
from torch import Tensor
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

MOST_DRAWS = 100_000
"""Maximum number of random operators in a step."""
MODULO = 2**64
LOST = "Failed to get computation by hash"
"""torch_xla's error for a program that its cache has dropped."""


class StaleProgramError(Exception):
    """Why a recorded step is to be traced again, found before anything has run."""


# -- tensors ---------------------------------------------------------------------------------------
def handles(tensors: Sequence[Tensor]) -> list[int]:
    """A number for each tensor's buffer, once `wait` has returned; tensors that share one have the
    same."""
    return _get_tensors_handle(tensors)  # type: ignore[no-any-return]


def buffers(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The buffers themselves. While they are held, no other has their `handles`. A traced step
    overwrites none of them, unless each is `put` into its tensor."""
    return _get_tensors_xla_device_data_node(tensors)[1]  # type: ignore[no-any-return]


def shardings(tensors: Sequence[Tensor]) -> list[str]:
    """How each is split over several devices: a program takes no other split, and does not look."""
    if _is_one_device():
        return []
    return _get_xla_sharding_specs(tensors)  # type: ignore[no-any-return]


@cache
def _is_one_device() -> bool:
    return bool(xr.global_runtime_device_count() == 1)


def are_pending(tensors: Sequence[Tensor]) -> list[bool]:
    """Which are results of a graph that has not run."""
    return _check_tensor_need_materialization(tensors)  # type: ignore[no-any-return]


def pending_count(device: str) -> int:
    """Number of such tensors on the device, those that Python does not know too."""
    return sum(_check_device_tensor_need_materialization(device))


def number_of(tensor: Tensor) -> int:
    """Tensors of one number are one for torch_xla, as an alias and its original are."""
    return _xla_get_tensor_id(tensor)  # type: ignore[no-any-return]


def put(tensor: Tensor, value: Tensor) -> None:
    """Gives a tensor another's buffer; what is an alias or a view of it is made anew when used."""
    _replace_xla_tensor(tensor, value)
    torch._functionalize_commit_update(tensor)
    torch._functionalize_sync(tensor)


def read_count() -> tuple[int, int]:
    """How often values, and how often operators, have left the device."""
    read = met.metric_data("TransferFromDeviceTime")
    left = (met.counter_value(n) for n in met.counter_names() if n.startswith("aten::"))
    return read[0] if read else 0, sum(left)


# -- graphs ----------------------------------------------------------------------------------------
def graph_arguments(results: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
    """The `buffers` that a pending graph takes, and which of them are seeds of the generator."""
    numbers, values = _get_tensors_xla_device_data_node(results)
    seed = _get_seed_info_id()
    return values, [number == seed for number in numbers]


def donate(value: Tensor, donated: bool) -> None:
    """Whether the next program compiled may write its results into this argument's buffer."""
    _set_buffer_donation(value, donated)


def graph_hash(results: Sequence[Tensor]) -> bytes:
    """A hash of a pending graph, whatever it may overwrite."""
    # The first one may mark nodes as sharded whose hash was taken already.
    _get_graph_hash(results)
    return _get_graph_hash(results)  # type: ignore[no-any-return]


def compiled(results: Sequence[Tensor]) -> bytes:
    """Compiles a pending graph, unless it is in torch_xla's cache; the hash that it has there."""
    with alias_with_buffer_donor_config():
        found = graph_hash(results)
        _xla_warm_up_cache(results, [])
    return found


def wait() -> None:
    """Waits until what was executed has results; without the GIL, which `execute` would hold."""
    xm.wait_device_ops()


def execute(program: bytes, arguments: Sequence[Tensor]) -> list[Tensor]:
    """The results of a compiled graph, once `wait` has returned. Raises StaleProgramError."""
    try:
        return _run_cached_graph(program, arguments)  # type: ignore[no-any-return]
    except RuntimeError as error:
        if LOST not in str(error):
            raise
        raise StaleProgramError("torch_xla's cache of programs") from error


# -- the generator of random numbers ---------------------------------------------------------------
def after_sync(seed: int) -> int:
    """Its next state where `torch_xla.sync` finds this one."""
    return (1012031 + seed * 7012063) % MODULO


def after_draws(seed: int, draws: int) -> int:
    """Its state after a number of random operators."""
    for _ in range(draws):
        seed = (2531011 + 214013 * seed) % MODULO
    return seed


def draws_between(seed: int, state: int, *, synced: bool = False) -> int | None:
    """After how many random operators, and a sync where `synced`, the generator comes from `seed`
    to `state`; None: it was set."""
    for draws in range(MOST_DRAWS):
        if (after_sync(seed) if synced else seed) == state:
            return draws
        seed = after_draws(seed, 1)
    return None


def seed_on(device: str, seed: int) -> Tensor:
    """A seed as a graph takes it."""
    xm.set_rng_state(seed)
    return _get_base_seed_as_tensor(device)  # type: ignore[no-any-return]
