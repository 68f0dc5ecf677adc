"""A test of a release or a feature silences the findings of its own package, nothing else."""

from cases import read_cases
from scanned import ids

CASES = read_cases(__file__)


def test_a_guard_silences_the_finding():
    assert [name for name, code in CASES["guarded"].items() if ids(code)] == []


def test_what_is_no_guard_silences_nothing():
    unguarded = CASES["unguarded"].items()
    assert [name for name, code in unguarded if ids(code) != ["xm-xrt-world-size"]] == []


def test_a_guard_about_one_name_of_torch_covers_no_other():
    code = "import torch\nif hasattr(torch, {!r}):\n    torch.cuda.amp.GradScaler()"
    assert ids(code.format("compile")) == ["cuda-amp-gradscaler"]
    assert ids(code.format("amp")) == []
