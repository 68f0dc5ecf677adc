"""Counts how wide the code is: rooms, seams, imports of the training loop, a batch's way.

    python scripts/structure.py [--json] [--way cpu|tpu]

Counting reads the sources and imports nothing. `--way` also trains a tiny task for six steps and
lists the files of tpukit that run between its second loss and its last; `tpu` does so on torch_xla
with virtual devices.
"""

import argparse
import ast
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tpukit"
SEAM = ("Backend", "ModelOps")
"""Protocols of `tpukit/hardware`; the bases of each are counted with it."""
TASK = "Task"
LOOP = ("train/engine.py", "train/loop.py", "train/step.py", "train/learner.py")
"""Modules of the training loop, from `tpukit/`; those that exist are counted."""
MOST_STEPS = 6


# -- lines -----------------------------------------------------------------------------------------
def lines_by_room(top: Path) -> dict[str, int]:
    """Lines of Python by folder below `top`; files beside them are the room `.`."""
    counts: Counter[str] = Counter()
    for path in top.rglob("*.py"):
        room, *below = path.relative_to(top).parts
        counts[room if below else "."] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


# -- classes ---------------------------------------------------------------------------------------
def classes(folder: Path) -> dict[str, ast.ClassDef]:
    """Public top-level classes below a folder by name."""
    return {
        node.name: node
        for path in sorted(folder.rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def own_members(definition: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """(name, whether it is a method) of each public member that a class body defines."""
    for node in definition.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name, method = node.name, True
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, method = node.target.id, False
        else:
            continue
        if not name.startswith("_"):
            yield name, method


def members(name: str, known: Mapping[str, ast.ClassDef]) -> dict[str, bool]:
    """Public members of a class and of its bases among the known classes."""
    found: dict[str, bool] = {}
    for base in known[name].bases:
        if isinstance(base, ast.Name) and base.id in known:
            found |= members(base.id, known)
    return found | dict(own_members(known[name]))


def methods(name: str, known: Mapping[str, ast.ClassDef]) -> list[str]:
    return [member for member, method in members(name, known).items() if method]


# -- imports ---------------------------------------------------------------------------------------
def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, modules: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(module, name) of each project name that a tree imports, the deferred ones included."""
    known = set(modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tpukit"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in known else node.module), alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in known:
                    yield alias.name, alias.name


class _AtImport(ast.NodeTransformer):
    """Leaves what runs when a module is imported: no function bodies, nothing for type checkers."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None: ...

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None: ...

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (strongly connected components of two or more)."""

    def reached(start: str) -> set[str]:
        found, ahead = set(), [start]
        while ahead:
            ahead += (new := arrows.get(ahead.pop(), set()) - found)
            found |= new
        return found

    below = {module: reached(module) for module in arrows}
    groups = {
        tuple(sorted(other for other in below[m] if m in below.get(other, ()))) for m in arrows
    }
    return sorted([*group] for group in groups if len(group) > 1)


def structure() -> dict[str, Any]:
    """All counts that need no run."""
    trees = {
        module_name(path): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    # The public names of `tpukit` itself are imported when they are used.
    packaged = {name: tree for name, tree in trees.items() if name != "tpukit"}
    everywhere = {n: {m for m, _ in imports(t, trees) if m != n} for n, t in packaged.items()}
    loop = [PACKAGE / file for file in LOOP if (PACKAGE / file).exists()]
    own = {module_name(path) for path in loop}
    used = {pair for name in own for pair in imports(trees[name], trees) if pair[0] not in own}
    first = {
        n: {m for m, _ in imports(_AtImport().visit(t), trees) if m != n}
        for n, t in packaged.items()
    }
    hardware, train = classes(PACKAGE / "hardware"), classes(PACKAGE / "train")
    seam = {name: sorted(members(name, hardware)) for name in SEAM}
    rooms = {"package": lines_by_room(PACKAGE), "tests": lines_by_room(ROOT / "tests")}
    return {
        "files": {"package": len(trees), "tests": len([*(ROOT / "tests").rglob("*.py")])},
        "lines": {name: sum(room.values()) for name, room in rooms.items()},
        "rooms": rooms,
        "seam_members": len({member for listed in seam.values() for member in listed}),
        "task_methods": len(methods(TASK, train)),
        "loop": {
            "files": sorted(str(path.relative_to(ROOT)) for path in loop),
            "names": len({name for _, name in used}),
            "modules": len({module for module, _ in used}),
        },
        "circles_at_import": circles(first),
        "circles": circles(everywhere),
    }


# -- a batch's way ---------------------------------------------------------------------------------
def batch_way(hardware: str) -> list[str]:
    """Files of tpukit whose functions run in the steps of a tiny task, on all threads."""
    if hardware == "tpu":
        os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    seen: set[str] = set()
    recording = False

    def trace(frame: Any, event: str, argument: Any) -> None:
        if recording and (file := frame.f_code.co_filename).startswith(str(PACKAGE)):
            seen.add(str(Path(file).relative_to(ROOT)))

    threading.settrace(trace)
    sys.settrace(trace)
    sys.path.insert(0, str(ROOT))
    import numpy as np
    import torch

    import tpukit

    class Numbers:
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": np.full(4, index / 64, np.float32)}

    class Line(tpukit.Task):
        name = "line"
        steps = 0

        def build_model(self, ops: Any) -> torch.nn.Module:
            return torch.nn.Linear(4, 1)

        def datasets(self) -> tpukit.Datasets:
            return tpukit.Datasets(Numbers(), None)

        def loss(self, model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
            nonlocal recording
            if batch["x"].device.type != "meta" and model.training:
                Line.steps += 1
                recording = 2 <= Line.steps < MOST_STEPS
            return {"loss": (model(batch["x"]) ** 2)[:, 0]}

    with tempfile.TemporaryDirectory() as folder:
        tpukit.fit(
            Line(), hw=hardware, max_steps=MOST_STEPS, global_batch_size=8, accumulate=1,
            log_every=1000, ckpt_every=1000, num_workers=0, results_dir=folder + "/run",
            log=lambda line: None,
        )  # fmt: skip
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    return sorted(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_argument("--way", choices=("cpu", "tpu"), help="Also run a few steps there.")
    options = parser.parse_args()
    found = structure()
    if options.way:
        found["batch_way"] = batch_way(options.way)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for name, rooms in found["rooms"].items():
        print(f"{name}: {found['lines'][name]:,} lines in {found['files'][name]} files")
        print("".join(f"{lines:8,}  {room}\n" for room, lines in rooms.items()), end="")
    loop = found["loop"]
    print(f"seam: {found['seam_members']} members of {' and '.join(SEAM)}")
    print(f"task: {found['task_methods']} methods")
    print(
        f"loop ({', '.join(loop['files'])}): {loop['names']} names from {loop['modules']} modules"
    )
    for kind, title in (("circles_at_import", "at import"), ("circles", "with deferred imports")):
        print(f"import circles {title}: {len(found[kind])}")
        print("".join(f"  {' <-> '.join(group)}\n" for group in found[kind]), end="")
    if way := found.get("batch_way"):
        print(f"a batch's way on {options.way}: {len(way)} files")
        print("".join(f"  {file}\n" for file in way), end="")


if __name__ == "__main__":
    main()
