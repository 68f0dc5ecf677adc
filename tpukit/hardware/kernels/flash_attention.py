"""The TPU's fused attention (`pallas_attention`), forward and backward, for both stacks.

Each stack makes a kernel an operation of its graph in its own way. The emulation on CPU runs them
where it is asked to (`EMULATED_KERNELS`), in JAX's interpreter. Needs jax.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILES = (512, 256, 128)
"""Sizes of a tile of scores in tokens; the largest that divides their number is taken."""
MOST_BYTES = 2**20
"""Maximum bytes of one head of one tensor; six of them, double-buffered, and an accumulator fit
into 16 MiB of VMEM."""
WIDE_BYTES, WIDEST_BYTES = 256, 512
"""Maximum bytes of one head of one token for tiles of 512, whose sums exceed VMEM beyond it, and in
16 bits for the others (in 32, the backward pass exceeds VMEM with fewer tokens)."""
MOST_PAIRS = 2**18
"""Maximum queries x keys of a head with a bias; bias and gradient are double-buffered too."""
SUBLANES = 16
"""Number of rows of a bfloat16 vector register."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function of `pallas_attention`."""

    function: str
    causal: bool
    packed: bool = False
    interpret: bool = False

    def __call__(self, *arrays: Any) -> Any:
        """The function on JAX's arrays."""
        from tpukit.hardware.kernels import pallas_attention

        function = getattr(pallas_attention, self.function)
        tiles = tiles_of(arrays[0].shape[2] * arrays[0].dtype.itemsize)
        return function(*arrays, tiles=tiles, causal=self.causal, packed=self.packed,
                        interpret=self.interpret)  # fmt: skip


Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
Call = Callable[[Kernel, Sequence[Tensor]], list[Tensor]]
"""Runs a kernel, its arguments and results as `pallas_attention` has them."""


def fits(
    query: Tensor, key: Tensor, bias: Tensor | None = None, starts: Tensor | None = None, *,
    causal: bool,
) -> bool:  # fmt: skip
    """Whether the kernels take these shapes: whole tiles, a head that the core can hold, one bias
    for all rows or the starts of causal attention."""
    if starts is not None and (bias is not None or not causal):
        return False
    heads, queries, width = query.shape[1:]
    keys = key.shape[-2]
    token = width * query.element_size()
    whole = queries % TILES[-1] == keys % TILES[-1] == width % SUBLANES == 0
    widest = WIDEST_BYTES if query.element_size() == 2 else WIDE_BYTES
    held = token <= widest and token * max(queries, keys) <= MOST_BYTES
    if bias is not None:
        held = held and bias.shape == (1, heads, queries, keys) and queries * keys <= MOST_PAIRS
    return whole and held and (queries == keys or not causal)


def tiles_of(token_bytes: int) -> tuple[int, ...]:
    """The tiles for a head of this number of bytes a token."""
    return TILES if token_bytes <= WIDE_BYTES else TILES[1:]


def share_of_tiles(query: Tensor, *, causal: bool) -> float:
    """The part of the score tiles that is computed: a causal kernel leaves out those above the
    diagonal."""
    queries, width = query.shape[-2:]
    sizes = tiles_of(width * query.element_size())
    tiles = queries // next(size for size in sizes if queries % size == 0)
    return (tiles + 1) / (2 * tiles) if causal else 1.0


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    starts: Tensor | None = None,
    call: Call,
) -> Tensor:
    """softmax(query key^T / sqrt(width) + bias) value on a TPU (or in a trace for one).

    query (batch, heads, queries, width); key, value (batch, heads, keys, width); bias (1, heads,
    queries, keys), finite; or starts (batch, queries), the first key each query attends to, for
    causal attention; see `fits`.
    """
    if torch.is_autocast_enabled(kind := query.device.type):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # The kernels take the tokens last. XLA writes the products before them that way.
    turned = [tensor.transpose(-1, -2) for tensor in (query, key, value)]
    if bias is not None:
        turned.append(bias[0].transpose(-1, -2).float())
    if starts is not None:
        turned.append(starts[:, None, None, :].int())
    kernel = Kernel("forward", causal, packed=starts is not None)
    if torch.is_grad_enabled():
        output: Tensor = FlashAttention.apply(call, kernel, *turned)  # type: ignore[no-untyped-call]
    else:
        output = call(kernel, turned)[0]
    return output.transpose(-1, -2)


class FlashAttention(torch.autograd.Function):
    """Attention whose backward pass makes the probabilities again, a tile at a time.

    Tensors are query, key, value (batch, heads, width, tokens) and perhaps a bias (heads, keys,
    queries) or starts (batch, 1, 1, queries).
    """

    @staticmethod
    def forward(ctx: Any, call: Call, kernel: Kernel, *tensors: Tensor) -> Tensor:
        output, log_sums = call(kernel, tensors)
        ctx.save_for_backward(*tensors, output, log_sums)
        ctx.kernel, ctx.call = kernel, call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *further, output, log_sums = ctx.saved_tensors
        inputs = (query, key, value, output, log_sums, gradient.to(query.dtype), *further)
        gradients = ctx.call(dataclasses.replace(ctx.kernel, function="backward"), inputs)
        of_starts = [None] if ctx.kernel.packed else []
        return None, None, *gradients, *of_starts


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    start: int = 0,
    starts: Tensor | None = None,
) -> Tensor:
    """Attention written out, its softmax in float32. The first query is number `start`."""
    scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-2, -1)).float()
    if bias is not None:
        scores = scores + bias.float()
    columns = torch.arange(key.shape[-2], device=query.device)
    if causal:
        rows = torch.arange(start, start + query.shape[-2], device=query.device)
        scores = scores.masked_fill(columns > rows[:, None], float("-inf"))
    if starts is not None:
        scores = scores.masked_fill(columns < starts[:, None, :, None], float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1).to(value.dtype), value)


def results_of(kernel: Kernel, inputs: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """Shapes and types of a kernel's results."""
    query, key, value = inputs[:3]
    if kernel.function == "backward":
        bias = () if kernel.packed else inputs[6:]
        return [(t.shape, t.dtype) for t in (query, key, value, *bias)]
    log_sums = torch.Size((*query.shape[:2], 1, query.shape[-1]))
    return [(query.shape, query.dtype), (log_sums, torch.float32)]


def with_shapes(kernel: Kernel, inputs: Shapes) -> tuple[Any, list[Any]]:
    """The kernel as a function that jax traces, and its arguments' shapes."""
    import jax
    import jax.numpy as jnp

    # JAX only translates here: it must not take hold of the TPU, as an image's JAX_PLATFORMS may
    # ask for.
    jax.config.update("jax_platforms", "cpu")
    types = {torch.float32: jnp.float32, torch.bfloat16: jnp.bfloat16, torch.int32: jnp.int32}
    shapes = [jax.ShapeDtypeStruct(shape, types[dtype]) for shape, dtype in inputs]
    return jax.jit(kernel, keep_unused=True), shapes
