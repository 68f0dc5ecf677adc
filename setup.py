"""Completes the dependencies, so that an installation leaves the torch that is there alone.

timm needs torchvision, and every torchvision wants one exact torch: left to itself, pip takes the
newest torchvision and replaces an older torch (Kaggle's 2.8, say) to suit it.
"""

import importlib.metadata
import sysconfig
import tomllib
from pathlib import Path

from setuptools import setup

PYPROJECT = Path(__file__).parent / "pyproject.toml"
TORCHVISION_MINOR_AHEAD = 15
"""torch 2.8 goes with torchvision 0.23, 2.9 with 0.24, and so on."""


def installed_torch() -> str | None:
    """The version of torch where this package is going to be installed."""
    # A build runs in an environment of its own: look into the real one's folder.
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = importlib.metadata.distributions(name="torch", path=folders)
    return next((torch.version for torch in found), None)


def torchvision_beside(torch: str | None) -> list[str]:
    """The torchvision that goes with a torch that is installed already."""
    if torch is None or not torch.startswith("2."):
        return []
    minor = int(torch.split(".")[1]) + TORCHVISION_MINOR_AHEAD
    return [f"torchvision==0.{minor}.*"]


def dependencies() -> list[str]:
    listed = tomllib.loads(PYPROJECT.read_text())["tool"]["tpukit"]["dependencies"]
    return [*listed, *torchvision_beside(installed_torch())]


setup(install_requires=dependencies())
