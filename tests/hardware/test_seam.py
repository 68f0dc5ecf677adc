"""No code outside `tpukit.hardware` asks which hardware it runs on: the backend has a member."""

import ast
from pathlib import Path

import tpukit
from tpukit.hardware.backend import Backend, ModelOps

PACKAGE = Path(tpukit.__file__).parent
ATTRIBUTES = {"traced", "device_type", "is_cpu", "is_cuda", "is_xla"}
FUNCTIONS = {"is_emulated", "is_rehearsal"}


def questions(source: str) -> list[str]:
    """The expressions of this source that ask for the hardware."""
    return [ast.unparse(node) for node in ast.walk(ast.parse(source)) if asks(node)]


def asks(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        of_device = isinstance(node.value, ast.Attribute) and node.value.attr == "device"
        of_device |= isinstance(node.value, ast.Name) and node.value.id == "device"
        return node.attr in ATTRIBUTES | FUNCTIONS or (node.attr == "type" and of_device)
    if isinstance(node, ast.Name):
        return node.id in FUNCTIONS
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(isinstance(s, ast.Attribute) and is_kind_of_a_backend(s) for s in sides)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "isinstance" and "Backend" in ast.unparse(node.args[1])
    return False


def is_kind_of_a_backend(node: ast.Attribute) -> bool:
    return node.attr == "kind" and ast.unparse(node.value).rpartition(".")[2] == "backend"


MOST_MEMBERS = 29


def members(protocol: type) -> set[str]:
    """Public methods and attributes of a protocol and of those that it extends."""
    named = {name for base in protocol.__mro__ if base.__module__.startswith("tpukit")
             for name in (*vars(base), *vars(base).get("__annotations__", ()))}  # fmt: skip
    return {name for name in named if not name.startswith("_")}


def test_the_seam_stays_narrow():
    assert members(Backend) >= members(ModelOps) > {"attention"}
    assert len(members(Backend)) <= MOST_MEMBERS, sorted(members(Backend))


def outside() -> list[Path]:
    return [p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] != "hardware"]


def test_no_code_outside_the_seam_asks_for_the_hardware():
    found = {str(p.relative_to(PACKAGE)): questions(p.read_text("utf-8")) for p in outside()}
    assert len(found) > 100
    assert {path: asked for path, asked in found.items() if asked} == {}
