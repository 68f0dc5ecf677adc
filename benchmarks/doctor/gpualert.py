"""`tpukit doctor --explain` on the corpus of GPUAlert, by its own labels and its own scorer.

The corpus (arXiv 2607.01409, github.com/Parv-01/gpualert-eval) is not kept here: give the folder
of a checkout. Its file names carry the class; `CLASS_OF` says which of its classes each answer of
`doctor` is, and its `eval/metrics.py` counts. An answer beyond those classes (another library's
entry for the same text) counts as `generic`, which is wrong.

    PYTHONPATH=benchmarks python benchmarks/doctor/gpualert.py FOLDER --out answer.json
"""

import argparse
import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from recorded import write_result

from tpukit.knowledge.error_table import known_errors
from tpukit.probe.logs import explain_log, open_log
from tpukit.probe.logs.explanations import Explanation

SECONDS = 20.0
CLASS_OF = {
    "cuda-oom": "cuda_oom",
    "nccl-error": "nccl", "nccl-timeout": "nccl", "nccl-remote-error": "nccl",
    "nccl-network": "nccl", "nccl-cuda-call": "nccl",
    "cuda-device-assert": "cuda_runtime", "cuda-illegal-access": "cuda_runtime",
    "cuda-failed": "cuda_runtime",
    "cpu-oom": "ram_oom",
    "segmentation-fault": "segfault",
    "file-not-found": "file_not_found",
    "permission-denied": "permission",
    "module-not-found": "missing_module", "flash-attention-missing": "missing_module",
    "shared-library-missing": "missing_module",
    "cuda-library-of-another-release": "missing_module",
    "division-by-zero": "div_zero",
    "different-devices": "device_mismatch",
    "loss-nan": "nan_loss",
    "host-oom-killed": "oom_killer",
    "key-missing": "traceback", "index-too-high": "traceback",
    "assertion-failed": "assertion", "process-group-not-initialized": "assertion",
    "cuda-capability-unsupported": "runtime_error", "collate-unequal": "runtime_error",
    "state-dict-mismatch": "runtime_error",
}  # fmt: skip
"""Class of the corpus by id of the answer."""


def first_answer(path: Path) -> Explanation | None:
    found = explain_log(open_log(str(path), SECONDS), known_errors()).explanations
    return found[0] if found else None


def judged(folder: Path, part: str, metrics: Any) -> dict[str, Any]:
    """One part of the corpus: causes, and what its scorer says of the classes."""
    paths = sorted((folder / "corpus" / part).glob("*.log"))
    answers = [first_answer(path) for path in paths]
    true = [path.name.split("-")[0] for path in paths]
    said = [CLASS_OF.get(a.id, "generic") if a else "generic" for a in answers]
    causes = [a for a in answers if a is not None and a.role == "cause"]
    wrong = Counter(
        f"{t}: {a.id if a else 'nothing'}"
        for t, s, a in zip(true, said, answers, strict=True)
        if t != s
    )
    return {
        "logs": len(paths),
        "with_a_cause": len(causes),
        "by_an_entry": sum(not a.id.startswith(("unknown-", "native-")) for a in causes),
        "accuracy": round(metrics.accuracy(true, said), 4),
        "macro_f1": round(metrics.macro_f1(true, said), 4),
        "confidence": dict(Counter(a.confidence for a in causes)),
        "another_class": dict(wrong),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkout of the corpus")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(options.folder))
    metrics = importlib.import_module("eval.metrics")
    result = {part: judged(options.folder, part, metrics) for part in ("injected", "wild")}
    if options.out:
        write_result(options.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
