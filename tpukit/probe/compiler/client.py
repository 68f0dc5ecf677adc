"""The releases with which the TPU compiler works: this environment's, or jax kept beside it.

JAX's compile-only client has no promise of stability, and a notebook's image has the jax that it
has. Where that was not seen to work with the image's libtpu, another one is installed once into the
cache folder, for the compiler's processes alone.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpukit.errors import HardwareError
from tpukit.io.files import replacing_folder
from tpukit.io.folders import cache_folder
from tpukit.io.lock import exclusive
from tpukit.knowledge.versions import installed_versions, jax_seen_with, same_release, seen_together

PARTS = ("torch", "torch_xla", "torch_tpu", "jax", "jaxlib", "libtpu")
TRACED_BY = ("torch", "torch_xla", "libtpu")
JAX_NEEDS = ("ml_dtypes", "opt_einsum")
"""What jax needs beside tpukit's own dependencies (numpy, scipy)."""
OTHER_ENVIRONMENT = (
    "Leave this environment as it is and give it another: `python -m venv /tmp/plan &&"
    " /tmp/plan/bin/pip install 'PATH[plan]'` (tpukit's wheel or checkout), then"
    " `/tmp/plan/bin/tpukit` in place of tpukit."
)
SIZE = "about 90 MB to download, 350 MB on the disk"


@dataclass(frozen=True)
class Client:
    """What compiles for a TPU here."""

    versions: Mapping[str, str]
    folder: Path | None = None
    """Folder of jax; None: this environment."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the processes that compile."""
        if self.folder is None:
            return {}
        paths = filter(None, (str(self.folder), os.environ.get("PYTHONPATH")))
        return {"PYTHONPATH": os.pathsep.join(paths)}


def find_client(log: Callable[[str], None] | None = None) -> Client:
    """What compiles here; where jax has to be installed beside, `log` is given a line about it.

    Without `log` nothing is installed: jax is this environment's, or was installed before.

    Raises:
        HardwareError: a part is missing or of a release that was not seen to work, or this is not
            Linux on x86-64.
    """
    _require_linux()
    versions = installed_versions(PARTS)
    if "torch_tpu" in versions and "torch_xla" not in versions:
        raise HardwareError(
            "the TPU compiler's step is traced by torch_xla, and this environment has torch_tpu, "
            "which records no step without a TPU.",
            OTHER_ENVIRONMENT,
            id="no-plan-extra",
        )
    missing = [name for name in TRACED_BY if name not in versions]
    if missing:
        raise HardwareError(
            f"the TPU compiler needs {', '.join(missing)}, not installed in this environment.",
            "pip install '.[plan]' in a checkout of tpukit, or its wheel with [plan].",
            id="no-plan-extra",
        )
    fitting = jax_seen_with(versions)
    if not fitting:
        raise _not_seen(versions)
    here = versions.get("jax"), versions.get("jaxlib")
    if any(all(v and same_release(v, release) for v in here) for release in fitting):
        return Client(versions)
    return _beside(versions, fitting[0], log)


def _require_linux() -> None:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise HardwareError(
            f"the TPU compiler (libtpu) exists for Linux on x86-64 only; this is "
            f"{platform.system()} on {platform.machine()}.",
            "Run it in a Linux container, in Colab or on Kaggle; without --target the batch is "
            "measured on this machine.",
            id="no-compiler",
        )


def _not_seen(versions: Mapping[str, str]) -> HardwareError:
    here = ", ".join(f"{name} {versions[name]}" for name in TRACED_BY)
    known = {
        f"torch_xla {seen.torch_xla} with libtpu {seen.libtpu}"
        for seen in seen_together()
        if seen.jax and seen.torch_xla
    }
    return HardwareError(
        f"the TPU compiler was not seen to work with {here}, but with {'; '.join(sorted(known))}.",
        OTHER_ENVIRONMENT,
        id="plan-versions",
    )


def _beside(versions: Mapping[str, str], release: str, log: Callable[[str], None] | None) -> Client:
    """jax of this release, kept in the cache folder for this Python."""
    folder = cache_folder() / "compiler" / f"jax-{release}-{sys.implementation.cache_tag}"
    client = Client({**versions, "jax": release, "jaxlib": release}, folder)
    if folder.is_dir():
        return client
    if log is None:
        raise HardwareError(
            f"the TPU compiler needs jax {release} with libtpu {versions['libtpu']}, which is "
            "not in this environment.",
            "`tpukit probe-batch --target v5e-1` installs it once beside this environment.",
            id="plan-versions",
        )
    with exclusive(folder.with_name(f"{folder.name}.lock"), wait=True):
        if not folder.is_dir():
            here = f"jax {versions['jax']}" if "jax" in versions else "no jax"
            log(
                f"The TPU compiler needs jax {release} with libtpu {versions['libtpu']}; here is "
                f"{here}. Installing it once beside this environment, in {folder} ({SIZE}) ..."
            )
            with replacing_folder(folder) as partial:
                _install(release, partial)
    return client


def _install(release: str, folder: Path) -> None:
    wanted = [f"jax=={release}", f"jaxlib=={release}", *JAX_NEEDS]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
         "--retries", "1", "--no-deps", "--only-binary", ":all:", "--target", str(folder),
         *wanted],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = said[-1] if said else (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise HardwareError(
            f"jax {release} for the TPU compiler could not be installed beside this environment: "
            f"{reason[:200]}",
            "Without a network, attach its wheels (`pip download --no-deps --python-version "
            f"{sys.version_info.major}.{sys.version_info.minor} --only-binary :all: "
            f"{' '.join(wanted)}` where there is one), then run `PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR "
            "tpukit ...`.",
            id="plan-versions",
        )
