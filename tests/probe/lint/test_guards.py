# ruff: noqa: E501 - a case is one line
"""Guards: a test of a release or a feature silences the findings of its own package, nothing else."""

import pytest

from tpukit.probe.lint.scan import module_findings
from tpukit.probe.lint.source import python_module

XM = "import torch_xla.core.xla_model as xm\n"
OLD = "xm.xrt_world_size()"
GUARDED = {
    "hasattr of the module": XM + f"if hasattr(xm, 'xrt_world_size'):\n    {OLD}",
    "hasattr of the successor": XM + f"import torch_xla.runtime as xr\nif hasattr(xr, 'world_size'):\n    xr.world_size()\nelse:\n    {OLD}",
    "hasattr in a name": XM + f"old = hasattr(xm, 'xrt_world_size')\nn = {OLD} if old else 1",
    "hasattr and": XM + f"n = hasattr(xm, 'xrt_world_size') and {OLD}",
    "its version": XM + f"import torch_xla\nif torch_xla.__version__ < '2.7':\n    {OLD}",
    "torch's version": XM + f"import torch\nif torch.__version__.startswith('1.'):\n    {OLD}",
    "its version from the metadata": XM + f"from importlib.metadata import version\nif version('torch_xla') < '2.7':\n    {OLD}",
    "its version in a constant": XM + f"import torch_xla\nfrom packaging import version\nOLD = version.parse(torch_xla.__version__) < version.parse('2.7')\nif OLD:\n    {OLD}",
    "an early return": XM + f"def size():\n    if not hasattr(xm, 'xrt_world_size'):\n        return 1\n    return {OLD}",
    "an early raise": XM + f"import torch_xla\nif torch_xla.__version__ >= '2.7':\n    raise ImportError\n{OLD}",
    "an early return in a try": XM + f"def f():\n    try:\n        if hasattr(xm, 'x') and not hasattr(xm, 'xrt_world_size'):\n            return 1\n        return {OLD}\n    finally:\n        pass",
    "its version by name": XM + f"from torch_xla import __version__\nif __version__ < '2.7':\n    {OLD}",
    "an assertion": XM + f"import torch_xla\nassert torch_xla.__version__ < '2.7'\n{OLD}",
    "a handler for its import": XM + f"try:\n    import torch_xla.runtime as xr\nexcept ImportError:\n    {OLD}",
    "a handler for everything": "try:\n    from torch_xla.runtime import world_size\nexcept:\n    from torch_xla.core.xla_model import xrt_world_size as world_size",
    "the old name first": XM + f"import torch_xla.runtime as xr\ntry:\n    {OLD}\nexcept AttributeError:\n    xr.world_size()",
}  # fmt: skip
UNGUARDED = {
    "hasattr of data": XM + f"def f(self):\n    if hasattr(self.data, 'xrt_world_size'):\n        {OLD}",
    "hasattr of another module": XM + f"import timm\nif hasattr(timm, 'layers'):\n    {OLD}",
    "hasattr of data in a name": XM + f"old = hasattr(data, 'size')\nn = {OLD} if old else 1",
    "a version of one's own": XM + f"if args.version > 2:\n    {OLD}",
    "a model's version": XM + f"if model_version == 2:\n    {OLD}",
    "Python's version": XM + f"import sys\nif sys.version_info >= (3, 10):\n    {OLD}",
    "another package's version": XM + f"import timm\nif timm.__version__ < '1':\n    {OLD}",
    "an early return about data": XM + f"def size(d):\n    if not hasattr(d, 'x'):\n        return 1\n    return {OLD}",
    "a test that does not return": XM + f"def size():\n    if not hasattr(xm, 'xrt_world_size'):\n        warn()\n    return {OLD}",
    "before the early return": XM + f"def size():\n    n = {OLD}\n    if not hasattr(xm, 'xrt_world_size'):\n        return 1\n    return n",
    "beside the early return": XM + f"def f(a):\n    if a:\n        if hasattr(xm, 'xrt_world_size'):\n            return 1\n    else:\n        {OLD}",
    "hasattr of an object": XM + f"import torch_xla\nd = torch_xla.device()\nif hasattr(d, 'index'):\n    {OLD}",
    "an assertion about data": XM + f"assert hasattr(data, 'x')\n{OLD}",
    "a handler for another import": XM + f"try:\n    import wandb\nexcept ImportError:\n    {OLD}",
    "a handler that gives up": XM + f"try:\n    n = {OLD}\nexcept AttributeError:\n    n = 1",
}  # fmt: skip


def ids(code: str) -> list[str]:
    module = python_module("x.py", code + "\n")
    assert module.tree is not None, module.notes
    return [finding.id for finding in module_findings(module)]


@pytest.mark.parametrize("name", GUARDED)
def test_guarded(name):
    assert ids(GUARDED[name]) == []


@pytest.mark.parametrize("name", UNGUARDED)
def test_not_guarded(name):
    assert ids(UNGUARDED[name]) == ["xm-xrt-world-size"]


def test_a_guard_about_one_name_of_torch_covers_no_other():
    code = "import torch\nif hasattr(torch, {!r}):\n    torch.cuda.amp.GradScaler()"
    assert ids(code.format("compile")) == ["cuda-amp-gradscaler"]
    assert ids(code.format("amp")) == []
