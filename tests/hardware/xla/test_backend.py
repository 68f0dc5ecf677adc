"""The XLA backend on virtual devices, each case in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from runs import SUPPORT, VIRTUAL_TPU, environment

pytestmark = pytest.mark.xla


def on_xla(*case, env=None, devices="8"):
    done = subprocess.run(
        [sys.executable, SUPPORT / "on_xla.py", *case],
        env=environment({**VIRTUAL_TPU, "CPU_NUM_DEVICES": devices, **(env or {})}),
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_attention_in_blocks_is_attention():
    errors = on_xla("blocked_attention", devices="2")
    assert len(errors) == 4
    assert max(errors.values()) < 1e-5, errors


def test_recomputation_has_barriers_and_the_same_gradients(tmp_path):
    """XLA merges two computations of the same unless barriers keep them apart.

    (The CPU's compiler drops them late; that a TPU's keeps them is shown in test_xla_kernels.py.)
    """
    barriers, gradients = {}, {}
    for how in ("none", "ours"):
        flags = f"--xla_dump_to={tmp_path / how} --xla_dump_hlo_as_text"
        gradients[how] = on_xla("recompute", how, env={"XLA_FLAGS": flags}, devices="1")
        texts = [file.read_text() for file in (tmp_path / how).glob("*before_optimizations.txt")]
        barriers[how] = sum(text.count(" opt-barrier(") for text in texts)
    assert barriers["none"] == 0
    assert barriers["ours"] > 0
    assert gradients["ours"] == pytest.approx(gradients["none"], rel=1e-4)


@pytest.mark.parametrize("kind", ["xla", "eager"])
def test_a_real_failure_is_recognised_as_out_of_memory(kind):
    answer = on_xla("out_of_memory", kind, devices="1")
    assert answer["recognised"], answer["text"]


def test_generators_go_on_where_they_were():
    drawn = on_xla("generators")
    assert drawn["again"] == drawn["second"] != drawn["first"]


def test_no_rate_compiles_anew():
    """Rates of exactly 0 and 1 are constants to a graph that is not careful."""
    assert on_xla("extremes", devices="1") == [1] * 5


def test_dropout_does_not_depend_on_what_is_read():
    """Each sync moves XLA's generator on; a run that logs more often must stay the same run."""
    undisturbed, disturbed = on_xla("dropout_beside_reads", devices="1")
    assert undisturbed == disturbed


def test_an_outer_autocast_compiles_one_graph():
    """The casts that it keeps would make the first pass another graph than the rest."""
    assert on_xla("repeated_passes", devices="1") == [1] * 5


def test_second_derivatives_are_one_graph():
    """Nodes that autograd's own thread numbers would be taken in another order in each step."""
    assert on_xla("second_derivatives", devices="1") == [1] * 5


PROVEN = ["SGD", "Adafactor", "Lion"]
MORE = ["AdamW", "Adam", "NAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta"]


@pytest.mark.parametrize("names", [PROVEN, pytest.param(MORE, marks=pytest.mark.slow)])
def test_optimizers_equal_the_cpus_in_one_graph(names):
    answers = on_xla("optimizers", *names, devices="4")
    assert {name: answer["compiled"] for name, answer in answers.items()} == {
        name: [0] * 8 for name in names
    }
    assert max(answer["difference"] for answer in answers.values()) < 1e-4, answers


def test_an_optimizer_that_reads_values_is_refused_by_name():
    told = on_xla("optimizers", "reading", devices="1")["reading"]["refused"]
    assert "the optimizer Reading reads values" in told
