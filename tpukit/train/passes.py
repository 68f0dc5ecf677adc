"""What forward passes write to in a model, and its undoing."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tpukit.hardware.modules import local, renormalized_weights


@dataclass(frozen=True)
class BeforePasses:
    """What passes may change, from before them."""

    buffers: dict[str, tuple[Tensor, Tensor]]
    """By name the tensor, and a copy of it."""
    versions: dict[str, tuple[Tensor, int]]
    """Parameters, and the number of writes to each."""
    copies: dict[str, Tensor]
    """Of some of them."""

    def moved(self) -> set[str]:
        """Parameters that were written to since."""
        return {n for n, (tensor, version) in self.versions.items() if tensor._version != version}


class Passes:
    """Copies what passes may move in a prepared model, and puts it back."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._moved = renormalized_weights(module)
        """Parameters that a pass has moved, or may move (a teacher, an embedding with
        `max_norm`)."""

    def before(self, *, outside_of_step: bool = False) -> BeforePasses:
        """Buffers, and of parameters those that a pass has moved before.

        outside_of_step: all parameters, frozen ones where they are no larger than the others: what
            is copied takes no more than a step's gradients and state do.
        """
        known = dict(self._module.named_parameters())
        copied = self._moved & known.keys()
        if outside_of_step:
            trained = {n for n, p in known.items() if p.requires_grad}
            size, of_trained = (
                sum(local(known[n]).nbytes for n in each) for each in (known, trained)
            )
            copied |= known.keys() if size <= 2 * of_trained else trained
        return BeforePasses(
            {name: (tensor, tensor.clone()) for name, tensor in self._module.named_buffers()},
            {name: (p, p._version) for name, p in known.items()},
            {name: known[name].detach().clone() for name in copied},
        )

    def note(self, before: BeforePasses) -> None:
        """Remembers what was moved since then."""
        self._moved |= before.moved()

    def undo(self, before: BeforePasses) -> bool:
        """Undoes the passes since then; False where it cannot: they moved parameters that none had
        moved before."""
        if not before.moved() <= before.copies.keys():
            self.note(before)
            return False
        self.put_back(before)
        return True

    @torch.no_grad()
    def put_back(self, before: BeforePasses) -> None:
        """The values from then."""
        self.note(before)
        for name, value in before.copies.items():
            before.versions[name][0].copy_(value)
        for name, (tensor, value) in before.buffers.items():
            owner, _, own = name.rpartition(".")
            setattr(self._module.get_submodule(owner), own, tensor)
            if tensor.shape == value.shape:
                tensor.copy_(value)
            else:
                tensor.data = value
