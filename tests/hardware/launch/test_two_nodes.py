"""Two nodes: network namespaces joined by a virtual link, torchrun with two ranks on each."""

import json
import shutil

import pytest
from disks import mounted
from runs import ROOT, latest, parameters, relative_difference, result, tpukit
from two_nodes import FOREVER, TRAIN, TwoNodes, ended, joined

from tpukit import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def nodes():
    with joined(TwoNodes) as pair:
        yield pair


def test_two_times_two_ranks_train_as_one_process(nodes, tmp_path):
    arguments = [*TRAIN, "--max-steps", "20", "--results-dir"]
    assert [code for code, _ in nodes.both(*arguments, tmp_path / "two", "--shard")] == [0, 0]
    result(tpukit(*arguments, tmp_path / "one", "--json"))
    for name in ("model", "ema"):
        two, one = parameters(tmp_path / "two", name), parameters(tmp_path / "one", name)
        assert relative_difference(two, one) < 1e-4


def test_two_nodes_evaluate_and_predict_as_one_process(nodes, tmp_path):
    data, run = tmp_path / "data", tmp_path / "run"
    result(tpukit("data", "images", "--out", data, "--n", "200", "--side", "32", "--json"))
    quick = ["--task", "images", "--preset", "quick", "--data-path", data, "--hw", "cpu"]
    result(tpukit("train", *quick, "--max-steps", "4", "--results-dir", run, "--json"))
    of_run = ["--run", run, "--hw", "cpu", "--precision", "fp32"]
    expected = result(tpukit("test", *of_run, "--out", tmp_path / "one", "--json"))
    result(tpukit("predict", *of_run, "--out", tmp_path / "one.csv", "--json"))
    (run / "tests.json").unlink()

    ends = nodes.both("test", *of_run, "--out", tmp_path / "two")
    assert [code for code, _ in ends] == [0, 0], ends
    [found] = json.loads((run / "tests.json").read_text()).values()
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
    out = tmp_path / "two.csv"
    assert [code for code, _ in nodes.both("predict", *of_run, "--out", out)] == [0, 0]
    assert out.read_bytes() == (tmp_path / "one.csv").read_bytes()


def test_a_killed_node_ends_the_other_and_both_resume(nodes, tmp_path):
    run = tmp_path / "run"
    started = nodes.training(run, *TRAIN, *FOREVER)
    nodes.kill(1)
    code, told = ended(started[0], 60)
    assert code != 0 and "the connection to another rank was lost" in told
    assert "no sign of life from node node-b" in told
    ended(started[1])
    assert "resumes from the last checkpoint" in told
    steps = int(latest(run).name.removeprefix("step-")) + 10
    again = nodes.both(*TRAIN, "--max-steps", steps, "--results-dir", run)
    assert [code for code, _ in again] == [0, 0]


def test_a_link_cut_for_good_ends_both_within_the_timeout(nodes, tmp_path):
    started = nodes.training(tmp_path / "run", *TRAIN, *FOREVER, "--collective-timeout", "20s")
    nodes.link("down")
    for code, told in [ended(process, 120) for process in started]:
        assert code != 0 and "the connection to another rank was lost" in told


def test_other_data_on_one_node_is_an_error_on_both(nodes, tmp_path):
    arguments = [*TRAIN, "--max-steps", "20", "--results-dir", tmp_path / "run"]
    for code, told in nodes.both(*arguments, other=("--set", "samples=60")):
        assert code != 0 and "node node-b (rank 2) is not like node node-a" in told
        assert "samples 60 (rank 0: 64)" in told


def test_another_version_on_one_node_is_an_error_on_both(nodes, tmp_path):
    shutil.copytree(ROOT / "tpukit", tmp_path / "tpukit")
    init = tmp_path / "tpukit" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{__version__}"', '"0.0.9"'))
    arguments = [*TRAIN, "--max-steps", "20", "--results-dir", tmp_path / "run"]
    other = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    started = [nodes.start(0, *arguments), nodes.start(1, *arguments, **other)]
    for code, told in map(ended, started):
        assert code != 0 and "node node-b (rank 2) is not like node node-a" in told
        assert f"tpukit 0.0.9 (rank 0: {__version__})" in told


def test_run_folders_that_are_not_shared_never_resume_silently(nodes, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    arguments = [*TRAIN, "--max-steps", "20"]
    started = [nodes.start(0, *arguments, "--results-dir", one),
               nodes.start(1, *arguments, "--results-dir", two)]  # fmt: skip
    assert [ended(process)[0] for process in started] == [0, 0]
    assert not (two / "checkpoints").exists()
    shutil.rmtree(two, ignore_errors=True)
    more = [*TRAIN, "--max-steps", "40"]
    started = [nodes.start(0, *more, "--results-dir", one),
               nodes.start(1, *more, "--results-dir", two)]  # fmt: skip
    for code, told in [ended(process) for process in started]:
        assert code != 0 and "All hosts must share the run folder" in told


def test_a_full_disk_on_the_first_node_is_told_on_the_other(nodes, tmp_path):
    """The first node's rank writes the checkpoints."""
    with mounted(tmp_path / "disk", "size=2m") as disk:
        arguments = [*TRAIN, "--max-steps", "200", "--set", "width=6000", "--results-dir"]
        told = nodes.both(*arguments, disk / "run")
        assert all(code != 0 for code, _ in told)
        assert all("could not be written" in text for _, text in told), told


def test_a_full_disk_on_the_second_node_is_told_on_the_first(nodes, tmp_path):
    """Its ranks write their logs there, in a run folder that is not shared."""
    with mounted(tmp_path / "disk", "size=64k") as disk:
        (disk / "filler").write_bytes(b"x" * 60_000)
        arguments = [*TRAIN, "--max-steps", "20", "--results-dir"]
        started = [nodes.start(0, *arguments, tmp_path / "run"),
                   nodes.start(1, *arguments, disk / "run")]  # fmt: skip
        ends = [ended(process) for process in started]
        assert all(code != 0 for code, _ in ends)
        assert all("No space left" in told for _, told in ends), ends
        assert "node node-b" in ends[0][1]
