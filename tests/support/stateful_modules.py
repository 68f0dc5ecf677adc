"""Modules with state of their own, as public code writes them: (rows, 8) -> (rows, 2)."""

import warnings

import torch
from torch import nn
from torch.nn.utils import parametrizations


class Queue(nn.Module):
    """MoCo's queue of keys, with its pointer, beside a frozen momentum encoder."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 2), nn.Linear(8, 2)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", torch.randn(24, 2))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        found = self.query(x) + self.queue.mean(0) + self.queue[self.pointer]
        if self.training:
            with torch.no_grad():
                torch._foreach_lerp_([*self.key.parameters()], [*self.query.parameters()], 0.1)
                places = (self.pointer + torch.arange(len(x))) % len(self.queue)
                self.queue[places] = self.key(x)
                self.pointer.copy_((self.pointer + len(x)) % len(self.queue))
        return found


class Counted(nn.Module):
    """Keeps a running scale and a list in Python, which a state dict has as extra state."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.passes, self.seen = nn.Linear(8, 2), 1.0, 0, []

    def forward(self, x):
        if self.training:
            self.passes += 1
            self.scale = 0.9 * self.scale + 0.1 * float(x.abs().mean())
            self.seen = [*self.seen, self.passes][-3:]
        return self.layer(x) * self.scale + self.passes + sum(self.seen)

    def get_extra_state(self):
        return {"scale": self.scale, "passes": self.passes, "seen": self.seen}

    def set_extra_state(self, state):
        self.scale, self.passes, self.seen = state["scale"], state["passes"], state["seen"]


class Rotated(nn.Module):
    """Rotary positions: frequencies that no state dict holds, and a cache that a pass makes."""

    def __init__(self):
        super().__init__()
        self.layer, self.cache = nn.Linear(8, 2), None
        self.register_buffer("frequencies", 10.0 ** -torch.arange(4), persistent=False)

    def forward(self, x):
        if self.cache is None:
            angles = torch.arange(2)[:, None] * self.frequencies
            self.cache = angles.cos().flatten(), angles.sin().flatten()
        cosine, sine = self.cache
        return self.layer(x * cosine + x.roll(4, 1) * sine)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.outer.weight = self.inner.weight
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.outer(self.inner(x).tanh()))


class Renamed(nn.Module):
    """Its state dict has other names than its parameters: hooks add and take away `model.`."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.register_state_dict_post_hook(self._renamed)
        self.register_load_state_dict_pre_hook(self._named_as_before)

    @staticmethod
    def _renamed(module, state, prefix, metadata):
        for name in [n for n in state if n.startswith(f"{prefix}body.")]:
            state[name.replace(f"{prefix}body.", f"{prefix}model.", 1)] = state.pop(name)

    @staticmethod
    def _named_as_before(module, state, prefix, *_):
        for name in [n for n in state if n.startswith(f"{prefix}model.")]:
            state[name.replace(f"{prefix}model.", f"{prefix}body.", 1)] = state.pop(name)

    def forward(self, x):
        return self.body(x)


class Centred(nn.Module):
    """DINO's centre: another tensor in the buffer's place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, x):
        found = self.layer(x)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * found.detach().mean(0)
        return found - self.centre


class Memory(nn.Module):
    """A buffer that grows, and takes the size of what is loaded."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.register_buffer("memory", torch.zeros(0, 2))

    def forward(self, x):
        found = self.layer(x)
        if self.training:
            self.memory = torch.cat([self.memory, found.detach().mean(0, keepdim=True)])
        return found + self.memory.sum(0)

    def _load_from_state_dict(self, state, prefix, *others):
        if f"{prefix}memory" in state:
            self.memory = torch.zeros_like(state[f"{prefix}memory"])
        super()._load_from_state_dict(state, prefix, *others)


class Quantized(nn.Module):
    """Quantisation-aware training: observers get their shape in the first pass."""

    def __init__(self):
        super().__init__()
        from torch.ao import quantization

        body = nn.Sequential(
            quantization.QuantStub(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2),
            quantization.DeQuantStub(),
        )  # fmt: skip
        body.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        with warnings.catch_warnings(action="ignore"):  # torch.ao is to move
            self.body = quantization.prepare_qat(body.train())

    def train(self, mode=True):
        """In eval mode ranges are used as they are."""
        from torch.ao import quantization

        self.apply(quantization.enable_observer if mode else quantization.disable_observer)
        return super().train(mode)

    def forward(self, x):
        return self.body(x)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.batch = nn.Linear(8, 6), nn.BatchNorm1d(6)
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        found = self.batch(self.first(x))
        return self.last(self.instance(found.view(-1, 2, 3)).flatten(1))


class Kinds(nn.Module):
    """Buffers of every type, and a recurrent layer's own list of its weights."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)
        for name in ("float64", "float16", "bool", "int8", "complex64"):
            self.register_buffer(name, torch.ones(2, dtype=getattr(torch, name)))

    def forward(self, x):
        if self.training:
            self.float64 *= 1.5
            self.float16 += 1
            self.int8 += 1
        return self.head(self.layer(x.view(-1, 2, 4))[0][:, -1]) * self.int8 + self.float64.float()


def with_old_weight_norm():
    with warnings.catch_warnings(action="ignore"):
        return nn.utils.weight_norm(nn.Linear(8, 4))


MODULES = {
    "spectral_norm": lambda: nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(8, 4)), nn.ReLU(), nn.Linear(4, 2)
    ),
    "parametrized spectral_norm": lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(8, 4)), nn.ReLU(), nn.Linear(4, 2)
    ),
    "weight_norm": lambda: nn.Sequential(with_old_weight_norm(), nn.ReLU(), nn.Linear(4, 2)),
    "parametrized weight_norm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 4)), nn.ReLU(), nn.Linear(4, 2)
    ),
    "orthogonal": lambda: nn.Sequential(
        parametrizations.orthogonal(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 2)
    ),
    "queue": Queue,
    "normalisation": Normed,
    "quantisation": Quantized,
    "extra state": Counted,
    "rotary cache": Rotated,
    "tied": Tied,
    "renamed": Renamed,
    "centre": Centred,
    "memory": Memory,
    "types": Kinds,
}  # fmt: skip
