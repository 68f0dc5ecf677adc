"""The provider of a machine: Kaggle, Colab, a cloud, a cluster, nobody."""

from __future__ import annotations

from dataclasses import dataclass

from tpukit.hardware.host import Host


@dataclass(frozen=True)
class Provider:
    """Who provides a machine: a notebook service, a cloud, a cluster, or nobody."""

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


def provider_of(host: Host) -> Provider:
    """The most specific place that its files and variables show."""
    environment = host.environment
    if "KAGGLE_KERNEL_RUN_TYPE" in environment or host.exists("/kaggle/working"):
        return Provider("Kaggle", notebook=True)
    if "COLAB_RELEASE_TAG" in environment or "COLAB_GPU" in environment:
        return Provider("Colab", notebook=True)
    if "SAGEMAKER_INTERNAL_IMAGE_URI" in environment:
        return Provider("SageMaker", notebook=True)
    if "SLURM_JOB_ID" in environment:
        return Provider("Slurm")
    if "KUBERNETES_SERVICE_HOST" in environment:
        return Provider("Kubernetes")
    return Provider(_cloud(host) or ("container" if host.exists("/.dockerenv") else "this machine"))


def _cloud(host: Host) -> str | None:
    for file in ("product_name", "sys_vendor"):
        text = host.read(f"/sys/class/dmi/id/{file}") or ""
        for mark, name in _CLOUDS:
            if text.startswith(mark):
                return name
    return None
