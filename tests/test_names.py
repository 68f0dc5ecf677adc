"""One name, one thing: no two public classes or functions share a name without a reason."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent

SHARED_NAMES = {
    "main": "the entry point of each program",
    "open_tracing": "of torch_xla and of torch_tpu: `compiled_trial.TRACERS` chooses",
    "trace_step": "likewise",
    "predict": "the command, and the Python function that does the same",
    "Target": "what is predicted (public), and the TPU that a search is for",
}
"""Public class or function -> why several modules define it."""


def modules() -> list[Path]:
    return sorted((ROOT / "tpukit").glob("**/*.py"))


def public_names(source: str) -> list[str]:
    """The public classes and functions at a module's top level."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    body = ast.parse(source).body
    # Overloads and conditional definitions of one module count once.
    return sorted({n.name for n in body if isinstance(n, kinds) and not n.name.startswith("_")})


def shared(places: Iterable[tuple[str, str]], allowed: Mapping[str, str]) -> dict[str, list[str]]:
    """Name -> places, of the (name, place) pairs whose name occurs more than once."""
    found = defaultdict(list)
    for name, place in places:
        found[name].append(place)
    return {name: at for name, at in found.items() if len(at) > 1 and name not in allowed}


def test_no_two_public_classes_or_functions_share_a_name():
    places = [
        (name, str(path.relative_to(ROOT)))
        for path in modules()
        for name in public_names(path.read_text(encoding="utf-8"))
    ]
    assert shared(places, SHARED_NAMES) == {}


def test_every_allowed_name_is_still_shared():
    names = [name for path in modules() for name in public_names(path.read_text(encoding="utf-8"))]
    assert [name for name in SHARED_NAMES if names.count(name) < 2] == []
