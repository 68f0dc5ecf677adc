"""What an installation, not a checkout, carries."""

import tomllib
from pathlib import Path

import tpukit

PACKAGE = Path(tpukit.__file__).parent
PYPROJECT = PACKAGE.parent / "pyproject.toml"


def test_every_file_beside_the_code_is_installed_with_it():
    settings = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["tpukit"]
    carried = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    beside = {
        path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc", ".pyi"}
    }
    assert beside and beside <= carried
