"""Tensors in shards over several hosts: each writes its own part."""

import pytest
import torch
from runs import TINY, VIRTUAL_TPU, latest, parameters, printed, result, script, tpukit

from tpukit.train.checkpoint import TENSOR_FILES, open_checkpoint
from tpukit.train.shards import INDEX_FILE

EIGHT = {**VIRTUAL_TPU, "CPU_NUM_DEVICES": "8"}
TRAIN = ["train", "--task", TINY.replace(":Tiny", ":Container"), "--set", "width=64", "--json"]


@pytest.mark.slow
@pytest.mark.xla
def test_two_hosts_write_a_state_that_any_run_goes_on_from(tmp_path):
    """Of two hosts that hold four devices each of a mesh; one process reads what they wrote."""
    run, out = tmp_path / "run", tmp_path / "out"
    on_eight = ["--hw", "tpu", "--shard", "--results-dir", run, "--max-steps", "4"]
    result(tpukit(*TRAIN, *on_eight, env=EIGHT))
    printed(script("two_hosts.py", run, out, env=EIGHT))
    assert (latest(out) / INDEX_FILE).exists() and not (latest(run) / INDEX_FILE).exists()
    assert {path.name[:4] for path in latest(out).glob("*.distcp")} == {"__0_", "__1_"}
    before, after = open_checkpoint(latest(run)), open_checkpoint(latest(out))
    assert before.state == after.state
    for file in TENSOR_FILES:
        expected, found = before.tensors(file), after.tensors(file)
        assert expected.keys() == found.keys() and expected
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    for folder in (run, out):
        (out / "config.toml").write_bytes((run / "config.toml").read_bytes())
        result(tpukit(*TRAIN, "--hw", "cpu", "--results-dir", folder, "--max-steps", "6"))
    assert all(torch.equal(parameters(run)[n], parameters(out)[n]) for n in parameters(run))
