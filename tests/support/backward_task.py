"""Six networks whose backward passes run code of their own, and a plain loop over them."""

import numpy as np
import torch
from torch import nn

from tpukit.train.task import Datasets, PlanSettings, Task, TrainingDefaults, sample_rng

LIMIT = 2e-3
"""What gradients are clamped to: some of a mean's are beyond it."""


class Rows:
    """48 samples made from the index alone."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        x = rng.standard_normal(8, dtype=np.float32)
        return {"x": x, "y": np.sin(3 * x[:4]) * (1 + index % 5)}


class AddAuxiliaryLoss(torch.autograd.Function):
    """As DeepSeek's: the loss beside `x` counts once, whatever the loss that `x` goes into."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.dtype = loss.dtype
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones((), dtype=ctx.dtype, device=gradient.device)


class L2Wrap(torch.autograd.Function):
    """As RWKV's: the largest logit of each row is pulled to zero."""

    @staticmethod
    def forward(ctx, loss, logits):
        ctx.save_for_backward(logits)
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        largest, places = torch.max(logits, -1, keepdim=True)
        pull = torch.zeros_like(logits).scatter_(-1, places, largest * 1e-2 / len(logits))
        return gradient, pull


class Reversed(torch.autograd.Function):
    """A gradient's sign is turned, and what is small of it left out."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.where(gradient.abs() < LIMIT, 0.0, -0.5 * gradient)


class Net(nn.Module):
    """kind: what its backward pass does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        if kind == "parameter-hook":
            self.enter.weight.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT))
        if kind == "module-hook":
            self.leave.register_full_backward_hook(clamped)

    def forward(self, x, y):
        hidden = self.enter(x).tanh()
        if self.kind == "tensor-hook":
            hidden.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT))
        if self.kind == "auxiliary":
            hidden = AddAuxiliaryLoss.apply(hidden, 0.1 * hidden.square().mean())
        if self.kind == "reversed":
            hidden = Reversed.apply(hidden)
        found = self.leave(hidden)
        loss = (found - y).square().mean(1)
        return L2Wrap.apply(loss, found) if self.kind == "l2-wrap" else loss


def clamped(_module, gradients, _outputs):
    return tuple(gradient.clamp(-LIMIT, LIMIT) for gradient in gradients)


KINDS = ("tensor-hook", "parameter-hook", "module-hook", "auxiliary", "l2-wrap", "reversed")


class Backward(Task):
    name = "backward"
    defaults = TrainingDefaults(global_batch_size=16, max_steps=4, lr=0.1, rows_per_device=1024)

    def __init__(self, mean: bool = False, data_path: str = "") -> None:
        self.mean = mean

    def build_model(self, ops):
        return nn.ModuleDict({kind: Net(kind) for kind in KINDS})

    def build_optimizer(self, groups, config):
        return torch.optim.SGD([dict(group, weight_decay=0.0) for group in groups], lr=config.lr)

    def datasets(self):
        return Datasets(Rows(), None)

    def loss(self, model, batch):
        rows = sum(net(batch["x"], batch["y"]) for net in model.values())
        return {"loss": rows.mean() if self.mean else rows}


def plain_loop(micro_batches: int = 1, ranks: int = 1) -> dict[str, torch.Tensor]:
    """The parameters after as many steps of `loss.mean().backward()`, the gradients of ranks and
    micro-batches averaged."""
    from tpukit.train.learner import seed_everything

    task = Backward(mean=True)
    seed_everything(0)
    model = task.build_model(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.defaults.lr)
    data, rows = task.datasets().train, 16 // micro_batches
    plan = task.plan(data, PlanSettings(16, rows, 1, 0))
    for step in range(task.defaults.max_steps):
        shares = [m.share(rank, ranks) for m in plan.step(step) for rank in range(ranks)]
        for share in shares:
            drawn = [task.draw(data[k.sample], sample_rng(0, *k)) for k in share.keys]
            task.loss(model, task.collate(drawn, share))["loss"].backward()
        for parameter in model.parameters():
            parameter.grad /= len(shares)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}
