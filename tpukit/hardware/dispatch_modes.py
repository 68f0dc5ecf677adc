"""Dispatch modes (`TorchDispatchMode`) around tensors of torch_xla."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


def with_views_on_xla(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A mode's `__torch_dispatch__` inside which new tensors on XLA have views.

    torch_xla's views are functionalization's, which torch leaves out below a handler. What was made
    there (`torch.zeros`) had none: writes to its slices were lost, its rows were all the first one.
    """

    @functools.wraps(handler)
    def handled(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = handler(self, func, types, args, kwargs or {})
        if any(isinstance(leaf, Tensor) and _is_bare(leaf) for leaf in tree_leaves((args, kwargs))):
            return made  # functionalization has called, and takes it
        return tree_map_only(Tensor, _with_views, made)

    return handled


def _is_bare(tensor: Tensor) -> bool:
    return tensor.device.type == "xla" and not torch._is_functional_tensor(tensor)


def _with_views(tensor: Tensor) -> Tensor:
    return torch._to_functional_tensor(tensor) if _is_bare(tensor) else tensor
