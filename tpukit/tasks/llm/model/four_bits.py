"""Frozen weights in 4 bits by bitsandbytes: NF4, double quantisation (Dettmers et al., 2023)."""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula
from transformers.pytorch_utils import Conv1D

from tpukit.errors import ConfigError
from tpukit.hardware.backend import linear_dtype

NEED_WEIGHTS = ("LOHA", "LOKR", "HRA", "PEANUT", "SUPERTUNING")
"""Adapters of peft that take a layer's weight as it is."""


def in_four_bits(lm: Any) -> None:
    """Packs the linear layers of a model but for its output projection."""
    for name, layer in list(_linear(lm)):
        lm.set_submodule(name, _packed_linear()(layer))
    # peft chooses its layers by it.
    lm.is_loaded_in_4bit = True


def rounded_to_four_bits(lm: Any) -> None:
    """Gives these layers the values that they have in 4 bits, in their own type."""
    from bitsandbytes.functional import dequantize_4bit

    for _, layer in _linear(lm):
        rounded = dequantize_4bit(*_quantized(layer)).to(layer.weight.dtype)
        layer.weight.data = rounded if isinstance(layer, nn.Linear) else rounded.t().contiguous()


def keep_trained_alone(model: nn.Module) -> None:
    """Leaves what can be read again, all but the adapters, out of the state dict."""
    kept = {name for name, p in model.named_parameters() if p.requires_grad or ".start" in name}

    def drop(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name in state.keys() - {prefix + own for own in kept}:
            del state[name]

    model.register_state_dict_post_hook(drop)  # type: ignore[no-untyped-call]


def _linear(lm: Any) -> Iterator[tuple[str, Any]]:
    head = lm.get_output_embeddings()
    for name, module in lm.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            yield name, module


def _quantized(layer: Any) -> tuple[Tensor, Any]:
    """The weight of a layer, (outputs, inputs), packed, and how."""
    _packed_linear()
    from bitsandbytes.functional import quantize_4bit

    weight = layer.weight.data if isinstance(layer, nn.Linear) else layer.weight.data.t()
    packed: tuple[Tensor, Any] = quantize_4bit(
        weight.contiguous(), quant_type="nf4", compress_statistics=True
    )
    return packed


@cache
def _packed_linear() -> type[nn.Module]:
    try:
        from bitsandbytes.functional import quantize_4bit
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError as error:
        raise ConfigError(
            f"weights nf4 needs bitsandbytes: {error}.", "pip install bitsandbytes"
        ) from error

    with _disable_current_modes():
        # Makes a table from values, once, which a trace has not.
        quantize_4bit(torch.zeros(64), quant_type="nf4", compress_statistics=True)

    @register_flop_formula(torch.ops.bitsandbytes.gemm_4bit)
    def operations(inputs: torch.Size, _: Any, shape: Sequence[int], *__: Any, **___: Any) -> int:
        return 2 * math.prod(inputs[:-1]) * math.prod(shape)

    class PackedLinear(Linear4bit):  # type: ignore[misc]
        """`Linear4bit` that computes in autocast's type, as `nn.Linear` does."""

        def __init__(self, layer: Any) -> None:
            nn.Module.__init__(self)
            packed, state = _quantized(layer)
            self.out_features, self.in_features = state.shape
            self.quant_state, self.quant_storage = state, torch.uint8
            self.compute_dtype: torch.dtype | None = None
            self.compute_type_is_set = True
            # Else an evaluation packs them anew, in a form that has no gradient.
            self.support_avx512bf16_for_cpu = False
            how = {"quant_state": state, "quant_type": "nf4", "compress_statistics": True}
            if type(packed) is Tensor:
                self.weight = Params4bit(packed, module=self, bnb_quantized=True, **how)
            else:  # of a trace, whose tensors have a class of their own
                self.weight = nn.Parameter(packed, requires_grad=False)
                vars(self.weight).update(how)
                self.register_buffer("absmax", state.absmax, persistent=False)
            self.bias = layer.bias

        def forward(self, x: Tensor) -> Tensor:
            self.compute_dtype = linear_dtype(x)
            result: Tensor = super().forward(x.to(self.compute_dtype))
            return result

    return PackedLinear
