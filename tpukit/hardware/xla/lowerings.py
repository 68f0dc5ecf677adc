"""Operators that torch_xla lacks or computes wrongly, written with those it has.

Registered for XLA tensors alone, when a backend is opened: the CPU and GPUs see nothing of them.
Without them an operator would leave the device: the graph is cut, and a TPU waits.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch.library import Library
from torch.utils import checkpoint

from tpukit.hardware.dispatch_modes import with_views_on_xla
from tpukit.hardware.kernels.torch_attention import RUNNING, attention_under_autocast
from tpukit.hardware.xla.resize import RESIZES, pool_backward, resize, resize_backward, windows

aten = torch.ops.aten

BELOW_AUTOGRAD = (
    # torch_xla takes the output for the input: wrong gradients, in silence (elu, celu, selu)
    "elu_backward",
    # no lowering
    "bucketize.Tensor", "channel_shuffle", "col2im", "glu_backward", "huber_loss",
    "huber_loss_backward", "im2col", "isin.Tensor_Tensor", "linalg_cross", "logaddexp",
    "logit_backward", "logspace", "nansum", "sinc", "tril_indices", "triu_indices",
)  # fmt: skip
"""Taken from torch's table of decompositions; their gradients are torch's formulas."""

ABOVE_AUTOGRAD = ("_weight_norm_interface", "grid_sampler_2d", "multi_margin_loss")
"""Likewise, but their gradients are operators that torch_xla lacks too: they are differentiated as
they are written."""


@functools.cache
def register_lowerings() -> Any:
    """Registers everything below, once a process; what is returned keeps it registered."""
    with warnings.catch_warnings():
        # torch warns of each kernel that is replaced.
        warnings.simplefilter("ignore")
        return _registered()


def _registered() -> Any:
    # torch_xla puts a GRU of its own in its place, which needs packages that it does not install.
    torch.nn.GRU = torch.nn.modules.rnn.GRU  # type: ignore[misc]
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in BELOW_AUTOGRAD:
        _register(library, name, decomposition_table[_overload(name)], "XLA")
    for name in ABOVE_AUTOGRAD:
        _register(library, name, decomposition_table[_overload(name)], "AutogradXLA", "XLA")
    for name in RESIZES:
        _register(library, name, functools.partial(resize, name), "XLA")
        backward = functools.partial(resize_backward, name)
        _register(library, f"{name}_backward", backward, "XLA")
    for name, function in OWN.items():
        _register(library, name, function, "AutogradXLA", "XLA")
    for name, (function, *keys) in OVERRIDDEN.items():
        for key in keys:
            _override(library, name, function, key)
    if not hasattr(torch, "xla"):
        torch._register_device_module("xla", DeviceModule)  # type: ignore[no-untyped-call]
    library.impl("scaled_dot_product_attention", _attention, "AutocastXLA")
    # Selective checkpoints run the model's own code inside these.
    for mode in (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode):
        handler = with_views_on_xla(mode.__torch_dispatch__)
        mode.__torch_dispatch__ = handler  # type: ignore[method-assign]
    # Its loop over experts writes to slices (`out=`), which are copies on XLA: zeros, in silence.
    experts: Any = Library("transformers", "FRAGMENT")  # type: ignore[no-untyped-call]
    experts.impl("grouped_mm_fallback", _grouped_mm, "XLA")
    experts.impl("grouped_mm_fallback_backward", _grouped_mm_backward, "XLA")
    return library, experts


def _register(library: Any, name: str, function: Callable[..., Any], *keys: str) -> None:
    for key in keys:
        library.impl(name, _without_autocast(function), key, allow_override=True)


def _override(library: Any, name: str, function: Callable[..., Any], key: str) -> None:
    """Puts `function` in an operator's place; it is given what was there."""
    if hasattr(torch.library, "get_kernel"):
        original: Any = torch.library.get_kernel(f"aten::{name}", key)
    else:
        original = OriginalKernel(name, key)
        key = original.key
    replacement = functools.partial(function, original)
    if key == "BackendSelect":
        replacement = functools.partial(_on_xla, replacement, original)
    library.impl(name, replacement, key, with_keyset=True, allow_override=True)


def _on_xla(replacement: Any, original: Any, keys: Any, *arguments: Any, **options: Any) -> Any:
    chosen = replacement if keys.has(DispatchKey.XLA) else original.call_boxed
    return chosen(keys, *arguments, **options)


class OriginalKernel:
    """torch 2.8 has no `get_kernel`: a kernel that is replaced is reached through another key.

    Autograd's is the same one under `AutogradOther`. torch_xla's is called by a replacement at
    `BackendSelect`, which every device's tensors pass before their own key. Its max_pool2d has an
    autograd of its own: with indices, which nobody reads, the program is the same.
    """

    def __init__(self, name: str, key: str) -> None:
        self.with_indices = name == "max_pool2d"
        self.operator = _overload(f"{name}_with_indices" if self.with_indices else name)
        self.key = "BackendSelect" if key == "XLA" else key

    def call_boxed(self, keys: Any, *arguments: Any, **options: Any) -> Any:
        """Calls it, as torch 2.9's kernels are called."""
        keys = keys.remove(getattr(DispatchKey, self.key))
        if self.key != "BackendSelect":
            keys = keys.add(DispatchKey.AutogradOther)
        found = self.operator.redispatch(keys, *arguments, **options)
        return found[0] if self.with_indices else found


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator in its inputs' own precision, whatever it is written with."""

    def plain(*arguments: Any, **options: Any) -> Any:
        with torch.autocast("xla", enabled=False):
            return function(*arguments, **options)

    return plain


def fallback_counts() -> dict[str, int]:
    """How often each operator (`aten::nonzero`) left the device so far."""
    names = (name for name in met.counter_names() if name.startswith("aten::"))
    return {name: int(met.counter_value(name)) for name in names}


class DeviceModule:
    """What torch.utils.checkpoint asks of a device: its random generator."""

    _initialized = True

    @staticmethod
    def device(index: int) -> nullcontext[None]:
        return nullcontext()

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_rng_state(device: Any = None) -> int:
        return int(xm.get_rng_state())

    @staticmethod
    def set_rng_state(state: int, device: Any = None) -> None:
        xm.set_rng_state(state)


def _attention(*tensors: Any, **options: Any) -> Tensor:
    return attention_under_autocast("xla", RUNNING.get(), *tensors, **options)


# -- written here --------------------------------------------------------------------------------
def _complex(real: Tensor, imaginary: Tensor) -> Tensor:
    return torch.view_as_complex(torch.stack([real, imaginary], -1))


def _polar(length: Tensor, angle: Tensor) -> Tensor:
    return _complex(length * angle.cos(), length * angle.sin())


def _cdist(one: Tensor, other: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    distances: Tensor = torch.linalg.vector_norm(one.unsqueeze(-2) - other.unsqueeze(-3), p, -1)
    return distances


def _searchsorted(
    sorted_sequence: Tensor, values: Tensor, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    edges, sought = sorted_sequence.unsqueeze(-2), values.unsqueeze(-1)
    before = edges <= sought if right or side == "right" else edges < sought
    return before.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    wide = values.flatten().float()
    low, high = torch.as_tensor([min, max], dtype=torch.float32, device=values.device)
    if min == max:
        low, high = wide.aminmax()
        low, high = torch.where(low == high, low - 1, low), torch.where(low == high, high + 1, high)
    places = ((wide - low) * bins / (high - low)).floor()
    places = torch.where(wide == high, bins - 1, places)
    numbers = torch.arange(bins, device=values.device)
    counts: Tensor = (places[:, None] == numbers).sum(0, dtype=values.dtype)
    return counts


def _grouped_mm(
    one: Tensor, other: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Each group's product over all rows: which rows are whose is not known when it is compiled.

    offs: the ends of the groups (int32): in the rows of `one` (S, K), in the columns of `other`
    (K, N), or in the dimension that (M, K) and (K, N) share. What follows the last end is zero.
    """
    if offs is None:
        return torch.bmm(one, other)
    kind = (one.ndim, other.ndim)
    length = {(2, 3): one.shape[0], (3, 2): other.shape[-1], (2, 2): one.shape[-1]}[kind]
    places = torch.arange(length, device=one.device)
    starts = torch.cat([torch.zeros_like(offs[:1]), offs[:-1]])
    members = ((places >= starts[:, None]) & (places < offs[:, None])).to(one.dtype)
    if kind == (2, 2):
        return torch.stack([(one * of_group) @ other for of_group in members])
    if kind == (3, 2):
        parts = [each @ (other * of_group) for each, of_group in zip(one, members, strict=True)]
    else:
        parts = [
            (one * of_group[:, None]) @ each for each, of_group in zip(other, members, strict=True)
        ]
    product: Tensor = functools.reduce(torch.add, parts)
    return product


def _grouped_mm_backward(
    one: Tensor, other: Tensor, offs: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    return _grouped_mm(gradient, other.mT, offs), _grouped_mm(one.T, gradient, offs)


def _unfold(tensor: Tensor, dimension: int, size: int, step: int) -> Tensor:
    starts = torch.arange(0, tensor.shape[dimension] - size + 1, step, device=tensor.device)
    index = starts[:, None] + torch.arange(size, device=tensor.device)
    dimension %= tensor.ndim
    found = tensor.index_select(dimension, index.flatten())
    return torch.unflatten(found, dimension, index.shape).movedim(dimension + 1, -1)


def _adaptive_max_pool2d(image: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    width = image.shape[-1]
    found = []
    for top, bottom in windows(image.shape[-2], output_size[0]):
        for left, right in windows(width, output_size[1]):
            value, at = image[..., top:bottom, left:right].flatten(-2).max(-1)
            row, column = at // (right - left), at % (right - left)
            found.append((value, (top + row) * width + left + column))
    values, places = (torch.stack(each, -1) for each in zip(*found, strict=True))
    return torch.unflatten(values, -1, output_size), torch.unflatten(places, -1, output_size)


class _Product(torch.autograd.Function):
    """rows (..., inputs) and weight (outputs, inputs) to (..., outputs), over all leading
    dimensions at once: flattened rows have to lie one after the other, and those of the attention
    kernel are copied for that, forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return torch.einsum("...i,oi->...o", rows, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight = ctx.needs_input_grad
        return (
            torch.einsum("...o,oi->...i", gradient, weight) if of_rows else None,
            torch.einsum("...o,...i->oi", gradient, rows) if of_weight else None,
        )


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if rows.ndim < 3 or weight.ndim < 2:
        flat = torch.matmul(rows, weight.t())
        return flat if bias is None else flat + bias
    product: Tensor = _Product.apply(rows, weight)  # type: ignore[no-untyped-call]
    return product if bias is None else product + bias


class _LayerNorm(torch.autograd.Function):
    """torch_xla's is a batch norm of the rows, whose backward pass moves a third more bytes.

    The statistics are made again from the input, which XLA finds to be the same: second derivatives
    go through them.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor | None, bias: Tensor | None, last: int, eps: float
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.last, ctx.eps = last, eps
        normed, _, _ = _normalised(rows, last, eps)
        normed = normed if weight is None else normed * weight
        return normed if bias is None else normed + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        normed, _, scale = _normalised(rows, ctx.last, ctx.eps)
        inner = gradient if weight is None else gradient * weight
        own, leading = _last(ctx.last), tuple(range(rows.ndim - ctx.last))
        shared = inner.mean(own, True) + normed * (inner * normed).mean(own, True)
        _, with_weight, with_bias, _, _ = ctx.needs_input_grad
        return (
            scale * (inner - shared),
            _summed(gradient * normed, leading) if with_weight else None,
            _summed(gradient, leading) if with_bias else None,
            None,
            None,
        )


def _summed(tensor: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    return tensor.sum(dimensions) if dimensions else tensor


def _last(count: int) -> tuple[int, ...]:
    return tuple(range(-count, 0))


def _normalised(rows: Tensor, last: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The rows with mean 0 and variance 1 over their last dimensions, the mean, 1 / deviation.

    Mean and mean square need one look at the rows, as in XLA's own batch norm.
    """
    mean, square = rows.mean(_last(last), True), rows.square().mean(_last(last), True)
    scale = ((square - mean.square()).clamp(min=0.0) + eps).rsqrt()
    return (rows - mean) * scale, mean, scale


def _native_layer_norm(
    rows: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
    found = _LayerNorm.apply(wide, weight, bias, len(shape), eps)  # type: ignore[no-untyped-call]
    _, mean, scale = _normalised(wide.detach(), len(shape), eps)
    return found.to(rows.dtype), mean, scale


OWN: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "native_layer_norm": _native_layer_norm,
    "adaptive_max_pool2d": _adaptive_max_pool2d,
    "unfold": _unfold,
    "complex": _complex,
    "polar": _polar,
    "cdist": _cdist,
    "searchsorted.Tensor": _searchsorted,
    "histc": _histc,
    "_grouped_mm": _grouped_mm,
    # nn.TransformerEncoder would pack its rows into nested tensors
    "_nested_tensor_from_mask_left_aligned": lambda tensor, mask: False,
}
"""What torch has no decomposition of; differentiated as it is written."""


# -- where torch_xla's own is right for some arguments only --------------------------------------
def _index_put_(
    original: Any, keys: Any, target: Tensor, indices: Sequence[Tensor | None], values: Tensor,
    accumulate: bool = False, *rest: Any,
) -> Tensor:  # fmt: skip
    """A mask in place of indices selects: how many it selects need not be known."""
    *leading, mask = indices
    if not (
        mask is not None
        and mask.dtype == torch.bool
        and not accumulate
        and all(index is None for index in leading)
        and (values.numel() == 1 or values.ndim <= target.ndim - mask.ndim - len(leading))
    ):
        original.call_boxed(keys, target, indices, values, accumulate, *rest)
        return target
    trailing = target.ndim - mask.ndim - len(leading)
    chosen = mask.reshape(*[1] * len(leading), *mask.shape, *[1] * trailing)
    return target.copy_(torch.where(chosen, values.to(target.dtype), target))


def _native_batch_norm(
    original: Any, keys: Any, image: Tensor, weight: Tensor | None, bias: Tensor | None,
    mean: Tensor | None, variance: Tensor | None, training: bool, momentum: float, eps: float,
) -> Any:  # fmt: skip
    """torch_xla's running variance is of the rows as if they were all there are."""
    found = original.call_boxed(keys, image, weight, bias, mean, variance, training, momentum, eps)
    if training and variance is not None:
        others = image.numel() // image.shape[1] - 1
        of_rows = found[2].reciprocal().square() - eps
        variance.add_(of_rows * (momentum / max(1, others)))
    return found


def _native_batch_norm_backward(original: Any, keys: Any, *arguments: Any) -> Any:
    """torch_xla's is of training alone: it looks for the batch's statistics."""
    if arguments[7]:
        return original.call_boxed(keys, *arguments)
    return decomposition_table[aten.native_batch_norm_backward.default](*arguments)


def _avg_pool2d_backward(
    original: Any, keys: Any, gradient: Tensor, image: Tensor, kernel: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], ceil_mode: bool, include_pad: bool,
    divisor: int | None,
) -> Any:  # fmt: skip
    """torch_xla's leaves the device where windows reach over the edge."""
    if not ceil_mode or divisor is not None:
        return original.call_boxed(
            keys, gradient, image, kernel, stride, padding, ceil_mode, include_pad, divisor
        )
    return pool_backward(gradient, image.shape, kernel, stride, padding, include_pad=include_pad)


def _max_pool2d(
    original: Any, keys: Any, image: Tensor, kernel: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> Any:  # fmt: skip
    """torch_xla's takes no image that is smaller than the window, as ceil_mode allows."""
    sides = ((each[0], each[-1]) for each in (image.shape[-2:], kernel, padding, dilation))
    down, right = (max(0, d * (k - 1) + 1 - n - 2 * p) for n, k, p, d in zip(*sides, strict=True))
    if ceil_mode and (down or right):
        image = torch.nn.functional.pad(image, (0, right, 0, down), value=-torch.inf)
    return original.call_boxed(keys, image, kernel, stride, padding, dilation, ceil_mode)


def _expand(
    original: Any, keys: Any, tensor: Tensor, size: Sequence[int], *, implicit: bool = False
) -> Tensor:
    """Indices remember what they repeat, for `_gather`."""
    expanded: Tensor = original.call_boxed(keys, tensor, size, implicit=implicit)
    if tensor.dtype == torch.int64 and tensor.shape[-2:] == expanded.shape[-2:]:
        expanded.repeated = tensor  # type: ignore[attr-defined]
    return expanded


def _gather(
    original: Any, keys: Any, values: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False
) -> Tensor:
    """Places that are the same in every matrix of a batch are taken by a product with ones and
    zeros, which is exact in bfloat16: a gather moves single numbers, and its gradient scatters
    them. DeBERTa's relative positions moved 20 times the bytes of the rest of its step."""
    places: Tensor | None = getattr(index, "repeated", None)
    if (
        places is None
        or values.dtype != torch.bfloat16
        or not dim % values.ndim == values.ndim - 1 == 2
        or values.shape[:2] != index.shape[:2]
        or places.numel() != index[0].numel()
    ):
        taken: Tensor = original.call_boxed(keys, values, dim, index, sparse_grad=sparse_grad)
        return taken
    places = places.reshape(index.shape[1:])
    numbers = torch.arange(values.shape[-1], device=values.device)
    chosen = (places.unsqueeze(-1) == numbers).to(values.dtype)
    return torch.einsum("nlk,lmk->nlm", values, chosen)


def _with_dtype(
    original: Any, keys: Any, tensor: Tensor, *rest: Any, dtype: torch.dtype | None = None
) -> Any:
    """torch_xla forgets the dtype of a parameter that is sent, or written by a recorded program or
    `addcdiv_`, and without one a reduction is another program: the second step of each shape would
    be compiled again."""
    if dtype is None and tensor.is_floating_point():
        dtype = tensor.dtype
    return original.call_boxed(keys, tensor, *rest, dtype=dtype)


def _of_cast(original: Any, keys: Any, tensor: Tensor, *rest: Any) -> Any:
    """Likewise, where no dtype is an argument."""
    return original.call_boxed(keys, aten._to_copy(tensor, dtype=tensor.dtype), *rest)


REDUCTIONS = (
    "sum",
    "sum.dim_IntList",
    "mean",
    "mean.dim",
    "prod",
    "prod.dim_int",
    "cumsum",
    "cumprod",
)
REDUCTIONS_WITHOUT_DTYPE = ("_softmax", "_log_softmax", "norm.ScalarOpt_dim")
OVERRIDDEN: dict[str, tuple[Any, ...]] = {
    "expand": (_expand, "AutogradXLA"),
    "gather": (_gather, "AutogradXLA"),
    "index_put_": (_index_put_, "AutogradXLA", "XLA"),
    "avg_pool2d_backward": (_avg_pool2d_backward, "XLA"),
    "max_pool2d": (_max_pool2d, "AutogradXLA"),
    **dict.fromkeys(REDUCTIONS, (_with_dtype, "XLA")),
    **dict.fromkeys(REDUCTIONS_WITHOUT_DTYPE, (_of_cast, "XLA")),
    "native_batch_norm": (_native_batch_norm, "XLA"),
    "native_batch_norm_backward": (_native_batch_norm_backward, "XLA"),
}
"""Each with the dispatch keys it is registered for."""
