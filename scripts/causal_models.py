"""Tries every causal language model of the installed transformers, and writes the page of them.

A small copy of each, by its default configuration, is compared with transformers: samples that
share rows, samples one to a row, each alone. A run does the same with its own configuration.

    python scripts/causal_models.py            # prints, and writes docs/llm_models.md
    python scripts/causal_models.py qwen3 mamba
"""

import os
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

os.environ |= {"USE_TORCH_XLA": "0", "HF_HUB_OFFLINE": "1"}

import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tpukit.errors import TpukitError
from tpukit.tasks.hub.models import without_output
from tpukit.tasks.llm.model.rows import rows_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "llm_models.md"
HEAD = """# Causal language models

[scripts/causal_models.py](../scripts/causal_models.py) \
tries every causal architecture of transformers with a small copy of random weights, and wrote \
this page (transformers {version}, {count} architectures). A run makes the same comparison \
with its own configuration before its first step: what its model computes of packed samples must \
be what transformers computes of each alone, within 1e-4 of the largest logit, noise of the \
routing in training (`router_jitter_noise`) aside.

| | architectures | what a run does |
|---|---|---|
| packed | {packed} | several samples to a row |
| padded | {padded} | one sample to a row, and a line says why; `test --export` for generation |
| refused | {refused} | ends with the reason before its first step |

"""


def tried(kind: str) -> tuple[str, str]:
    """`packed`, `padded` or `refused`, and why."""
    try:
        with without_output():
            config = AutoConfig.for_model(kind)
        rows = rows_of(config)
    except TpukitError as error:
        return "refused", error.message.partition(": ")[2]
    except Exception as error:
        return "refused", f"no default configuration ({type(error).__name__})"
    return ("packed" if rows.packed else "padded"), rows.reason


def page(found: Mapping[str, tuple[str, str]]) -> str:
    of = {how: [k for k, (h, _) in found.items() if h == how]
          for how in ("packed", "padded", "refused")}  # fmt: skip
    counts = {how: len(kinds) for how, kinds in of.items()}
    lines = [HEAD.format(version=version("transformers"), count=len(found), **counts)]
    lines.append(f"## Packed\n\n{', '.join(f'`{kind}`' for kind in of['packed'])}\n")
    for how in ("padded", "refused"):
        rows = "\n".join(f"| `{kind}` | {found[kind][1].rstrip('.')} |" for kind in of[how])
        lines.append(f"\n## {how.capitalize()}\n\n| architecture | why |\n|---|---|\n{rows}\n")
    return "".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    kinds = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found = {}
    for kind in kinds:
        found[kind] = tried(kind)
        print(kind, *found[kind], flush=True)
    if kinds != sys.argv[1:]:
        PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
