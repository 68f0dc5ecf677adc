"""The XLA backend on virtual devices, each case in a process of its own."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest
from runs import VIRTUAL_TPU, last_json, result, script, tpukit

from tpukit.knowledge.versions import same_release
from tpukit.tasks.llm.generate import write_dialogues

pytestmark = pytest.mark.xla


def on_xla(*case, env=None, devices="8"):
    env = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": devices, **(env or {})}
    return last_json(script("on_xla.py", *case, env=env))


def test_attention_in_blocks_is_attention():
    errors = on_xla("blocked_attention", devices="2")
    assert len(errors) == 4
    assert max(errors.values()) < 1e-5, errors


def test_recomputation_has_barriers_and_the_same_gradients(tmp_path):
    """XLA merges two computations of the same unless barriers keep them apart.

    (The CPU's compiler drops them late; test_flash_attention.py shows that a TPU's keeps them.)
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


ABORTS = pytest.mark.skipif(
    find_spec("torch_xla") is not None and same_release(version("torch_xla"), "2.8"),
    reason="torch_xla 2.8's CPU aborts the process instead of raising",
)


@pytest.mark.parametrize("kind", [pytest.param("xla", marks=ABORTS), "eager"])
def test_a_real_failure_is_recognised_as_out_of_memory(kind):
    answer = on_xla("out_of_memory", kind, devices="1")
    assert answer["recognised"], answer["text"]


def test_a_seed_decides_what_the_devices_draw():
    drawn = on_xla("generators")
    assert drawn["again"] == drawn["first"] != drawn["second"]


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


def test_an_outer_autocast_does_not_reach_fp32():
    assert on_xla("under_an_autocast", devices="1") == "torch.float32"


def test_reads_of_split_tensors_compile_nothing():
    """One program a shape and order of the reads, and none to gather what devices hold."""
    told = on_xla("split_reads")
    assert max(told["differences"]) == 0
    assert told["counts"][2:] == told["counts"][1:2] * 2
    assert told["gathers"] == 0


def test_memory_that_torch_xla_does_not_report_is_libtpus():
    assert on_xla("metered", devices="2") == [5, 9]


@pytest.mark.slow
def test_commands_compile_nothing_to_read(tmp_path):
    """A checkpoint of split weights, the images of EIT and the tokens of summaries."""

    def command(*arguments):
        told = on_xla("command", *map(str, arguments), "--hw", "tpu", "--precision", "fp32")
        assert told == {"code": 0, "gathers": 0}

    write_dialogues(tmp_path / "dialogues", 100, 0)
    small = ["--model", "2x2x32", "--tokenizer", "train", "--set", "vocabulary_size=400",
             "--block-size", "256", "--set", "score_samples=0"]  # fmt: skip
    of_steps = ["--global-batch-size", "16", "--max-steps", "4", "--ckpt-every", "2", "--shard"]
    command("summarize-train", "--data-path", tmp_path / "dialogues", "--results-dir",
            tmp_path / "summaries", *small, *of_steps)  # fmt: skip
    command("predict", "--run", tmp_path / "summaries", "--out", tmp_path / "out.csv",
            "--max-new-tokens", "8")  # fmt: skip
    result(tpukit("data", "eit", "--out", tmp_path / "eit", "--n", "40", "--json"))
    command("train", "--data-path", tmp_path / "eit", "--results-dir", tmp_path / "images",
            "--size", "tiny", *of_steps)  # fmt: skip
    command("test", "--run", tmp_path / "images")


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


def test_the_steps_of_each_weight_are_counted():
    counts, wholes = on_xla("counted_steps", devices="1")
    assert counts == [[3, 3, 2], [4, 4, 3], [3, 3, 2]]
    assert wholes == [1, 1]


def test_a_step_whose_tensor_is_gone_is_traced_again():
    assert on_xla("removed_tensor", devices="1") == "a tensor that it used was removed"


def test_weights_that_were_frozen_or_not_used_learn_as_on_the_cpu():
    """Their corrections are of their own steps."""
    assert max(on_xla("late_weights", devices="2").values()) < 1e-4


def test_complex_weights_learn_as_on_the_cpu():
    assert on_xla("complex_weights", devices="2") < 1e-4
