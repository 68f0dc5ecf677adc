"""Which library a class belongs to, what replaced a name that it lost, and its release."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tpukit.knowledge.calls import old_calls

_TABLE = Path(__file__).parent / "tables" / "lost_names.toml"
_OWNERS = {
    "trl": r"(?:SFT|DPO|GRPO|PPO|KTO|ORPO|CPO|RLOO|Reward|GKD|BCO|XPO|NashMD|Online\w*)"
    r"(?:Trainer|Config)|ModelConfig|ScriptArguments|DataCollatorForCompletionOnlyLM",
    "peft": r"\w*Lora\w*|Peft\w*|\w*PromptTuning\w*|PromptEncoder\w*|IA3\w*",
    "accelerate": r"Accelerator\w*|PartialState|ProjectConfiguration|DataLoaderConfiguration",
    "diffusers": r"\w*Pipeline|UNet\w*|Autoencoder\w*|VaeImageProcessor|\w*Transformer2D\w*"
    r"|\w*Scheduler",
    "datasets": r"Dataset|DatasetDict|IterableDataset|load_dataset",
    "vllm": r"LLM|(?:Async)?(?:LLM)?Engine(?:Args)?|SamplingParams|VllmConfig|\w*ModelRunner",
    "huggingface_hub": r"HfApi|HfFolder|InferenceClient|hf_hub_download|snapshot_download",
    "pytorch_lightning": r"Lightning\w+|\w*Logger|ModelCheckpoint|EarlyStopping",
    "torch": r"(?:Distributed)?DataParallel|DataLoader|\w*LR|GradScaler|Tensor|Optimizer",
    "jax": r"ArrayImpl|\w*Tracer|ShapedArray|NamedSharding",
    "flax": r"Param|Variable|VariableState|State|Rngs|nnx\.\w+",
    "sentence_transformers": r"SentenceTransformer\w*|CrossEncoder\w*",
    "transformers": r"(?:Seq2Seq)?(?:Trainer|TrainingArguments)|GenerationConfig|\w+For[A-Z]\w+"
    r"|\w*(?:Model|Config|Tokenizer(?:Fast)?|TokenizersBackend|Processor(?:Fast)?|Cache"
    r"|Attention|RotaryEmbedding|DecoderLayer|CausalLM)",
}
"""Library by the names of its classes and functions, the narrower expressions first."""
_OWNER = {name: re.compile(f"(?:{classes})") for name, classes in _OWNERS.items()}
_RELEASE = re.compile(
    r"\b(torch(?:vision|audio|_xla)?|transformers|trl|peft|accelerate|diffusers|datasets|vllm"
    r"|sglang|unsloth|huggingface[_-]hub|numpy|jax(?:lib)?|flax|(?:pytorch[_-])?lightning"
    r"|tokenizers|deepspeed|bitsandbytes|triton|timm|setuptools|sentence[_-]transformers)"
    r"(?:[ '\"`_-]*version)?[ :='\"`@v-]{1,6}(\d+\.\d+(?:\.\w+){0,2})",
    re.IGNORECASE,
)


BREAKS = {"transformers": "5", "huggingface_hub": "1", "numpy": "2", "pandas": "3", "datasets": "4"}
"""The last release of a library that took much away."""


def owner(name: str) -> str:
    """The library that defines a class (`SFTTrainer`) or a method (`SFTTrainer.__init__`); empty
    where its name does not tell."""
    first = name.partition(".")[0]
    return next((lib for lib, classes in _OWNER.items() if classes.fullmatch(first)), "")


def releases_in(text: str) -> Iterator[tuple[str, str]]:
    """(library, release) of each that a line names: `Transformers: 4.57.3`, `torch==2.9.0`."""
    for match in _RELEASE.finditer(text):
        yield match[1].lower().replace("-", "_"), match[2]


def installed_release(library: str) -> str:
    """The release in this environment; empty where it is not installed."""
    try:
        return version(library)
    except (PackageNotFoundError, ValueError):
        return ""


@dataclass(frozen=True)
class Lost:
    """A name that a library's release has no more."""

    words: str
    """In which release it went."""
    new: str
    """What to write instead; may be empty."""
    had: str = ""
    """The last release known to have it; may be empty."""


def lost_name(place: str, name: str) -> Lost | None:
    """What is known of a name that `place`, a module, a class or its method, does not have.

    The table of calls knows a few with their successors, that of lost names the others.
    """
    last = place.removesuffix(".__init__").rpartition(".")[2]
    for row in old_calls():
        if row.status != "removed" or ", " in row.new:
            continue
        if row.keywords:
            is_it = name in row.keywords and any(q.endswith(f".{last}") for q in row.names)
        else:
            whole, ending = f"{place}.{name}", f".{last}.{name}"
            is_it = any(q == whole or q.replace("()", "").endswith(ending) for q in row.names)
        if is_it:
            return Lost(f"{row.since} has it no more", row.new)
    for library, had, lacks, names, new in _lost_names():
        is_its = library in (place.partition(".")[0], owner(last))
        if is_its and (names.fullmatch(f"{last}.{name}") or names.fullmatch(name)):
            return Lost(f"{library} {had} has it, {lacks} has not", new.get(name, ""), had)
    return None


@cache
def _lost_names() -> list[tuple[str, str, str, re.Pattern[str], dict[str, str]]]:
    """(library, release that had them, release that lacks them, names, what is new)."""
    rows = tomllib.loads(_TABLE.read_text(encoding="utf-8"))["lost"]
    return [
        (row["library"], row["had"], row["lacks"], re.compile(row["names"], re.VERBOSE),
         row.get("new", {}))
        for row in rows
    ]  # fmt: skip
