"""On a CPU where torch_xla is installed, whoever imports it first: no XLA device is used."""

import pytest
from runs import SUPPORT, last_json, parameters, python, result, tpukit

TASK = f"{SUPPORT / 'transformers_task.py'}:Sentiment"
NEW_PROCESS = {"PYTHONHASHSEED": "0"}
"""A variable that no fork of a warm process can have."""
SCRIPT = f"""
import json, sys
{{first}}
sys.path.append({str(SUPPORT)!r})
from transformers_task import Sentiment
import tpukit
done = tpukit.fit(Sentiment, hw="cpu", results_dir="run")
tested = tpukit.evaluate(done, hw="cpu", log=lambda line: None)
print(json.dumps(tested["metrics"]))
"""
pytestmark = pytest.mark.xla


@pytest.fixture(
    scope="module", params=[{}, pytest.param(NEW_PROCESS, marks=pytest.mark.slow)], ids=["", "new"]
)
def trained(request, tmp_path_factory):
    """The run of the command, whose process settles the environment first."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    arguments = ["--task", TASK, "--hw", "cpu", "--results-dir", folder, "--json"]
    result(tpukit("train", *arguments, env=request.param))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import torch_xla", "import accelerate"])
def test_a_script_trains_and_tests_as_the_command_does(trained, tmp_path, first):
    metrics = last_json(python("-c", SCRIPT.format(first=first), cwd=tmp_path))
    ours, theirs = parameters(tmp_path / "run"), parameters(trained)
    assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)
    expected = result(tpukit("test", "--run", trained, "--hw", "cpu", "--json"))["metrics"]
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_batch_of_its_task_is_measured(devices):
    limits = ["--start", "4", "--max", "4", "--devices", devices, "--json"]
    found = result(tpukit("probe-batch", "--task", TASK, "--hw", "cpu", *limits, env=NEW_PROCESS))
    assert [trial["fits"] for trial in found["trials"]] == [True]
    assert found["largest_batch_per_device"] == 4
