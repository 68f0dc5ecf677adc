"""Operators on torch_xla's virtual devices beside the CPU: python operators_on_xla.py. Prints JSON.

Each is run forward and backward while nothing may be executed, so an operator that leaves the
device is an error; then all are executed as one graph, and again with other values.
"""

import functools
import json
from functools import partial

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import torch_xla
import torch_xla.debug.metrics as met
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from writes_on_xla import WRITES

from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend
from tpukit.probe.parity import SameRandomNumbers

IMAGE = (2, 3, 8, 8)
ATTENTION = [(2, 2, 6, 8)] * 3


def interpolate(**how):
    return lambda x: F.interpolate(x, **how)


def counted(x):
    places = (x.detach() * 2).int().clamp(-1, 5)
    places = places if x.device.type == "xla" else places.float()  # as the CPU's histc takes them
    return x.sum() * torch.histc(places, bins=4, min=0, max=3).float()


def in_groups(one, other):
    """Two groups and rows of none; the CPU takes the first form of torch's grouped product."""
    ends = torch.tensor([1, 5], dtype=torch.int32, device=one.device)
    if one.device.type == "xla":
        return torch._grouped_mm(one, other, offs=ends)
    first, second = one[:1] @ other[0], one[1:5] @ other[1]
    return torch.cat([first, second, first.new_zeros(len(one) - 5, other.shape[-1])])


def experts(x, one, other):
    """transformers' own experts, which ask whether a program is recorded."""
    from transformers.integrations.moe import _grouped_mm

    ends = torch.tensor([2, 2, 6], dtype=torch.int32, device=x.device)
    return _grouped_mm(_grouped_mm(x, one, ends), other, ends)


def fill_where_negative(x):
    y = x * 1.0
    y[x < 0] = 0.25
    return y


def put_rows_where(x, row):
    """As wav2vec2 puts its learned vector over masked frames."""
    y = x * 1.0
    y[x[..., 0] < 0] = row
    return y


def batch_norm_of_evaluation(x, weight, bias):
    mean, variance = torch.zeros(3, device=x.device), torch.ones(3, device=x.device)
    return F.batch_norm(x, mean, variance, weight, bias, training=False)


def batch_norm_statistics(x):
    mean, variance = torch.zeros(3, device=x.device), torch.ones(3, device=x.device)
    F.batch_norm(x, mean, variance, training=True, momentum=0.5)
    return x * variance[:, None, None] + mean[:, None, None]


def product_twice(x, weight):
    gradient = torch.autograd.grad(F.linear(x, weight).tanh().sum(), x, create_graph=True)[0]
    return gradient.square()


def layer_norm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias)


def layer_norm_twice(x, weight):
    return torch.autograd.grad(layer_norm(x, weight, None).tanh().sum(), x, create_graph=True)[0]


def rotary(x):
    turns = torch.polar(torch.ones(4, device=x.device), torch.arange(4.0, device=x.device))
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False)


def encoder(x):
    """In eval mode, with padding: torch would pack the rows into nested tensors."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval().to(x.device)
    padding = torch.arange(5, device=x.device) > torch.tensor([[4], [2]], device=x.device)
    return model(x, src_key_padding_mask=padding)


def second_derivative(x):
    gradient = torch.autograd.grad(x.tanh().square().sum(), x, create_graph=True)[0]
    return torch.autograd.grad(gradient.square().sum(), x, create_graph=True)[0]


def clamp_unless_finite(x):
    """As DETR does: nothing may look at a value, so it does not clamp."""
    if not torch.isfinite(x).all() or torch.isinf(x).any() or torch.isnan(x).any():
        x = x.clamp(-1, 1)
    return torch.where(torch.isfinite(x), x, 0.0)


CASES = {
    "nearest x2": (interpolate(scale_factor=2), IMAGE),
    "nearest to 5x11": (interpolate(size=(5, 11)), IMAGE),
    "nearest-exact": (interpolate(scale_factor=1.5, mode="nearest-exact"), IMAGE),
    "bilinear x2": (interpolate(scale_factor=2, mode="bilinear"), IMAGE),
    "bilinear to 5x11": (interpolate(size=(5, 11), mode="bilinear", align_corners=True), IMAGE),
    "bilinear antialias": (interpolate(size=(5, 3), mode="bilinear", antialias=True), IMAGE),
    "bicubic": (interpolate(scale_factor=1.5, mode="bicubic"), IMAGE),
    "linear": (interpolate(scale_factor=2, mode="linear"), (2, 3, 8)),
    "trilinear": (interpolate(scale_factor=2, mode="trilinear"), (2, 3, 4, 4, 2)),
    "area": (interpolate(size=(3, 12), mode="area"), IMAGE),
    "adaptive average": (lambda x: F.adaptive_avg_pool2d(x, (3, 5)), IMAGE),
    "maximum in a larger window": (lambda x: F.max_pool2d(x, 9, 2, ceil_mode=True), IMAGE),
    "adaptive maximum": (lambda x: F.adaptive_max_pool2d(x, 3), IMAGE),
    "average with ceil_mode": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), IMAGE,
    ),
    "elu": (F.elu, IMAGE),
    "selu": (F.selu, IMAGE),
    "glu": (F.glu, (2, 8)),
    "huber": (lambda x: F.huber_loss(x, x.detach() * 3), IMAGE),
    "unfold": (lambda x: F.unfold(x, 3, padding=1), IMAGE),
    "fold": (lambda x: F.fold(x, (8, 8), 2, stride=2), (2, 12, 16)),
    "windows": (lambda x: x.unfold(2, 3, 2), IMAGE),
    "channel shuffle": (lambda x: F.channel_shuffle(x, 2), (2, 4, 4, 4)),
    "grid sample": (
        lambda x, grid: F.grid_sample(x, grid.tanh(), align_corners=False), IMAGE, (2, 5, 5, 2),
    ),
    "weight norm": (lambda v, g: torch._weight_norm(v, g, 0), (4, 5), (4, 1)),
    "distances": (torch.cdist, (2, 4, 5), (2, 6, 5)),
    "rotary": (rotary, (2, 6, 8)),
    "fill by mask": (fill_where_negative, IMAGE),
    "put by mask": (put_rows_where, (2, 6, 8), (8,)),
    "isin": (lambda x: x * torch.isin(x.long(), torch.tensor([0, 1], device=x.device)), IMAGE),
    "searchsorted": (
        lambda x: x * torch.searchsorted(torch.tensor([-1.0, 0.5], device=x.device), x.detach()),
        IMAGE,
    ),
    "histogram of whole numbers": (counted, IMAGE),
    "product by group": (in_groups, (8, 4), (2, 4, 5)),
    "experts": (experts, (6, 4), (3, 4, 8), (3, 8, 4)),
    "batch norm of evaluation": (batch_norm_of_evaluation, IMAGE, (3,), (3,)),
    "batch norm of training": (batch_norm_statistics, IMAGE),
    "causal attention": (
        lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), *ATTENTION,
    ),
    "checkpoint": (checkpointed, IMAGE),
    "encoder with padding": (encoder, (2, 5, 8)),
    "LSTM": (lambda x: lstm(x.device)(x)[0], (2, 3, 5)),
    "GRU": (lambda x: gru(x.device)(x)[0], (2, 3, 5)),
    "second derivative": (second_derivative, (4, 5)),
    "product of rows": (F.linear, (2, 3, 8), (5, 8), (5,)),
    "product of one row": (F.linear, (8,), (5, 8), (5,)),
    "product with a vector": (F.linear, (2, 3, 8), (8,)),
    "product, frozen": (lambda x: F.linear(x, torch.ones(5, 8, device=x.device)), (2, 3, 4, 8)),
    "layer norm": (layer_norm, (2, 3, 8), (8,), (8,)),
    "layer norm of planes": (layer_norm, (2, 3, 8, 8), (8, 8), (8, 8)),
    "layer norm of a row": (layer_norm, (8,), (8,), (8,)),
    "layer norm without weights": (lambda x: F.layer_norm(x, (8,)), (2, 3, 8)),
    "layer norm, second derivative": (layer_norm_twice, (2, 3, 8), (8,)),
    "product, second derivative": (product_twice, (2, 3, 8), (5, 8)),
    "clamp unless finite": (clamp_unless_finite, IMAGE),
    "roll": (lambda x: x.roll((1, -2), (2, 3)), IMAGE),
    "reflect": (lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"), IMAGE),
    "einsum": (lambda x, y: torch.einsum("bchw,cd->bdhw", x, y), IMAGE, (3, 5)),
    "cumsum": (lambda x: x.cumsum(1), IMAGE),
    "linspace": (lambda x: x * torch.linspace(0, 1, 8, device=x.device), IMAGE),
}  # fmt: skip


def lstm(device):
    torch.manual_seed(0)
    return nn.LSTM(5, 6, batch_first=True, bidirectional=True).to(device)


def gru(device):
    torch.manual_seed(0)
    return nn.GRU(5, 6, batch_first=True).to(device)


def computed(function, inputs):
    """Output and gradients of a weighted sum of it."""
    out = function(*inputs)
    weights = torch.arange(out.numel(), device=out.device).reshape(out.shape).cos()
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


def left_the_device():
    """How often each operator of torch_xla's fallback was run so far."""
    names = (name for name in met.counter_names() if name.startswith("aten::"))
    return {name: met.counter_value(name) for name in names}


def relative_error(found, expected):
    difference = (found.detach().cpu() - expected.detach()).norm()
    return float(difference / expected.detach().norm())


def one_pass(backend, seed):
    """By case the largest relative error, or what went wrong."""
    torch.manual_seed(seed)
    pairs, errors = {}, {}
    for name, (function, *shapes) in CASES.items():
        host = [torch.randn(shape) for shape in shapes]
        sent = [backend.mesh.send(tensor).requires_grad_() for tensor in host]
        expected = computed(function, [tensor.requires_grad_() for tensor in host])
        before = left_the_device()
        torch_xla._XLAC._set_allow_execution(False)
        try:
            with backend.autocast(), torch.autograd.set_multithreading_enabled(False):
                pairs[name] = list(zip(computed(function, sent), expected, strict=True))
        except RuntimeError as error:
            errors[name] = str(error).splitlines()[0]
        finally:
            torch_xla._XLAC._set_allow_execution(True)
        if left := [n for n, count in left_the_device().items() if count != before.get(n)]:
            errors[name] = f"left the device: {left}"
    backend.finish()
    return {name: max(relative_error(*p) for p in each) for name, each in pairs.items()} | errors


def attention_of_two_dtypes(backend):
    """Relative error of attention under autocast, query and key as rotary embeddings leave them."""
    host = [torch.randn(shape) for shape in ATTENTION]
    query, key, value = map(backend.mesh.send, host)
    with backend.autocast("bf16"):
        found = F.scaled_dot_product_attention(query, key, value.bfloat16())
    assert found.dtype == torch.bfloat16
    return relative_error(found.float(), F.scaled_dot_product_attention(*host))


def fused_attention(backend):
    """Relative errors of torch's attention where the backend's own takes it (a TPU's kernel, here
    written out), and how often it did."""
    from tpukit.hardware.xla.ops import plain_attention

    taken = []
    backend.can_fuse = lambda *tensors, **how: True
    backend.attention = lambda *qkv, causal: (
        taken.append(causal) or plain_attention(*qkv, causal=causal)
    )
    few, many = (2, 2, 6, 8), (2, 4, 6, 8)
    errors = []
    for shapes, how in (
        ([many] * 3, {}), ([many] * 3, {"is_causal": True, "scale": 0.5}),
        ([many, few, few], {"enable_gqa": True}),
    ):  # fmt: skip
        attend = functools.partial(F.scaled_dot_product_attention, **how)
        host = [torch.randn(shape, requires_grad=True) for shape in shapes]
        sent = [backend.mesh.send(tensor.detach()).requires_grad_() for tensor in host]
        with backend.autocast("bf16"):
            found = computed(attend, sent)
        pairs = zip(found, computed(attend, host), strict=True)
        errors += [relative_error(one.float(), other) for one, other in pairs]
    with backend.autocast("bf16"), sdpa_kernel(SDPBackend.MATH):
        attend(*sent)
    return {"errors": errors, "taken": taken}


def gathers(backend) -> dict[str, list[bool]]:
    """Whether a gather and its gradient have the CPU's very values, and are free of a scatter: by
    places that repeat in every matrix in bf16 and in fp32, and by places of each matrix."""
    same = torch.randint(0, 9, (1, 1, 5, 7))
    own = torch.randint(0, 9, (6, 5, 7))
    cases = ((same, torch.bfloat16), (same, torch.float32), (own, torch.bfloat16))
    found = {"equal": [], "scatters": []}
    for places, dtype in cases:
        host = torch.randn(6, 5, 9, dtype=dtype)

        def gather(device, host=host, places=places, dtype=dtype):
            values = host.to(device).detach().requires_grad_()
            index = (places.to(device) + 0).squeeze(0).expand(6, 5, 7)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                taken = values.gather(-1, index)
            return [taken, *torch.autograd.grad(taken.float().square().sum(), [values])]

        results = gather(backend.device)
        program = torch_xla._XLAC._get_xla_tensors_hlo(results)
        found["scatters"].append("scatter(" in program)
        pairs = zip(results, gather(torch.device("cpu")), strict=True)
        found["equal"].append(all(torch.equal(one.cpu(), other) for one, other in pairs))
    return found


def programs_by_dtype(backend) -> list[str]:
    """Reductions whose program is another one for a parameter that was sent than after `addcdiv_`
    or `add_`."""
    reductions = {
        **{name: getattr(torch, name) for name in ("sum", "mean", "prod")},
        **{f"{n} of rows": partial(getattr(torch, n), dim=-1) for n in ("sum", "mean", "prod")},
        **{n: partial(getattr(torch, n), dim=-1)
           for n in ("cumsum", "cumprod", "softmax", "log_softmax")},
        "normalize": F.normalize,
        "norm": torch.linalg.vector_norm,
    }  # fmt: skip
    sent = [backend.mesh.send(torch.rand(4, 8) + 1) for _ in range(4)]
    sent[1].addcdiv_(sent[0], sent[0])
    sent[2].add_(sent[0])
    sent[3].add_(sent[0]).addcdiv_(sent[0], sent[0])
    torch_xla.sync()
    return [
        name
        for name, reduce in reductions.items()
        if len({torch_xla._XLAC._get_graph_hash([reduce(tensor)]) for tensor in sent}) > 1
    ]


def programs(backend) -> dict[str, str]:
    """HLO of the gradients that are written here for the sake of the bytes they move."""
    x, weight, scale = (
        torch.randn(*shape).to(backend.device).requires_grad_()
        for shape in ((2, 3, 8), (5, 8), (8,))
    )
    product = torch.autograd.grad(F.linear(x, weight).sin().sum(), [x, weight])
    norm = torch.autograd.grad(layer_norm(x, scale, None).sin().sum(), [x, scale])
    hlo = torch_xla._XLAC._get_xla_tensors_hlo
    return {"product": hlo(list(product)), "layer norm": hlo(list(norm))}


def with_same_numbers(function, x):
    with SameRandomNumbers():
        return computed(function, [x])


def checkpointed_selectively(function, x):
    products = [torch.ops.aten.mm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, products)
    kept = functools.partial(
        torch.utils.checkpoint.checkpoint, function, use_reentrant=False, context_fn=contexts
    )
    return computed(kept, [x])


WAYS = {
    "plain": lambda function, x: computed(function, [x]),
    "same numbers": with_same_numbers,
    "selective checkpoint": checkpointed_selectively,
}


def writes(backend) -> dict[str, dict[str, float]]:
    """By way and function the largest relative error of values and gradients."""
    host = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    pairs = {}
    for name, function in WRITES.items():
        expected = computed(function, [host.clone().requires_grad_()])
        for way, run in WAYS.items():
            sent = backend.mesh.send(host).requires_grad_()
            with backend.autocast(), torch.autograd.set_multithreading_enabled(False):
                pairs[way, name] = list(zip(run(function, sent), expected, strict=True))
    backend.finish()
    return {
        way: {name: max(relative_error(*p) for p in pairs[way, name]) for name in WRITES}
        for way in WAYS
    }


def main() -> None:
    backend = open_backend(HardwareOptions(hw="tpu", precision="fp32"))
    errors, compilations = [], []
    for seed in range(2):
        errors.append(one_pass(backend, seed))
        compilations.append(backend.compilations())
    mixed, fused = attention_of_two_dtypes(backend), fused_attention(backend)
    found = {"errors": errors, "compilations": compilations, "mixed": mixed, "fused": fused}
    found["gathers"] = gathers(backend)
    found["by dtype"] = programs_by_dtype(backend)
    found["writes"] = writes(backend)
    print(json.dumps({**found, "programs": programs(backend)}))


if __name__ == "__main__":
    main()
