"""The update of an eager step: clip, scale, step, in as few passes over memory as there can be."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from tpukit.hardware.modules import local
from tpukit.hardware.optimizers import gradients_of

SCALE = "scale_of_mean"
"""The name of the scale in a checkpoint."""


class PlainUpdate:
    """Turns gradients into a step: of fp32 and bf16."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss

    def gradient_scale(self) -> Tensor | float:
        """The factor that the gradients carry already."""
        return 1.0

    def apply(self, optimizer: torch.optim.Optimizer, factor: Tensor, norm: Tensor) -> None:
        """Multiplies the gradients by `factor` and steps; `norm` is their norm before."""
        torch._foreach_mul_(local_gradients(optimizer), factor)
        optimizer.step()

    def state(self) -> dict[str, float]:
        return {}

    def set_state(self, state: Mapping[str, float]) -> None:
        pass


class LocalScaler(GradScaler):
    """Looks at this rank's shards: no operation takes sharded gradients beside whole ones."""

    def _unscale_grads_(self, optimizer: Any, *given: Any) -> dict[torch.device, Tensor]:
        shards = []
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            shard = local(parameter).detach()
            shard.grad = None if parameter.grad is None else local(parameter.grad)
            shards.append(shard)
        own: Any = SimpleNamespace(param_groups=[{"params": shards}])
        return super()._unscale_grads_(own, *given)


class ScaledUpdate(PlainUpdate):
    """fp16: the loss is scaled up, and a step whose gradients overflow is skipped."""

    def __init__(self, scaler: GradScaler, device: torch.device) -> None:
        self.scaler = scaler
        self.device = device

    def scale_loss(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def gradient_scale(self) -> Tensor | float:
        # `get_scale` would read it and stall the pipeline.
        return self.scale_loss(torch.ones((), device=self.device))

    def apply(self, optimizer: torch.optim.Optimizer, factor: Tensor, norm: Tensor) -> None:
        # The scaler divides by the scale again. Where one rank overflows, all must skip.
        rescaled = torch.where(torch.isfinite(norm), factor * self.gradient_scale(), torch.nan)
        torch._foreach_mul_(local_gradients(optimizer), rescaled)
        self.scaler.step(optimizer)
        self.scaler.update()

    def state(self) -> dict[str, float]:
        state = self.scaler.state_dict()
        growth = float(state["_growth_tracker"])
        return {SCALE: float(state["scale"]), "growth_tracker": growth}

    def set_state(self, state: Mapping[str, float]) -> None:
        if SCALE not in state:  # an older checkpoint's, of a sum
            return
        current = self.scaler.state_dict()
        current["scale"] = state[SCALE]
        current["_growth_tracker"] = int(state["growth_tracker"])
        self.scaler.load_state_dict(current)


def local_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The shards of them that this rank holds."""
    return [local(gradient) for gradient in gradients_of(optimizer)]


def clip_factor(norm: Tensor, clip_norm: float | None) -> Tensor:
    """What a gradient of this norm is multiplied by, as `torch.nn.utils.clip_grad_norm_` has it."""
    if clip_norm is None:
        return torch.ones_like(norm)
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0)
