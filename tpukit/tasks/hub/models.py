"""Models of transformers: from the hub or a folder, without its output, with recomputation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import logging

from tpukit.errors import DataError
from tpukit.hardware.backend import ModelOps
from tpukit.io.hub_data import is_hub_silent
from tpukit.tasks.hub import OTHER_FILES

FILE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".json", ".gguf")
BRING_A_FOLDER = (
    "Without a network, bring the directory along (config.json and model.safetensors) and give its"
    " path."
)
HUB_HINTS = {
    "GatedRepoError": "Accept its licence on its page there, and set HF_TOKEN.",
    "RepositoryNotFoundError": "Check the name (OWNER/NAME); a private one needs HF_TOKEN.",
}
"""What to do, by huggingface_hub's exception."""


def is_on_hub(source: str) -> bool:
    """Whether it can only be a model's name on the hub; many of these have a point in them."""
    is_path = source.startswith((".", "/", "~")) or source.endswith(FILE_SUFFIXES)
    return not is_path and not Path(source).exists()


def download(name: str, asked: str) -> Path:
    """The folder of a public model's files, from the hub or its cache. Raises `DataError`.

    asked: how the user named it (`--init gpt2`).
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", *OTHER_FILES, "merges.txt"],
                ignore_patterns=["consolidated*"],  # the same weights again
                local_files_only=is_hub_silent(),
            )
        )
    except Exception as error:
        raise DataError(
            f"{asked}: not a local directory, and it could not be downloaded from the Hub"
            f" ({type(error).__name__}).",
            HUB_HINTS.get(type(error).__name__, BRING_A_FOLDER),
        ) from error


@contextmanager
def without_output() -> Iterator[None]:
    """Without transformers' bars and warnings: what it warns of is checked here."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def recompute_layer(ops: ModelOps, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`ops.recompute` of a layer, some of whose inputs are no tensors, or are bound by name."""
    named: dict[str, Any] = function.keywords if isinstance(function, partial) else {}
    layer = partial(function.func, *function.args) if isinstance(function, partial) else function
    values = [*inputs, *named.values()]

    def run(*own: Tensor) -> Tensor:
        rest = iter(own)
        filled = [next(rest) if isinstance(value, Tensor) else value for value in values]
        by_name = dict(zip(named, filled[len(inputs) :], strict=True))
        found: Tensor = layer(*filled[: len(inputs)], **by_name)
        return found

    return ops.recompute(run, *[value for value in values if isinstance(value, Tensor)])
