"""Steps of torch_xla that run without their Python are those that are traced, bit for bit."""

import pytest
from runs import VIRTUAL_TPU, last_json, script

pytestmark = pytest.mark.xla


def case(*words, devices="1", **variables):
    env = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": devices, **variables}
    return last_json(script("recorded_steps.py", *words, env=env, timeout=800))


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (["12"], "2"),
        pytest.param(["50"], "1", marks=pytest.mark.slow),
        pytest.param(["50"], "8", marks=pytest.mark.slow),
        pytest.param(["50", "shard"], "8", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(900)
def test_weights_moments_averages_and_draws_are_those_of_traced_steps(words, devices):
    """Dropout, also computed again, BatchNorm, EMA, a rate that changes, micro-batches."""
    found = case("equal", *words, devices=devices)
    for way, compared in found["ways"].items():
        assert compared["differing"] == [], way
        assert compared["executed"] == int(words[0]) - 2, way
    assert found["said"] == []


REPLAYED = {
    "Settings": 4, "Rises": 0, "Counts": 0, "Draws": 0, "Keeps": 0, "Freezes": 4,
    "ReplacesData": 6, "HooksGradient": 6, "Imports": 5, "Reads": 0,
}  # fmt: skip
"""Of eight steps of each task, those that run without their Python."""
SAID = {
    "Rises": "Rises.alpha changes before each call", "Counts": "Counts.calls", "Draws": "Draws.rng",
    "Keeps": "Keeps.center", "Reads": "reads values of the device at",
}  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [
        ("Settings", "Counts", "Reads"),
        pytest.param(
            sorted(REPLAYED.keys() - {"Settings", "Counts", "Reads"}), marks=pytest.mark.slow
        ),
    ],
    ids=["some", "others"],
)
def test_what_a_step_reads_in_python_counts(names):
    """A setting that changes is seen; a step that cannot be recorded is traced, which is said."""
    found = case("python", *names)
    for name in names:
        told = found["tasks"][name]
        assert (told["differing"], told["executed"]) == ([], REPLAYED[name])
        # What is found at a step's end costs no compilation: a traced step's program is executed.
        assert name not in ("Counts", "Draws") or told["compiled"] == 0
    assert len(found["said"]) == len(SAID.keys() & names)
    for name in SAID.keys() & names:
        [line] = [line for line in found["said"] if SAID[name] in line]
        assert name != "Reads" or "recorded_steps.py:" in line


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_what_happens_between_steps_counts(accumulate):
    """Layers frozen, other shapes, validation, loaded weights, tensors that are given others' data,
    shapes and types, or are replaced, a pending result."""
    found = case("surroundings", accumulate)
    assert found["differing"] == []
    assert found["executed"] >= 8


@pytest.mark.slow
def test_a_validation_between_two_recordings_leaves_the_step_s_program():
    found = case("refused_first", devices="2")
    assert (found["differing"], found["executed"], found["later"]) == ([], 5, 0)


def test_a_module_that_draws_when_it_is_imported_costs_no_program():
    found = case("imports", devices="2")
    assert (found["differing"], found["later"], found["said"]) == ([], 0, [])


def test_a_later_part_of_a_step_takes_what_an_earlier_one_made():
    found = case("queue", devices="2")
    assert (found["differing"], found["executed"], found["said"]) == ([], 8, [])


def test_tensors_that_are_split_otherwise_are_given_to_another_program():
    found = case("splits", devices="2")
    assert (found["differing"], found["executed"], found["said"]) == ([], 8, [])


def test_a_batch_that_is_given_twice_is_not_taken_for_two():
    found = case("one_batch_twice")
    assert found["differing"] == []
    assert "batch" in found["said"][0]


@pytest.mark.slow
def test_a_program_that_torch_xla_has_dropped_is_traced_again():
    found = case("evicted", XLA_COMPILATION_CACHE_SIZE="3")
    assert found["differing"] == []
    assert 0 < found["executed"] < 12


def test_memory_and_compilations_are_those_of_traced_steps():
    found = case("memory")
    assert found["recorded"] == found["traced"]
    assert found["recorded"][0] == 0
