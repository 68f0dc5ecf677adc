"""Operators that torch_xla lacks or computes wrongly, on virtual devices beside the CPU."""

import pytest
from runs import SUPPORT, VIRTUAL_TPU, last_json, printed, script, tpukit

pytestmark = pytest.mark.xla


@pytest.fixture(scope="module")
def found():
    env = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "2"}
    return last_json(script("operators_on_xla.py", env=env))


def test_operators_and_their_gradients_agree_with_the_cpu(found):
    wrong = {n: e for n, e in found["errors"][0].items() if isinstance(e, str) or not e < 1e-5}
    assert not wrong


def test_writes_in_place_and_through_views_agree_with_the_cpu(found):
    """By themselves, while random numbers are compared, and inside a selective checkpoint."""
    wrong = {
        way: {name: error for name, error in errors.items() if not error < 1e-5}
        for way, errors in found["writes"].items()
    }
    assert wrong == {"plain": {}, "same numbers": {}, "selective checkpoint": {}}


def test_other_values_compile_nothing(found):
    assert found["compilations"] == [1, 1]
    assert all(isinstance(error, float) for error in found["errors"][1].values())


def test_a_parameter_that_adam_wrote_compiles_nothing(found):
    """The second step of each shape of ModernBERT, DeBERTa and ArcFace was compiled again."""
    assert found["by dtype"] == []


def test_gradients_are_made_of_the_rows_as_they_lie(found):
    """Flattened rows are copied on a TPU; a batch norm's gradient is written out in between."""
    assert "lhs_contracting_dims={0,1}" in found["programs"]["product"]
    assert "batch-norm" not in found["programs"]["layer norm"]


def test_places_that_repeat_are_gathered_without_a_scatter(found):
    """DeBERTa's relative positions: its gathers and their gradients moved most of its bytes."""
    assert found["gathers"] == {"equal": [True, True, True], "scatters": [False, True, True]}


def test_attention_under_autocast_takes_two_dtypes(found):
    assert found["mixed"] < 1e-2


def test_torchs_attention_is_the_kernel_where_it_takes_the_shapes(found):
    """And where `sdpa_kernel` does not ask for the formula."""
    assert found["fused"]["taken"] == [False, True, False]
    assert max(found["fused"]["errors"]) < 2e-2


def test_an_operator_that_leaves_the_device_is_named_after_the_first_step(tmp_path):
    done = tpukit(
        "train", "--task", f"{SUPPORT / 'norm_task.py'}:Selecting", "--hw", "tpu", "--max-steps",
        "1", "--results-dir", tmp_path / "run", env={**VIRTUAL_TPU, "CPU_NUM_DEVICES": "1"},
    )  # fmt: skip
    assert "Warning: aten::nonzero left the device in the first step" in printed(done)
