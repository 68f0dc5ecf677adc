"""Models of the measurements in gpu_memory_measurements.toml, written from their sources' settings.

Each returns its loss: `{"loss": ...}`.
"""

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Output = dict[str, Tensor]


# -- two views of a picture (lightly's benchmarks) ------------------------------------------------
class SmallBlock(nn.Module):
    """A residual block of lightly's ResNet for CIFAR-10, whose ReLUs write beside their input."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(given, width, 3, stride, 1, bias=False),
                                   nn.BatchNorm2d(width), nn.ReLU())  # fmt: skip
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False),
                                    nn.BatchNorm2d(width))  # fmt: skip
        self.beside: nn.Module = nn.Identity()
        if stride > 1 or given != width:
            self.beside = nn.Sequential(nn.Conv2d(given, width, 1, stride, bias=False),
                                        nn.BatchNorm2d(width))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(self.first(x))
        out += self.beside(x)
        return F.relu(out)


def resnet18(images: str) -> nn.Module:
    """ResNet-18 without its classifier: torchvision's, or for CIFAR-10 (no ReLU after the stem)."""
    if images == "imagenet":
        import torchvision

        return nn.Sequential(*[*torchvision.models.resnet18().children()][:-1])
    widths = (64, 64, 128, 256, 512)
    blocks = [
        SmallBlock(given if first else width, width, 2 if first and given != width else 1)
        for given, width in itertools.pairwise(widths)
        for first in (True, False)
    ]
    stem = (nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1))


def mlp(*widths: int, last_norm: bool = False) -> nn.Module:
    """Linear layers with batch norm and ReLU between them."""
    layers: list[nn.Module] = []
    for given, width in itertools.pairwise(widths):
        ends = len(layers) // 3 == len(widths) - 2
        layers.append(nn.Linear(given, width, bias=ends and not last_norm))
        if not ends or last_norm:
            layers.append(nn.BatchNorm1d(width))
        if not ends:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class TwoViews(nn.Module):
    """Self-supervised learning from two views: SimCLR, SimSiam, Barlow Twins, BYOL or MoCo."""

    def __init__(self, method: str, images: str = "imagenet", bank: int = 4096) -> None:
        super().__init__()
        self.method = method
        heads = {
            "simclr": (512, 512, 128), "simsiam": (512, 2048, 2048, 2048),
            "barlow": (512, 2048, 2048, 2048), "byol": (512, 4096, 256), "moco": (512, 2048, 128),
        }  # fmt: skip
        last_norm = method in ("simclr", "simsiam")
        self.body, self.head = resnet18(images), mlp(*heads[method], last_norm=last_norm)
        if method in ("simsiam", "byol"):
            self.guess = mlp(2048, 512, 2048) if method == "simsiam" else mlp(256, 4096, 256)
        if method in ("byol", "moco"):
            self.slow = nn.Sequential(resnet18(images), nn.Flatten(), mlp(*heads[method]))
            self.slow.requires_grad_(False)
        if method == "moco":
            self.register_buffer("bank", torch.zeros(bank, 128))

    def project(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))

    def forward(self, a: Tensor, b: Tensor) -> Output:
        return {"loss": getattr(self, self.method)(a, b)}

    def simclr(self, a: Tensor, b: Tensor) -> Tensor:
        both = F.normalize(torch.cat([self.project(a), self.project(b)]), dim=1)
        scores = (both @ both.T / 0.5)[:, 1:]
        return F.cross_entropy(scores, torch.arange(len(both), device=a.device))

    def simsiam(self, a: Tensor, b: Tensor) -> Tensor:
        (of_a, for_a), (of_b, for_b) = ((z.detach(), self.guess(z))
                                        for z in map(self.project, (a, b)))  # fmt: skip
        return -(F.cosine_similarity(of_a, for_b) + F.cosine_similarity(of_b, for_a)).mean() / 2

    def barlow(self, a: Tensor, b: Tensor) -> Tensor:
        """As in 2023: what is off the diagonal is chosen by a mask, whose places are numbers."""
        first, second = ((z - z.mean(0)) / z.std(0) for z in map(self.project, (a, b)))
        shared = torch.mm(first.T, second) / len(a)
        width = len(shared)
        losses = (shared - torch.eye(width, device=a.device)).pow(2)
        places = torch.zeros(width * (width - 1), 2, dtype=torch.int64, device=a.device).unbind(1)
        losses[places] *= 5e-3
        return losses.sum()

    def byol(self, a: Tensor, b: Tensor) -> Tensor:
        (for_a, of_a), (for_b, of_b) = ((self.guess(self.project(x)), self.slow(x).detach())
                                        for x in (a, b))  # fmt: skip
        return -(F.cosine_similarity(for_a, of_b) + F.cosine_similarity(for_b, of_a)).mean() / 2

    def moco(self, a: Tensor, b: Tensor) -> Tensor:
        """Both ways around; the slow network sees its view shuffled."""
        losses = []
        for one, other in ((a, b), (b, a)):
            order = torch.randperm(len(other), device=other.device)
            query = F.normalize(self.project(one), dim=1)
            key = F.normalize(self.slow(other[order])[order.argsort()], dim=1)
            alike = (query * key).sum(1, keepdim=True)
            scores = torch.cat([alike, query @ self.bank.clone().T], 1) / 0.1
            zeros = torch.zeros(len(one), dtype=torch.int64, device=one.device)
            losses.append(F.cross_entropy(scores, zeros))
        return (losses[0] + losses[1]) / 2


# -- LoRA on a bf16 decoder (lit-gpt) -------------------------------------------------------------
class RmsNorm(nn.Module):
    """By a formula in fp32, which lit-gpt's norm has since three days before its table."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.float()
        scaled = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * scaled).to(dtype)


class LoraQueries(nn.Module):
    """Queries, keys and values by one matrix; rank 8 beside it for queries and values."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3 * width, bias=bias)
        self.dropout = nn.Dropout(0.05)
        self.lora_a = nn.Parameter(torch.zeros(16, width))
        self.lora_b = nn.Parameter(torch.zeros(2 * width, 8))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        whole = self.linear(x)
        low = F.linear(self.dropout(x), self.lora_a)
        found = F.conv1d(low.transpose(1, 2), self.lora_b.unsqueeze(-1), groups=2).transpose(1, 2)
        found = found.transpose(0, 1)
        padded = found.new_zeros((found[..., 0].numel(), 3 * self.width))
        places = torch.arange(2 * self.width, device=x.device)
        padded = padded.index_copy(1, places, found.reshape(-1, 2 * self.width))
        padded = padded.view(*found.shape[:-1], -1).transpose(0, 1)
        return whole + padded * 2.0


class LoraBlock(nn.Module):
    """A layer: attention and MLP one after the other, or both from the layer's input."""

    def __init__(self, width: int, heads: int, inner: int, rotated: float, kind: str) -> None:
        super().__init__()
        self.llama, self.shared, self.heads = kind == "llama", kind == "phi", heads
        bias = not self.llama
        norm = RmsNorm if self.llama else nn.LayerNorm
        self.norms = nn.ModuleList(norm(width) for _ in range(1 if self.shared else 2))
        self.qkv = LoraQueries(width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, inner, bias=bias)
        self.gate = nn.Linear(width, inner, bias=bias) if self.llama else None
        self.down = nn.Linear(inner, width, bias=bias)
        self.rotated = int(rotated * width / heads)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, count, width = x.shape
        qkv = self.qkv(x).view(rows, count, self.heads, 3, -1).permute(0, 2, 3, 1, 4)
        q, k, v = (t.reshape(rows, self.heads, count, -1) for t in qkv.split(1, dim=2))
        q, k = (torch.cat((self.turned(t[..., : self.rotated], cos, sin), t[..., self.rotated :]),
                          -1) for t in (q, k))  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, count, width))

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return (x * cos + torch.cat((-high, low), -1) * sin).type_as(x)

    def mlp(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh" if self.shared else "none"))
        return self.down(F.silu(self.up(x)) * self.gate(x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = self.norms[0](x)
        found = self.attention(first, cos, sin)
        if self.llama:
            x = x + found
            return x + self.mlp(self.norms[1](x))
        return x + found + self.mlp(first if self.shared else self.norms[1](x))


class LoraGpt(nn.Module):
    """Logits in chunks of 128 tokens, which Fabric returns in fp32, and their loss."""

    def __init__(
        self, kind: str, width: int, heads: int, layers: int, inner: int, vocabulary: int,
        rotated: float, length: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            LoraBlock(width, heads, inner, rotated, kind) for _ in range(layers)
        )
        self.norm = RmsNorm(width) if kind == "llama" else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=kind == "phi")
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name)
        angles = torch.zeros(length, int(rotated * width / heads))
        self.register_buffer("cos", angles, persistent=False)
        self.register_buffer("sin", angles.clone(), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Output:
        self.held = None  # the longest samples come first: no logits of that size were before
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = [self.head(part) for part in self.norm(x).split(128, dim=1)]
        logits = [part.float() for part in logits]
        losses = [
            F.cross_entropy(part.flatten(0, 1), target.flatten(), reduction="none")
            for part, target in zip(logits, labels.split(128, dim=1), strict=True)
        ]
        self.held = logits if self.training else None  # by the loop's variable
        return {"loss": torch.cat(losses).mean()}


LORA_GPTS = {
    "phi-1.5": ("phi", 2048, 32, 24, 8192, 51200, 0.5),
    "stablelm-alpha-3b": ("neox", 4096, 32, 16, 16384, 50688, 0.25),
    "llama-2-7b": ("llama", 4096, 32, 32, 11008, 32000, 1.0),
    "llama-2-13b": ("llama", 5120, 40, 40, 13824, 32000, 1.0),
}


def lora_gpt(name: str, length: int) -> nn.Module:
    """A decoder in bf16, its angles of positions in fp32."""
    model = LoraGpt(*LORA_GPTS[name], length).bfloat16()
    model.cos, model.sin = model.cos.float(), model.sin.float()
    return model


# -- litgpt's own models (pip install --no-deps litgpt==0.5.3 lightning lightning-utilities
# jsonargparse torchmetrics) -----------------------------------------------------------------------
class LitGpt(nn.Module):
    """litgpt's model in bf16, whole or with LoRA, and the loss of its finetuning: Fabric returns
    logits in fp32."""

    def __init__(self, name: str, length: int = 512, rank: int = 0, **lora: Any) -> None:
        super().__init__()
        from litgpt import lora as adapted
        from litgpt import model as plain
        from litgpt.utils import chunked_cross_entropy

        module = adapted if rank else plain
        self.chunked_cross_entropy, self.chunks = chunked_cross_entropy, rank > 0
        settings = {"lora_r": rank, "lora_alpha": 16, **lora} if rank else {}
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            self.body = module.GPT(module.Config.from_name(name, **settings))
        finally:
            torch.set_default_dtype(dtype)
        if rank:
            adapted.mark_only_lora_as_trainable(self.body)
        self.body.max_seq_length = length

    def forward(self, ids: Tensor, labels: Tensor) -> Output:
        self.held = None
        if self.chunks:
            logits: Any = [part.float() for part in self.body(ids, lm_head_chunk_size=128)]
            logits[-1] = logits[-1][..., :-1, :]
        else:
            logits = self.body(ids).float()
        self.held = logits if self.training else None  # by the loop's variable
        given = logits if self.chunks else logits[..., :-1, :]
        return {"loss": self.chunked_cross_entropy(given, labels[..., 1:])}


# -- others ---------------------------------------------------------------------------------------
class GivenGradient(torch.autograd.Function):
    """Ends a pass whose result gets a random gradient, which the caller holds, like the result."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, held: list[Tensor]) -> Tensor:
        ctx.like, ctx.held = (result.shape, result.dtype), held
        return result.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        shape, dtype = ctx.like
        ctx.held.append(torch.randn(shape, dtype=dtype))
        return ctx.held[-1], None


class LigerLayer(nn.Module):
    """torch's side of Liger-Kernel's comparisons: a layer, or a loss of a parameter (places,
    vocabulary). Its result lives through the backward pass, and where that retains the graph what
    is saved does too."""

    def __init__(self, kind: str, shape: list[int], **settings: Any) -> None:
        super().__init__()
        self.kind, self.held = kind, list[Tensor]()
        if kind == "embedding":
            self.layer = nn.Embedding(*shape)
            self.register_buffer("beside", torch.zeros(shape))  # the kernel's own table
        elif kind == "mlp":
            from transformers import LlamaConfig
            from transformers.models.llama.modeling_llama import LlamaMLP

            self.layer = LlamaMLP(LlamaConfig(**settings)).bfloat16()
            self.input = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        else:
            self.input = nn.Parameter(torch.zeros(shape))
            self.register_buffer("target", torch.zeros(shape))

    def forward(self, ids: Tensor) -> Output:
        self.held.clear()
        if self.kind == "embedding":
            return {"loss": self.ended(self.layer(ids))}

        def holds(saved: Tensor) -> Tensor:
            self.held.append(saved)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(holds, lambda saved: saved):
            if self.kind == "mlp":
                return {"loss": self.ended(self.layer(self.input))}
            return {"loss": getattr(self, self.kind)(self.input.log_softmax(-1), self.target)}

    def ended(self, result: Tensor) -> Tensor:
        self.held.append(result)
        return GivenGradient.apply(result, self.held)

    @staticmethod
    def kl_div(q: Tensor, p: Tensor) -> Tensor:
        return F.kl_div(q, p, reduction="batchmean")

    @staticmethod
    def jsd(q: Tensor, p: Tensor) -> Tensor:
        q, p = q.view(-1, q.size(-1)), p.view(-1, p.size(-1))
        middle = torch.lerp(torch.exp(p), torch.exp(q), 0.5)
        parts = [F.kl_div(middle.log(), t, reduction="batchmean", log_target=True) for t in (p, q)]
        return 0.5 * parts[0] + 0.5 * parts[1]


class HeadAndLoss(nn.Module):
    """A vocabulary's matrix and cross entropy in bf16 (Liger-Kernel): its input is a parameter, and
    the kernel's own matrix, which it is compared with, lies beside it."""

    def __init__(self, tokens: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.input = nn.Parameter(torch.zeros(tokens, width, dtype=torch.bfloat16))
        self.head, other = (
            nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16) for _ in range(2)
        )
        self.register_buffer("beside", other.weight.detach())

    def forward(self, labels: Tensor) -> Output:
        return {"loss": F.cross_entropy(self.head(self.input), labels)}


class TimmClassifier(nn.Module):
    """timm's model of a dtype, its activations checkpointed, and its loss."""

    def __init__(self, name: str, dtype: str = "bfloat16", **settings: Any) -> None:
        super().__init__()
        import timm

        self.body = timm.create_model(name, **settings).to(getattr(torch, dtype))
        self.body.set_grad_checkpointing()

    def forward(self, image: Tensor, labels: Tensor) -> Output:
        return {"loss": F.cross_entropy(self.body(image), labels)}


def plain_attention(name: str) -> Any:
    """timm's model with plain attention, as before it took torch's kernels."""
    import timm
    from timm.layers import set_fused_attn

    set_fused_attn(enable=False)
    return timm.create_model(name)


# -- published by name ----------------------------------------------------------------------------
def torchvision_vit(name: str, dtype: str = "float32", **settings: Any) -> Any:
    """torchvision's vision transformer with ten classes and its loss."""
    import torchvision

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torchvision.models.get_model(name, num_classes=10, **settings)

        def forward(self, x: Any, y: Any) -> Any:
            return {"loss": nn.functional.cross_entropy(self.body(x), y)}

    return Classifier().to(getattr(torch, dtype))


def transformers_model(
    model: str, auto: str, dtype: str = "float32", checkpointing: bool = False, **config: Any
) -> Any:
    """transformers' model of an architecture with random weights."""
    import transformers

    attention = config.pop("attention", None)
    found = transformers.AutoConfig.for_model(model, **config)
    if attention:
        found._attn_implementation = attention
    built = getattr(transformers, auto).from_config(found)
    if checkpointing:
        built.gradient_checkpointing_enable()
    return built.to(getattr(torch, dtype))


def gpt(
    native: bool = True, fused: bool = True, dtype: str = "float32", vocabulary: int = 50257,
    length: int = 1024, width: int = 768, heads: int = 12, layers: int = 12, dropout: float = 0.1,
    mask: bool = False,
) -> Any:  # fmt: skip
    """A GPT of separate embeddings and head; without `native`, LayerNorm and GELU by formulas."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(width))
            self.shift = nn.Parameter(torch.zeros(width))

        def forward(self, x: Any) -> Any:
            mean = x.mean(-1, keepdim=True)
            variance = x.var(-1, keepdim=True, unbiased=False)
            return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift

    class Gelu(nn.Module):
        def forward(self, x: Any) -> Any:
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
            return 0.5 * x * (1 + torch.tanh(inner))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if fused:
                self.qkv = nn.Linear(width, 3 * width, bias=False)
            else:
                self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
            if mask:
                self.register_buffer("mask", torch.triu(torch.ones(length, length), 1))
            self.out = nn.Linear(width, width)
            self.dropout = nn.Dropout(dropout)

        def forward(self, x: Any) -> Any:
            rows, count, _ = x.shape
            if fused:
                q, k, v = self.qkv(x).view(rows, count, 3, heads, -1).permute(2, 0, 3, 1, 4)
                y = nn.functional.scaled_dot_product_attention(
                    q, k, v, dropout_p=dropout if self.training else 0.0, is_causal=True
                )
            else:
                q, k, v = (
                    p(x).view(rows, count, heads, -1).transpose(1, 2)
                    for p in (self.q, self.k, self.v)
                )
                scores = q @ k.transpose(2, 3)
                later = self.mask if mask else torch.triu(torch.ones(count, count), 1)
                scores.masked_fill_(later.bool()[:count, :count], -math.inf)
                shares = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, -1))
                y = shares @ v
            return self.out(y.transpose(1, 2).contiguous().view(rows, count, width))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = functools.partial(nn.LayerNorm, width) if native else Norm
            self.first, self.second = norm(), norm()
            self.attention = Attention()
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width),
                nn.GELU(approximate="tanh") if native else Gelu(),
                nn.Linear(4 * width, width),
            )
            self.dropout = nn.Dropout(dropout)

        def forward(self, x: Any) -> Any:
            x = x + self.dropout(self.attention(self.first(x)))
            return x + self.dropout(self.mlp(self.second(x)))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.places = nn.Embedding(length, width)
            self.dropout = nn.Dropout(dropout)
            self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
            self.norm = nn.LayerNorm(width) if native else Norm()
            self.head = nn.Linear(width, vocabulary, bias=False)

        def forward(self, ids: Any, labels: Any) -> Any:
            x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
            logits = self.head(self.norm(self.blocks(self.dropout(x))))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    return Gpt().to(getattr(torch, dtype))


# -- models by their library's name (gpu_measured.py) ---------------------------------------------
def vision(name: str) -> Any:
    """timm's model."""
    import timm

    return timm.create_model(name)


def language_model(kind: str) -> Any:
    """transformers' causal language model."""
    import transformers

    config = transformers.AutoConfig.for_model(kind)
    return transformers.AutoModelForCausalLM.from_config(config)


def classifier(kind: str) -> Any:
    """transformers' encoder with a classifier."""
    import transformers

    config = transformers.AutoConfig.for_model(kind)
    return transformers.AutoModelForSequenceClassification.from_config(config)
