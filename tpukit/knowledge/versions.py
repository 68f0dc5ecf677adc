"""Compatible releases of torch, torch_xla, libtpu, jax, torchvision and CUDA."""

import importlib.metadata
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

Release = tuple[int, ...]
PARTS_OF_RELEASE = {"torch": 2, "torch_xla": 2, "torch_tpu": 3, "libtpu": 3}
"""Leading numbers of a version within which a TPU's compiler is as it was seen."""
_TABLE = Path(__file__).parent / "tables" / "versions.toml"


def parse_version(text: str) -> Release:
    """The release of a version: `2.9.0+cu128` is (2, 9, 0); empty for an invalid one."""
    try:
        return Version(text).release
    except InvalidVersion:
        return ()


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those of these packages that are installed."""
    found: dict[str, str] = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@dataclass(frozen=True)
class Pair:
    """The releases that one release of torch_xla requires."""

    torch_xla: str
    torch: str
    libtpu: str
    jax: str
    mosaic: int | None = None
    """The version of Mosaic (Pallas' kernels) that this libtpu reads; None: not known."""


@dataclass(frozen=True)
class OldPackage:
    """A package that was renamed, replaced or discontinued."""

    name: str
    message: str
    fix: str
    below: str | None = None
    """Only releases before this one."""

    def concerns(self, version: str) -> bool:
        return self.below is None or parse_version(version) < parse_version(self.below)


@dataclass(frozen=True)
class SeenTogether:
    """Releases that were seen to work together, by running them."""

    name: str
    day: date
    python: str
    torch: str
    torchvision: str
    tried: str
    """What was run."""
    torch_xla: str | None = None
    torch_tpu: str | None = None
    libtpu: str | None = None
    jax: tuple[str, ...] = ()
    """Releases that compile for a TPU with this libtpu, the first where one may be chosen."""


@cache
def version_table() -> dict[str, Any]:
    """The raw version table."""
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


def pair_of(torch_xla: str) -> Pair | None:
    """The requirements of this release of torch_xla; None for one that the table lacks."""
    for row in version_table()["pair"]:
        if same_release(torch_xla, row["torch_xla"]):
            return Pair(**row)
    return None


def seen_together() -> list[SeenTogether]:
    """Every environment that was tried, the first being the one that tpukit is developed in."""
    return [SeenTogether(**row | {"jax": tuple(row.get("jax", ()))})
            for row in version_table()["seen"]]  # fmt: skip


def jax_seen_with(versions: Mapping[str, str]) -> list[str]:
    """Releases of jax that compile for a TPU with these, best first; empty: none was tried."""
    return [jax for seen in seen_together() if _are(versions, seen) for jax in seen.jax]


def _are(versions: Mapping[str, str], seen: SeenTogether) -> bool:
    """Whether these are of the releases that were seen, as far as they matter."""
    named = {name: getattr(seen, name) for name in PARTS_OF_RELEASE if getattr(seen, name)}
    return all(
        name in versions
        and same_release(versions[name], ".".join(version.split(".")[: PARTS_OF_RELEASE[name]]))
        for name, version in named.items()
    )


def same_release(version: str, release: str) -> bool:
    """Whether a version is of a release: 0.0.21.1 is of 0.0.21, 2.9.0+cpu is of 2.9."""
    wanted = parse_version(release)
    return parse_version(version)[: len(wanted)] == wanted


def torchvision_of(torch: str) -> str | None:
    """The torchvision release of a torch release (`2.9.1` is looked up as `2.9`)."""
    releases: Mapping[str, str] = version_table()["torchvision"]
    return releases.get(".".join(str(part) for part in parse_version(torch)[:2]))


def architectures_of(torch: str, cuda: str) -> list[float] | None:
    """Compute capabilities a torch wheel was compiled for; None where the table lacks it."""
    release, build = parse_version(torch)[:2], parse_version(cuda)[:2]
    for row in version_table()["cuda_build"]:
        first, before = (parse_version(text) for text in row["torch"])
        if parse_version(row["cuda"]) == build and first <= release < before:
            return list(row["architectures"])
    return None


def driver_for(cuda: str) -> str | None:
    """The oldest driver for a CUDA version."""
    drivers: Mapping[str, str] = version_table()["driver"]
    return drivers.get(cuda.partition(".")[0])


def runs_on(capability: float, architectures: list[float]) -> bool:
    """Whether code compiled for these runs on a GPU: same major version, minor not above."""
    return any(int(a) == int(capability) and a <= capability for a in architectures)


def old_packages() -> list[OldPackage]:
    """Packages to remove or upgrade."""
    return [OldPackage(**row) for row in version_table()["package"]]
