"""What an installation, not a checkout, carries; and what the project says about installing it."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tpukit
from tpukit.knowledge.versions import seen_together

PACKAGE = Path(tpukit.__file__).parent
ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PYPROJECT["project"]["optional-dependencies"]


def test_every_file_beside_the_code_is_installed_with_it():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["tpukit"]
    carried = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    beside = {
        path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc", ".pyi"}
    }
    assert beside and beside <= carried


def test_dependencies_are_the_same_on_every_machine():
    """Nothing is computed when a wheel is built, but the number that `tpukit.__version__` holds."""
    assert not (ROOT / "setup.py").exists()
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "tpukit.__version__"}}


def test_torch_has_no_upper_bound():
    (torch,) = (d for d in PYPROJECT["project"]["dependencies"] if re.match(r"torch\b", d))
    assert torch == "torch>=2.8"


def test_the_changelog_names_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{tpukit.__version__}]" in changelog


def test_a_wheel_is_built_without_an_environment():
    words = [
        "make",
        "--no-print-directory",
        "--dry-run",
        "--always-make",
        "PYTHON=any-python",
        "wheel",
    ]
    made = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert made.splitlines() == ["any-python -m pip wheel --quiet --no-deps --wheel-dir dist ."]


def test_the_licence_is_the_one_that_is_declared():
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert re.match(r"\s+Apache License\s+Version 2\.0, January 2004\s", text)
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("folder", ["docs", "notebooks", "tpukit", "README.md"])
def test_no_index_is_claimed_to_have_it(folder):
    files = [ROOT / folder] if folder.endswith(".md") else (ROOT / folder).rglob("*")
    claim = re.compile(r"pip install( -\S+)* ['\"]?tpukit(?![-/])")
    kinds = {".py", ".md", ".toml", ".ipynb"}
    texts = {f: f.read_text(encoding="utf-8") for f in files if f.suffix in kinds}
    assert [str(f) for f, text in texts.items() if claim.search(text)] == []


def test_the_page_lists_what_was_seen_to_work():
    def row(seen):
        parts = {"torch_xla": seen.torch_xla, "torch_tpu": seen.torch_tpu, "libtpu": seen.libtpu,
                 "jax": ", ".join(seen.jax)}  # fmt: skip
        beside = ", ".join(f"{name} {version}" for name, version in parts.items() if version)
        cells = (seen.torch, seen.torchvision, seen.python, beside, seen.tried, str(seen.day))
        return f"| {' | '.join(cells)} |"

    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\| \d", line)]
    assert rows == [row(seen) for seen in seen_together()]


def test_the_extras_and_the_script_install_what_was_seen_to_work():
    development, kaggle, colab = seen_together()[:3]
    pins = {r.name: str(r.specifier) for r in map(Requirement, EXTRAS["plan"])}
    assert pins == {
        "torch": f"=={development.torch}", "torch_xla": f"=={development.torch_xla}",
        "libtpu": f"=={development.libtpu}", "jax": f"=={development.jax[0]}",
        "jaxlib": f"=={development.jax[0]}",
    }  # fmt: skip
    script = (ROOT / "scripts/try_image.sh").read_text(encoding="utf-8")
    for seen in (kaggle, colab):
        packages = {"torch": seen.torch, "torch_xla": seen.torch_xla,
                    "torchvision": seen.torchvision, "libtpu": seen.libtpu}  # fmt: skip
        line = " ".join(f"{name}=={version}" for name, version in packages.items())
        assert f"packages=({line} " in script and f"python{seen.python}" in script
