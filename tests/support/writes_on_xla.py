"""Writes in place, by indices, masks and through views, as models have them; x is (6, 8).

On XLA every tensor is a value: a write through a view has to reach the tensor that it is a view of.
"""

import torch
import torch.nn.functional as F


def slices(x):
    y = torch.zeros_like(x)
    y[:, 1:3] = x[:, :2]
    y[1:3].add_(x[:2])
    y[3:] *= 2
    y[0].addcmul_(x[2], x[4])
    return y


def sine_table(x):
    table = torch.zeros(6, 8, device=x.device)
    turns = torch.arange(6.0, device=x.device)[:, None] * torch.arange(4.0, device=x.device)
    table[:, 0::2], table[:, 1::2] = turns.sin(), turns.cos()
    return x * table


def corner(x):
    y = x.new_zeros(8, 10)
    y[1:-1, 1:-1] = x
    return y


def rows_one_by_one(x):
    y = torch.empty(7, 8, device=x.device)
    y[0] = x[0]
    for i in range(6):
        y[i + 1] = y[i] * 0.5 + x[i]
    return y


def chunks(x):
    with torch.no_grad():
        y = torch.ones(6, 8, device=x.device)
        left, right = y.chunk(2, 1)
        left.mul_(2)
        right.add_(left)
        for i, row in enumerate(y):
            row.mul_(i)
    return x * y


def unbound(x):
    return sum(row * x[i] for i, row in enumerate(torch.arange(48.0, device=x.device).view(6, 8)))


def index_add(x):
    places = torch.tensor([0, 2, 2, 5], device=x.device)
    y = torch.zeros(6, 8, device=x.device)
    y[:, 2:6].index_add_(0, places, x[:4, :4])
    return y.index_add_(0, places, x[2:])


def index_put(x):
    places = torch.tensor([0, 2, 1], device=x.device)
    y = torch.zeros(6, 8, device=x.device)
    y[2:][places] = x[:3]
    y[:, places] = x[:, 3:6]
    y[places, places + 1] = x[0, :3]
    y.index_put_((places,), x[:3], accumulate=True)
    y[[0, 1]] = y[[1, 0]]
    return y


def index_fill_and_copy(x):
    places = torch.tensor([0, 2], device=x.device)
    y = x * 1
    y[:, 1:].index_fill_(1, places, 0.5)
    return y.index_copy_(0, places, x[3:5])


def masks(x):
    y = x * 1
    y[x < -1] = 0.5
    y[1:4][x[1:4] > 1] *= 3
    y[x[:, 0] < 0] = x[0] * 2
    y[:, :2].masked_fill_(x[:, :2] < 0, -1.0)
    return y


def masked_scatter(x):
    return (x * 1).masked_scatter_(x.detach() < 0, x.flip(0) * 2)


def chosen_by_mask(x):
    y, mask = x * 1, x.detach() < 0
    y[mask] = (x * 2)[mask]
    return y


def boolean_mask(x):
    mask = torch.zeros(6, 8, dtype=torch.bool, device=x.device)
    mask[:, 2:5] = True
    mask[1] |= x.detach()[1] > 0
    mask[2].logical_not_()
    return x.masked_fill(mask, 0.0)


def windows_numbered(x):
    """As Swin's mask of shifted windows is made."""
    y = torch.zeros(1, 6, 8, 1, device=x.device)
    for i, rows in enumerate((slice(0, -3), slice(-3, -1), slice(-1, None))):
        for j, columns in enumerate((slice(0, -4), slice(-4, None))):
            y[:, rows, columns, :] = 2 * i + j
    return x * y[0, :, :, 0]


def scatter(x):
    places = x.detach().argsort(1)[:, :3]
    y = torch.zeros(6, 8, device=x.device).scatter_(1, places, x[:, 5:])
    y[:, 4:].scatter_add_(1, places.clamp(max=3), x[:, 5:])
    return y


def transposed(x):
    y = x * 1
    y.t()[1].add_(x[:, 0])
    y.diagonal().mul_(2)
    y.view(-1)[3:11].copy_(x.flatten()[:8])
    y.narrow(0, 1, 2).select(1, 3).copy_(x[:2, 0])
    return y


def grid(x):
    lines = (torch.arange(6.0, device=x.device), torch.arange(8.0, device=x.device))
    y = torch.stack(torch.meshgrid(*lines, indexing="ij"), -1)
    y[..., 0] /= 6
    y[..., 1].sub_(0.5)
    return x * y.sum(-1)


def sent(x):
    y = torch.arange(48.0).view(6, 8).to(x.device)
    y[1:3].add_(1)
    first, second = y.chunk(2)
    return x * torch.cat([second, first])


def queue(x):
    y = torch.zeros(10, 8, device=x.device)
    y[2:8] = x.detach()
    y[:2] = y[6:8]
    return x @ y.copy_(y.roll(1, 0)).t()


def into_slices(x):
    y = torch.zeros(6, 8, device=x.device)
    torch.mul(x.detach()[:3], 2, out=y[:3])
    torch.cat([x.detach()[:1], x.detach()[4:]], out=y[3:])
    return x * y


def half_precision(x):
    y = torch.zeros(6, 8, dtype=torch.bfloat16, device=x.device)
    y[1:3] = 1.5
    return x * y


def random_rows(x):
    y = torch.rand(6, 8, device=x.device)
    y[1:] = 0.5
    y[0, ::2].mul_(0).add_(2)
    y[:, 1::2] = 3
    return x * y


def experts(x):
    """As transformers' `eager` mixtures of experts do; `nonzero` leaves the device."""
    y = torch.zeros_like(x)
    best = x.detach()[:, :4].topk(2, -1).indices
    mask = F.one_hot(best, num_classes=5).permute(2, 1, 0)
    for found in mask.sum((-1, -2)).nonzero():
        place, row = torch.where(mask[found[0]])
        y.index_add_(0, row, x[row] * (found[0] + 1) * (place[:, None] + 1))
    return y


WRITES = {
    function.__name__: function
    for function in (
        slices, sine_table, corner, rows_one_by_one, chunks, unbound, index_add, index_put,
        index_fill_and_copy, masks, masked_scatter, chosen_by_mask, boolean_mask, windows_numbered,
        scatter, transposed, grid, sent, queue, into_slices, half_precision, random_rows, experts,
    )
}  # fmt: skip
