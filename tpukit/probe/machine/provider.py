"""Where a machine is: Kaggle, Colab, a cloud, a cluster, a laptop."""

from __future__ import annotations

from dataclasses import dataclass

from tpukit.hardware.host import Host


@dataclass(frozen=True)
class Place:
    """A kind of machine that people rent or are given."""

    name: str
    notebook: bool = False
    """Whether commands are typed into cells."""


_CLOUDS = (
    ("Google Compute Engine", "Google Cloud"),
    ("Google", "Google Cloud"),
    ("Amazon EC2", "Amazon EC2"),
    ("Microsoft Corporation", "Azure"),
    ("OpenStack", "OpenStack"),
)


def place_of(host: Host) -> Place:
    """The most specific place that its files and variables show."""
    environment = host.environment
    if "KAGGLE_KERNEL_RUN_TYPE" in environment or host.exists("/kaggle/working"):
        return Place("Kaggle", notebook=True)
    if "COLAB_RELEASE_TAG" in environment or "COLAB_GPU" in environment:
        return Place("Colab", notebook=True)
    if "SAGEMAKER_INTERNAL_IMAGE_URI" in environment:
        return Place("SageMaker", notebook=True)
    if "SLURM_JOB_ID" in environment:
        return Place("Slurm")
    if "KUBERNETES_SERVICE_HOST" in environment:
        return Place("Kubernetes")
    return Place(_cloud(host) or ("container" if host.exists("/.dockerenv") else "this machine"))


def _cloud(host: Host) -> str | None:
    for file in ("product_name", "sys_vendor"):
        text = host.read(f"/sys/class/dmi/id/{file}") or ""
        for mark, name in _CLOUDS:
            if text.startswith(mark):
                return name
    return None
