"""The rows that a causal model can be trained with, by trying a small copy of it.

Packed rows hold several samples, which attention keeps apart; other layers (state spaces,
convolutions), and positions that a model counts itself, mix them. A model that mixes them is
trained with one sample to a row; one whose padding reaches what comes before it is refused.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from tpukit.errors import DataError
from tpukit.hardware.backend import TorchOps
from tpukit.tasks.hub.models import without_output
from tpukit.tasks.llm.model.lean import ATTENTION, LanguageModel
from tpukit.tasks.llm.model.load import load_lm, set_dropout, shape_of

LENGTH, CUT, VOCABULARY = 40, 17, 61
"""A row of two samples: its length, where the second one begins, and the tokens there are."""
WITHIN = 1e-4
"""Difference that is rounding, as a part of the largest logit."""
MOST_PARAMETERS = 128e6
"""Parameters that a small copy may have: it is made at the start of a run."""
COUNT = 4
"""Layers of the small copy."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "word_embed_proj_dim"),
                    32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(LAYERS, COUNT),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_experts",
                     "decoder_attention_heads", "num_local_experts", "n_routed_experts",
                     "moe_num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok",
                     "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank",
                     "kv_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                     "rotary_dim", "d_kv", "hidden_size_per_layer_input", "mamba_n_heads",
                     "mamba_d_head"), 8),
    **dict.fromkeys(("n_positions", "max_position_embeddings"), 128),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "sliding_window": 9, "encoder_layers": 1, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.2, "expand": 1, "mamba_expand": 2, "mamba_d_ssm": 64,
}  # fmt: skip
"""Sizes of the small copy, by the names that configurations have for them."""


LIMITS = ("attention_chunk_size", "attention_window_size", "floor_scale", "index_topk",
          "keep_window_size", "local_attention", "log_scaling_n_floor", "sliding_window_size",
          "window_size")  # fmt: skip
"""Lengths beyond which a model attends otherwise: the small copy has short ones, where a run's
samples may be longer."""
NEEDED = ("head_dim", "num_key_value_heads", "pad_token_id")
"""Those that some models cannot do without, and leave out of their default configuration."""


@dataclass(frozen=True)
class Rows:
    """How rows are made for a model."""

    packed: bool
    last_at_wanted: bool = True
    """Whether the last layer is computed at wanted places alone."""
    attention: str = ATTENTION
    """The model's attention: the hardware's, or one of transformers'."""
    reason: str = ""
    """Why rows are not packed."""


WAYS = (
    Rows(packed=True),
    Rows(packed=True, last_at_wanted=False),
    Rows(packed=False),
    Rows(packed=False, last_at_wanted=False),
    Rows(packed=False, last_at_wanted=False, attention="eager"),
)
"""From the best to the worst."""
_KNOWN: dict[str, tuple[Rows | None, str]] = {}
WHAT_TO_DO = "docs/llm_models.md lists the models that can."


def rows_of(config: PretrainedConfig, longest: int = LENGTH) -> Rows:
    """How rows are made for a model of this configuration.

    longest: tokens of the longest sample.

    Raises `DataError` where no rows give what transformers gives each sample alone.
    """
    name = config.model_type
    try:
        tried = small(config, longest)
        key = json.dumps(tried.to_dict(), default=str, sort_keys=True)
        if key not in _KNOWN:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"), without_output():
                torch.manual_seed(0)
                _KNOWN[key] = _Pair(tried).rows()
    except Exception as error:
        raise DataError(f"a {name} cannot be tried: {_first_line(error)}.", WHAT_TO_DO) from error
    rows, problem = _KNOWN[key]
    if rows is None:
        raise DataError(f"a {name} cannot be trained here: {problem}.", WHAT_TO_DO)
    return rows


def small(config: PretrainedConfig, longest: int = LENGTH) -> PretrainedConfig:
    """The configuration of a small model with the same kinds of layers."""
    made: PretrainedConfig = type(config).from_dict(_shrunk(config.to_dict(), longest))
    return made


def _shrunk(fields: dict[str, Any], longest: int) -> dict[str, Any]:
    made = dict(fields)
    count = next((fields[name] for name in LAYERS if name in fields), None)
    kinds = fields.get("layer_types") or []
    first = [n for n, kind in enumerate(kinds) if kind not in kinds[:n]] or list(range(COUNT))
    # Some models want the last layer to be of a certain kind.
    first.sort(key=lambda n: bool(kinds) and kinds[n] == kinds[-1])
    kept = (first * COUNT)[-COUNT:]
    for name, value in fields.items():
        if name in SMALL and (value is not None or name in NEEDED):
            made[name] = SMALL[name]
        elif name in LIMITS and isinstance(value, int) and value < longest:
            made[name] = SMALL["sliding_window"]
        elif name == "num_kv_shared_layers" and value:  # the last ones, by their kind
            made[name] = COUNT // 2
        elif "jitter" in name and value:  # noise of the routing in training, which mixes nothing
            made[name] = 0.0
        elif name.startswith("rope_") and isinstance(value, dict):
            made[name] = _unscaled(value)
        elif isinstance(value, list) and len(value) == count:
            made[name] = [value[number] for number in kept]
        elif isinstance(value, dict) and value and all(str(n).isdigit() for n in value):
            of_layer = {int(n): settings for n, settings in value.items()}
            made[name] = {n: of_layer[k] for n, k in enumerate(kept) if k in of_layer}
        elif isinstance(value, dict) and value.keys() & {*LAYERS}:  # of texts, of images
            made[name] = _shrunk(value, longest)
    for name in ("num_key_value_heads", "num_kv_heads"):
        if name in fields and fields[name] == fields.get("num_attention_heads"):
            made[name] = SMALL["num_attention_heads"]
    return made


def _unscaled(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions without the lists of factors that belong to a head's width."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {name: _unscaled(value) for name, value in rope.items()}
    if not any(isinstance(value, list) for value in rope.values()):
        return rope
    kept = ("rope_theta", "partial_rotary_factor")
    return {"rope_type": "default", **{name: rope[name] for name in kept if name in rope}}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"


def _why(error: Exception) -> str:
    """Why a model cannot be computed in a way, by what its layers raised."""
    if isinstance(error, KeyError) and error.args == (ATTENTION,):
        return "its layers take attention from a list of their own"
    if isinstance(error, TypeError) and str(error).startswith("attention() missing"):
        return "its layers do not hand on to attention where samples begin"
    return _first_line(error)


class _Pair:
    """A small model as transformers computes it, and its weights for the lean form."""

    def __init__(self, config: PretrainedConfig) -> None:
        plain = copy.deepcopy(config)
        set_dropout(plain, 0.0)
        with torch.device("meta"):
            meta = AutoModelForCausalLM.from_config(copy.deepcopy(plain))
        count = sum(parameter.numel() for parameter in meta.parameters())
        if count > MOST_PARAMETERS:
            raise ValueError(f"its smallest copy has {count / 1e6:.0f} M parameters")
        self.theirs = AutoModelForCausalLM.from_config(
            plain, attn_implementation="eager", trust_remote_code=False
        )
        self.theirs.float().eval()
        with torch.no_grad():
            for parameter in self.theirs.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        self.shape = shape_of(config, LENGTH)
        self.tokens = torch.randint(3, VOCABULARY, (2, LENGTH))
        row = self.tokens[:1]
        with torch.no_grad():
            self.alone = [self._alone(s) for s in (row[:, :CUT], row[:, CUT:], self.tokens[1:])]
            whole = self._alone(row)[CUT:]
        self.most = max(1.0, float(self.alone[0].abs().max()))
        if float((whole - self.alone[1]).abs().max()) < 10 * WITHIN * self.most:
            raise ValueError("its samples do not see what comes before them")

    def rows(self) -> tuple[Rows | None, str]:
        """The first way that is right, and what is wrong with the last one tried."""
        problems: list[str] = []
        for rows in WAYS:
            try:
                problem = self.differs(rows)
            except Exception as error:
                problem = _why(error)
            if not problem:
                return replace(rows, reason="" if rows.packed else problems[0]), ""
            problems.append(problem)
        return None, problems[-1]

    def _alone(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.theirs(input_ids=tokens, use_cache=False).logits[0]
        return logits

    def differs(self, rows: Rows) -> str:
        """What is different in the lean form; nothing where all is the same."""
        lm = load_lm(self.shape, torch.float32, drawn=False, attention=rows.attention)
        lm.load_state_dict(self.theirs.state_dict())
        model = LanguageModel(lm, TorchOps(), last_at_wanted=rows.last_at_wanted).train()
        row, second = self.tokens[0], self.alone[1]
        if rows.packed:
            tokens, starts = self.tokens, torch.zeros_like(self.tokens)
            starts[0, CUT:] = CUT
            expected = torch.cat(self.alone)
        else:
            tokens, starts = torch.zeros_like(self.tokens), None
            tokens[0, : LENGTH - CUT], tokens[1] = row[CUT:], self.tokens[1]
            expected = torch.cat([second, torch.zeros(CUT, second.shape[1]), self.alone[2]])
        # In another order than they come: nothing that leaves them where they are is right. Three
        # are wanted twice: a model may not view its result as the rows that it was given.
        wanted = torch.arange(2 * LENGTH).flip(0)
        wanted = torch.cat([wanted, wanted[:3]])[None]
        with torch.no_grad():
            found = model(tokens, wanted, starts=starts)[0, : 2 * LENGTH].flip(0)
        if not rows.packed:
            found = found.clone()
            found[LENGTH - CUT : LENGTH] = 0
        difference = float((found - expected).abs().max())
        if difference < WITHIN * self.most:
            return ""
        kind = "packed" if rows.packed else "padded"
        return f"{kind} samples are not as they are alone (logits differ by {difference:.2g})"
