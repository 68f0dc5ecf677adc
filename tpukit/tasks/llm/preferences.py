"""Preference pairs: direct preference optimization (Rafailov et al., 2023)."""

import torch
from torch import Tensor
from torch.nn import functional as F


def preference_loss(
    losses: Tensor, reference: Tensor, pairs: Tensor, beta: float
) -> dict[str, Tensor]:
    """The mean of -log sigmoid(beta (m - r)) over pairs, where m and r are how much likelier the
    model and the reference hold the chosen completion than the rejected one.

    losses, reference: (groups, count), cross entropy of targets by the model and the reference.
    pairs: (groups, count), the number of a target's pair in its group, from 1, negative in the
        rejected completion; 0 where a place is not used.
    """
    groups, count = pairs.shape
    # One axis: sums over several have no deterministic form on a GPU.
    first = torch.arange(groups, device=pairs.device)[:, None] * (count + 1)
    places = (pairs.abs() + first).flatten()

    def by_pair(values: Tensor) -> Tensor:
        sums = values.new_zeros(groups * (count + 1)).scatter_add(0, places, values.flatten())
        return sums.view(groups, -1)[:, 1:]

    rewards = beta * by_pair(pairs.sign() * (reference - losses))
    is_pair = (by_pair((pairs > 0).float()) > 0).float()
    weight = is_pair.sum()

    def mean(values: Tensor) -> Tensor:
        return (values * is_pair).sum() / weight.clamp(min=1.0)

    return {
        "loss": mean(F.softplus(-rewards)),
        "reward_margin": mean(rewards),
        "reward_accuracy": mean((rewards > 0).float()),
        "weight": weight,
    }
