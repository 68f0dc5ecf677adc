"""A timm model by name: its input, its weights, its parameter groups."""

import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from timm.models import load_state_dict
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn

from tpukit.errors import ConfigError, DataError
from tpukit.hardware.backend import ParameterGroup
from tpukit.tasks.images.settings import ImagesConfig
from tpukit.train.features import TableFeatures, WithFeatures


@dataclass(frozen=True)
class InputFormat:
    """What a model's images look like."""

    side: int
    """Height and width."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str
    crop_pct: float
    crop_mode: str
    """What becomes of an oblong image: center cuts it, squash distorts it, border adds to it."""

    def to_json(self) -> bytes:
        """In timm's names."""
        found = dict(asdict(self), input_size=(3, self.side, self.side))
        del found["side"]
        return json.dumps(found).encode()

    def normalised(self, pixels: Tensor) -> Tensor:
        """(rows, 3, side, side) uint8 -> float32 by channel, as the model was trained."""
        # Numbers, not tensors: an upload in each step would be another input of an XLA graph.
        channels = [
            (pixels[:, i : i + 1].float() - 255 * self.mean[i]) / (255 * self.std[i])
            for i in range(3)
        ]
        return torch.cat(channels, 1)


def require_model(name: str) -> None:
    """Raises ConfigError for a name that timm does not have."""
    if not timm.is_model(name.partition(".")[0]):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise ConfigError(
            f"model {name!r}: timm {timm.__version__} has no such model.",
            f"Did you mean {', '.join(near)}?" if near else "`timm.list_models()` lists them.",
        )


def input_format(config: ImagesConfig) -> InputFormat:
    """The input of the configured model, by timm's own data configuration."""
    found = resolve_data_config({}, pretrained_cfg=_pretrained_config(config.model))
    side = config.image_size or int(found["input_size"][-1])
    names = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
    return InputFormat(side, **{name: found[name] for name in names})


def _pretrained_config(name: str) -> dict[str, Any]:
    found = timm.get_pretrained_cfg(name) or timm.get_pretrained_cfg(name.partition(".")[0])
    return found.to_dict() if found is not None else {}


def size_option(config: ImagesConfig) -> dict[str, int]:
    """What timm needs to know of another image size."""
    fixed = _pretrained_config(config.model).get("fixed_input_size")
    return {"img_size": config.image_size} if config.image_size and fixed else {}


def build_classifier(
    config: ImagesConfig, outputs: int, features: TableFeatures | None = None
) -> nn.Module:
    """The model, freshly initialised, for the configured image size; features: what it sees beside
    the image."""
    if features is not None:
        network = build_classifier(config, 0)
        width: Any = getattr(network, "head_hidden_size", None) or network.num_features
        return WithFeatures(network, width, features, outputs)
    options: dict[str, Any] = {"num_classes": outputs, **size_option(config)}
    if config.drop_path:
        options["drop_path_rate"] = config.drop_path
    try:
        model: nn.Module = timm.create_model(config.model, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"model {config.model!r} cannot be built with {options}: {error}",
            "Leave out drop_path or image_size, or choose another size or model.",
        ) from error
    return model


# -- weights -------------------------------------------------------------------------------------
def load_pretrained(model: nn.Module, config: ImagesConfig) -> None:
    """Copies pretrained weights into a model; a head for other classes stays as it is.

    Raises DataError where they cannot be had, or are those of another model.
    """
    model = network_of(model)
    if config.pretrained == "timm":
        weights = _from_hub(config)
    else:
        weights = _as_timm(model, _from_file(Path(config.pretrained)))
    own = model.state_dict()
    head = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    head = head if isinstance(head, str) else tuple(head)
    fits = {n: w for n, w in weights.items() if n in own and own[n].shape == w.shape}
    wrong = [n for n in own if n not in fits and not n.startswith(head)]
    if wrong:
        raise DataError(
            f"pretrained {config.pretrained}: not weights of {config.model}: {wrong[0]} is"
            f" {'missing' if wrong[0] not in weights else 'of another shape'}"
            f" ({len(wrong)} of {len(own)} tensors).",
            "Give the weights of the same timm model, or pretrained=none.",
        )
    model.load_state_dict({**own, **fits})


def _as_timm(model: nn.Module, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Weights with timm's names, position embeddings resized to the model's image size."""
    own = model.state_dict()
    if all(name in own and own[name].shape == weights[name].shape for name in weights):
        return weights
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    try:
        return convert(dict(weights), model) if convert is not None else weights
    except Exception:  # of other weights than it knows it may raise anything
        return weights


def _from_hub(config: ImagesConfig) -> Mapping[str, Tensor]:
    try:
        weights: Mapping[str, Tensor] = timm.create_model(
            config.model, pretrained=True, **size_option(config)
        ).state_dict()
    except Exception as error:  # the hub's errors have many classes
        raise DataError(
            f"pretrained timm: the weights of {config.model} cannot be had"
            f" ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}).",
            "Without a network attach them as a file: --set pretrained=weights.safetensors",
        ) from error
    return weights


def _from_file(path: Path) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise DataError(
            f"pretrained {str(path)!r}: there is no such file.",
            "Give none, timm, or a .safetensors or .pth file.",
        )
    try:
        loaded = load_state_dict(str(path), weights_only=True)
        return {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
    except Exception as error:  # a damaged file raises anything
        raise DataError(
            f"pretrained {path}: not a file of weights ({type(error).__name__}).",
            "Save it with safetensors.torch.save_file(model.state_dict(), PATH).",
        ) from error


def network_of(model: nn.Module) -> nn.Module:
    """timm's model within one that sees features too."""
    return model.network if isinstance(model, WithFeatures) else model


# -- the optimizer's groups ----------------------------------------------------------------------
def layer_groups(
    model: nn.Module, weight_decay: float, layer_decay: float
) -> Sequence[ParameterGroup]:
    """timm's groups: no decay for norms, biases and what the model names; with `layer_decay` below
    1 each layer's rate is that times the next one's."""
    whole, model = model, network_of(model)
    named = getattr(model, "no_weight_decay", None)
    spared = named() if named is not None else ()
    if layer_decay == 1:
        groups = param_groups_weight_decay(model, weight_decay, no_weight_decay_list=spared)
    else:
        groups = param_groups_layer_decay(
            model, weight_decay, no_weight_decay_list=spared, layer_decay=layer_decay
        )
    found = [ParameterGroup(g["params"], g["weight_decay"], g.get("lr_scale", 1.0)) for g in groups]
    if whole is not model:
        known = {id(parameter) for parameter in model.parameters()}
        others = [p for p in whole.parameters() if id(p) not in known]
        found.append(ParameterGroup([p for p in others if p.ndim > 1], weight_decay))
        found.append(ParameterGroup([p for p in others if p.ndim < 2], 0.0))
    return found
