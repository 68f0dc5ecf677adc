"""Which code decides each result, and whether it has changed since the result was measured.

`write_result` keeps a digest of that code in a result; `docs/results.md`, `docs/tpu.md` and
`docs/tpu_batches.md` mark what has another digest now, and `benchmarks/stale.py` measures it again.
The scripts themselves are left out: a script and its result change in one commit.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARK = "†"
"""Behind what is stale on a page."""
EXPLANATION = f"{MARK}: measured with an earlier version of the code that decides it."


def within(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tpukit/{folder}/{name}" for name in names)


STEP = (
    *within("train", "learner.py", "optimizer.py"),
    "tpukit/hardware/optimizers.py",
)
XLA = (
    *within("hardware/xla", "backend.py", "kernel_calls.py", "lowerings.py", "mesh.py", "ops.py",
            "optimizer.py", "resize.py"),
    *within("hardware/kernels", "flash_attention.py", "pallas_attention.py",
            "torch_attention.py"),
)  # fmt: skip
EAGER = within("hardware/eager", "backend.py", "buffers.py", "grad_scaling.py")
ENGINE = (
    *STEP,
    *within(
        "train",
        "engine.py",
        "plan.py",
        "run.py",
        "loader.py",
        "data.py",
        "schedule.py",
        "config.py",
    ),
    "tpukit/hardware/prefetch.py",
)
UNFILLED = "tpukit/probe/unfilled_model.py"
COMPILER = (*STEP, *XLA, "tpukit/probe/compiler", UNFILLED)
SEARCH = (*COMPILER, *within("probe", "trial.py", "targets.py", "roofline.py"),
          *within("probe/batch", "search.py", "recommend.py"))  # fmt: skip
TRIALS = ("tpukit/probe/trial.py", *within("probe", "batch", "trials"))
EIT = (*within("tasks/eit", "model", "task.py", "settings.py"), "tpukit/train/optimizer.py")
IMAGES = within("tasks/images", "model", "task.py", "settings.py")
SUMMARIZE = within("tasks/llm", "model", "task.py", "settings.py", "data/packing.py")
GPU_MEMORY = ("tpukit/probe/gpu_memory", UNFILLED, *EAGER)
TORCH_TPU = within("hardware/eager", "backend.py", "kernel_calls.py", "programs.py", "torch_tpu.py",
                   "torch_tpu_operators.py")  # fmt: skip
GENERATION = (*EAGER, *within("tasks/llm", "generation", "model"))
START = ("tpukit/cli.py", "tpukit/commands/doctor.py", "tpukit/knowledge")
SEARCHES: Mapping[str, tuple[str, ...]] = {
    "eit": (*SEARCH, *EIT),
    "images": (*SEARCH, *IMAGES),
    "llm": (*SEARCH, *SUMMARIZE),
    "model": (*SEARCH, "tpukit/probe/batch/model_task.py", "benchmarks/tpu_models.py"),
}
"""The code that decides a search by the TPU compiler, by task."""
DECIDES: Mapping[str, tuple[str, ...]] = {
    "activation_memory": (*COMPILER, *IMAGES),
    "campaign": ("tpukit",),
    "doctor_blind": ("tpukit/knowledge", "tpukit/probe/logs"),
    "doctor_real_material": ("tpukit/knowledge", *within("probe", "lint", "logs")),
    "doctor_scan": ("tpukit/knowledge", *within("probe", "lint")),
    "doctor_start": (*START, *within("probe", "machine", "lint")),
    "eit_quality": (*ENGINE, *EAGER, *EIT, "tpukit/tasks/eit"),
    "eit_simulation": within("tasks/eit", "simulation", "data", "generate.py"),
    "eit_speed_cpu": (*STEP, *EAGER, *EIT),
    "eit_tpu_v5e-1": (*COMPILER, *EIT),
    "eit_tpu_v5e-8": (*COMPILER, *EIT),
    "engine_cost_cpu_tiny": (*ENGINE, *EAGER, *EIT, "tpukit/tasks/eit/data"),
    "engine_cost_tpu_tiny": (*ENGINE, *XLA, *EIT, "tpukit/tasks/eit/data"),
    "first_step": (*START, *ENGINE, *EAGER, *XLA, *EIT, *SUMMARIZE),
    "gpualert_corpus": ("tpukit/knowledge", "tpukit/probe/logs"),
    "gpu_measured": (*GPU_MEMORY, *IMAGES, *EIT, *SUMMARIZE),
    "gpu_memory_on_cpu": GPU_MEMORY,
    "gpu_memory_public": (*GPU_MEMORY, "tpukit/probe/batch/model_task.py"),
    "gpu_search_seconds": (*GPU_MEMORY, *within("probe/batch", "search.py", "recommend.py")),
    "host_time": (
        *STEP,
        *XLA,
        *within("hardware", "step_programs.py", "python_state.py"),
        *within("hardware/xla", "programs.py", "recorder.py", "cached_graphs.py"),
    ),
    "image_accuracy": (*ENGINE, *EAGER, "tpukit/tasks/images"),
    "image_loading": ("tpukit/tasks/images/data", "tpukit/train/loader.py"),
    "probe_compiler_eit": SEARCHES["eit"],
    "probe_compiler_eit-reference": SEARCHES["eit"],
    "probe_compiler_gpt2": SEARCHES["llm"],
    "probe_compiler_gpt2-lean": SEARCHES["llm"],
    "probe_compiler_gpt2-memory": SEARCHES["llm"],
    "probe_compiler_slices": SEARCHES["llm"],
    "probe_peers_eit": (*TRIALS, *ENGINE, *EAGER, *EIT),
    "probe_peers_eit_xla": (*TRIALS, *ENGINE, *XLA, *EIT),
    "probe_peers_llm": (*TRIALS, *ENGINE, *EAGER, *SUMMARIZE),
    "probe_peers_llm_xla": (*TRIALS, *ENGINE, *XLA, *SUMMARIZE),
    "public_models": (*COMPILER, *TRIALS, "tpukit/testing.py", "tpukit/probe/parity.py"),
    "run_overhead": ("tpukit/commands/run.py", "tpukit/io/relay.py"),
    "step_traffic": (*COMPILER, *EIT, *SUMMARIZE),
    "summarize_generation": GENERATION,
    "summarize_generation_qwen3": GENERATION,
    "summarize_quality": (*ENGINE, *EAGER, "tpukit/tasks/llm"),
    "summarize_rows": ("tpukit/tasks/llm/data", "tpukit/train/loader.py"),
    "summarize_training": (*ENGINE, *EAGER, *SUMMARIZE),
    "summarize_training_qwen3": (*ENGINE, *EAGER, *SUMMARIZE),
    "torch_tpu_compile": (*STEP, *TORCH_TPU, *EIT, *IMAGES, *SUMMARIZE),
    "torch_tpu_compiler": (*COMPILER, *TORCH_TPU, *EIT, *SUMMARIZE),
}
"""The files and folders that decide a result, by the name of its JSON file. tpu_batches.json and
tpu_predictions.json hold a digest a row: that of its task in `SEARCHES`."""


def sources(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(path, text) of each module and table, in order; a path that is missing is an error."""
    for path in sorted({*paths}):
        place = ROOT / path
        if not place.exists():
            raise FileNotFoundError(f"{path} decides a result and is missing: change DECIDES")
        inside = place.rglob("*") if place.is_dir() else [place]
        for file in sorted(f for f in inside if f.suffix in {".py", ".toml"}):
            yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


@cache
def without_words(source: str) -> str:
    """A module's text without docstrings, comment lines and empty lines, which decide nothing."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def digest(files: Iterable[tuple[str, str]]) -> str:
    found = hashlib.sha256()
    for path, text in files:
        code = without_words(text) if path.endswith(".py") else text
        found.update(f"{path}\n{code}\n".encode())
    return found.hexdigest()[:12]


def code_of(name: str) -> str:
    """The digest of the code that decides a result, or a search for a task, as it is now."""
    return digest(sources(DECIDES.get(name) or SEARCHES[name]))


def task_of(words: Iterable[str]) -> str:
    """Whose search a `probe-batch` with these words is, of `SEARCHES`."""
    words = [*words]
    if "--task" in words:
        return words[words.index("--task") + 1]
    return "model" if "--model" in words else "eit"


def mark(kept: Mapping[str, Any], name: str) -> str:
    """` †` where other code decided a result or a row than would decide it now."""
    return "" if kept.get("code") == code_of(name) else f" {MARK}"


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a JSON file with the digest of what decided it, and no place of this machine."""
    code = {"code": code_of(path.stem)} if path.stem in DECIDES else {}
    text = json.dumps({**result, **code}, indent=2, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    # An environment, this one or one that it reads from, may lie in the checkout: it comes first.
    text = re.sub(r'[^"\s]*/(?:site|dist)-packages/', "", text).replace(f"{ROOT}/", "")
    path.write_text(text + "\n", encoding="utf-8")
