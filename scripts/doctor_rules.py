"""Writes docs/doctor_rules.md from the classes of the rules: `python scripts/doctor_rules.py`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "doctor_rules.md"
sys.path.insert(0, str(ROOT))

from tpukit.probe.lint.rules import MISTAKES, ON_TPU, RANKS  # noqa: E402
from tpukit.probe.lint.rules.rule import Rule  # noqa: E402

HEAD = """# `tpukit doctor`: mistakes of training code

`tpukit doctor PATH...` reports these in files that import torch. Most of them raise nothing: they give a worse model, waste memory or make a device wait. A rule reports only what the file itself shows. `# tpukit: ignore[no-zero-grad]` on the line suppresses one rule there.

Written by `scripts/doctor_rules.py` from the rules' classes; the examples are tests, too.
"""  # noqa: E501
GROUPS = (
    ("In any training code", MISTAKES),
    ("On several ranks: torch.distributed, accelerate, torch_xla", RANKS),
    ("On a TPU with torch_xla", ON_TPU),
)


def section(rule: type[Rule]) -> list[str]:
    examples = ["```python", "# reported", rule.wrong, "", "# not reported", rule.right, "```"]
    text = " ".join((rule.__doc__ or "").split())
    return ["", f"### `{rule.id}`", "", text, "", *examples]


def page() -> str:
    lines = [HEAD]
    for name, rules in GROUPS:
        lines += [f"## {name}", *(line for rule in rules for line in section(rule)), ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
