"""Operators on fake CPU tensors in the forms that CUDA gives them.

Registered for the dispatch keys of the CPU, in the process of the trials alone: autocast's lists
(`aten/src/ATen/autocast_mode.h`), fused dropout, and attention by the kernel a GPU would choose
(`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`). What they allocate and keep for the
backward pass is CUDA's; what they compute is nothing, as the tensors are fake.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal",
    "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus",
    "layer_norm", "native_layer_norm", "group_norm", "rms_norm", "cosine_similarity",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "nll_loss_nd", "hinge_embedding_loss",
    "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest2d.vec", "upsample_bilinear2d.vec", "upsample_bicubic2d.vec",
)  # fmt: skip
"""Operators whose inputs CUDA's autocast casts to fp32."""
FP32_RESULT = ("prod", "prod.dim_int", "cumprod", "cumsum", "sum", "sum.dim_IntList")
"""Operators that CUDA's autocast has compute in fp32."""
PLAIN = ("cross_entropy_loss", "avg_pool3d", "polar")
"""Operators on the CPU's list alone: CUDA casts what they are made of."""
HALF = (torch.float16, torch.bfloat16)
FLASH_WIDTH = 256
"""Largest head of the flash kernels."""
TILE = 64
"""Side of the blocks in which the memory-efficient kernels sum the gradients of narrow heads."""
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class FusedAttention(torch.autograd.Function):
    """What flash and memory-efficient kernels keep: their inputs, the output, log-sum-exps."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None,
        count: Callable[[float], None], flash: bool, share: float,
    ) -> Tensor:  # fmt: skip
        # The kernels' output is (batch, queries, heads, width) in memory.
        output = query.new_empty(
            query.shape[0], query.shape[2], query.shape[1], value.shape[-1]
        ).transpose(1, 2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, bias, output, sums)
        ctx.count, ctx.flash = count, flash
        ctx.flops = 4.0 * share * query.numel() * key.shape[-2]
        count(ctx.flops)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, bias, output, sums = ctx.saved_tensors
        ctx.count(2.5 * ctx.flops)
        gradient = gradients[0].contiguous()
        whole = query.dtype == torch.float32
        # The sums of output and gradient by query: in fp32 of their product, not by the kernel.
        product = torch.empty_like(query) if whole else None
        delta = torch.empty_like(sums)
        del product
        found = [torch.empty_like(t) for t in (query, key, value)]
        of_bias = None
        if bias is not None and ctx.needs_input_grad[3]:
            # Of each row and head, before it is summed.
            of_bias = query.new_empty(*query.shape[:-1], _up(key.shape[-2], 16))
        summed = query.new_empty(_summed(query, flash=ctx.flash), dtype=torch.float32)
        del gradient, delta, summed, output
        if of_bias is not None:
            of_bias = of_bias[..., : key.shape[-2]].sum_to_size(bias.shape)
        return (*found, of_bias, None, None, None)


class SafeSoftmax(torch.autograd.Function):
    """Plain attention's softmax, which looks for rows without a key: twice the probabilities."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: int, dtype: torch.dtype | None = None) -> Tensor:
        softened = torch._softmax(values.to(dtype or values.dtype), axis, False)
        is_masked = values == float("-inf")
        rows = is_masked.all(axis, keepdim=True)
        del is_masked
        result = torch.where(rows, torch.zeros_like(rows, dtype=softened.dtype), softened)
        ctx.save_for_backward(result)
        ctx.axis, ctx.dtype = axis, values.dtype
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (result,) = ctx.saved_tensors
        found = torch._softmax_backward_data(gradients[0], result, ctx.axis, ctx.dtype)
        return found, None, None


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _summed(query: Tensor, *, flash: bool) -> tuple[int, ...]:
    """Shape in which a kernel sums queries' gradients in fp32 over blocks of keys."""
    *rows, queries, width = query.shape
    step = 128 if flash or width > TILE else TILE
    return (*rows, _up(queries, step), _up(width, 32 if flash else step))


class CudaForms:
    """The forms of a GPU with this compute capability, while the context is open."""

    def __init__(self, capability: float, count: Callable[[float], None]) -> None:
        self.capability = capability
        self.count = count
        """Takes each fused attention's operations."""

    @contextmanager
    def registered(self) -> Iterator[None]:
        """CUDA's forms inside."""
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden
            for name in FP32:
                _autocast(library, name, _in_fp32)
            for name in FP32_RESULT:
                _autocast(library, name, _with_fp32_result)
            for name in PLAIN:
                library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
            _autocast(library, "binary_cross_entropy", _banned)
            for name in ("softmax.int", "log_softmax.int"):
                _autocast(library, name, _softmax)
            library.impl("dropout", _dropout, "AutogradCPU")
            library.impl("scaled_dot_product_attention", self.attention, "AutogradCPU")
            library.impl("_safe_softmax", _safe_softmax, "AutogradCPU")
        try:
            yield
        finally:
            library._destroy()

    def kernel(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, grouped: bool
    ) -> str:
        """flash, efficient or math: the first that takes these inputs, in torch's order."""
        half, width = query.dtype in HALF, query.shape[-1]
        if any(t is not None and _is_spread(t) for t in (query, key, value, bias)):
            return "math"
        same = width == value.shape[-1] and query.ndim == 4
        if half and same and bias is None and self.capability >= 8.0 and width <= FLASH_WIDTH:
            return "flash"
        aligned = width % (8 if half and self.capability >= 7.5 else 4) == 0
        takes = query.dtype != torch.bfloat16 or self.capability >= 8.0
        if query.ndim == 4 and aligned and takes and not grouped:
            return "efficient"
        return "math"

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """`scaled_dot_product_attention` of this GPU."""
        kernel = self.kernel(query, key, value, attn_mask, grouped=enable_gqa)
        if kernel == "math":
            return torch._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )[0]  # fmt: skip
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                ~attn_mask, float("-inf")
            )
        share = 0.5 if is_causal else 1.0
        found: Tensor = FusedAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, attn_mask, self.count, kernel == "flash", share
        )
        return found


def _safe_softmax(values: Tensor, axis: int, dtype: torch.dtype | None = None) -> Tensor:
    found: Tensor = SafeSoftmax.apply(values, axis, dtype)  # type: ignore[no-untyped-call]
    return found


def _is_spread(tensor: Tensor) -> bool:
    """Whether a row's values do not lie side by side, which no kernel takes."""
    return tensor.shape[-1] > 1 and tensor.stride(-1) != 1


def _autocast(library: Any, name: str, form: Callable[..., Any]) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return form(operator, args, kwargs)

    library.impl(name, cast, "AutocastCPU")


def _in_fp32(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cast = (a.float() if isinstance(a, Tensor) and a.dtype in HALF else a for a in args)
    return operator(*cast, **kwargs)


def _with_fp32_result(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].dtype in HALF and kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.float32}
    return operator(*args, **kwargs)


def _softmax(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values, axis, *rest = args
    dtype = rest[0] if rest else kwargs.get("dtype")
    if values.dtype == torch.float16 and dtype in (None, torch.float32):
        # One kernel reads fp16 and writes fp32.
        inner = torch._softmax if "log" not in operator._schema.name else torch._log_softmax
        return inner(values, axis, True)
    return operator(values, axis, dtype or (torch.float32 if values.dtype in HALF else None))


def _banned(*_: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy and BCELoss are unsafe to autocast on a GPU: use"
        " binary_cross_entropy_with_logits or BCEWithLogitsLoss on logits"
    )


def _dropout(values: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or not values.numel():
        return values
    return torch.native_dropout(values, p, train)[0]
