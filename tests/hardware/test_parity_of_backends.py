"""One reference loop on every backend: the same weights, as few graphs as promised, real shards."""

import pytest
import torch
from runs import VIRTUAL_TPU, ranks_of, relative_difference, script

WAYS = {
    "xla-8-accumulate-2": (["--hw", "tpu", "--accumulate", "2"], VIRTUAL_TPU),
    "xla-8-sharded": (["--hw", "tpu", "--shard"], VIRTUAL_TPU),
    "two-ranks-accumulate-4": (["--devices", "2", "--accumulate", "4"], {}),
    "two-ranks-recorded": (["--devices", "2", "--recorded"], {}),
    "fsdp-2-accumulate-2": (["--devices", "2", "--shard", "--accumulate", "2"], {}),
}


def run(out, arguments, env=None):
    """What the reference loop left, run as one rank or as two."""
    ranks = 1 if "tpu" in arguments else ranks_of(arguments)
    done = script("hardware_run.py", out, *arguments, env=env, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One CPU rank."""
    return run(tmp_path_factory.mktemp("reference") / "out.pt", [])


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.xla] * ("xla" in way)) for way in WAYS]
)
def test_weights_agree_after_20_steps(tmp_path, reference, way):
    arguments, env = WAYS[way]
    left = run(tmp_path / "out.pt", arguments, env)
    assert relative_difference(left["parameters"], reference["parameters"]) < 1e-4
    assert left["loss_and_norm"] == pytest.approx(reference["loss_and_norm"], rel=1e-4)
    assert left["tied"]
    assert left["exchanged"]
    assert left["loaded"]
    main, *others = left["copied"]
    # Of shards each rank saves its own; the 0-d one is on every rank.
    shards = main - 1 if "fsdp" in way else 0
    assert main == len(left["parameters"]) and all(other == shards for other in others)
    own, whole = left["shard_sizes"]
    assert left["shard_sizes_after_loading"] == left["shard_sizes"]
    if "sharded" in way:
        assert own < whole / 6
    elif "fsdp" in way:
        assert own == whole / 2
    else:
        assert own == whole
    if "xla" in way:
        graphs = 2 if "accumulate" in way else 1
        assert left["compilations"] == [graphs] * 20
        assert left["compilations_after_reading"] == graphs


def test_fp16_with_fsdp_skips_the_same_steps_as_ddp(tmp_path):
    """An overflow on one rank makes both skip the step."""
    arguments = ["--precision", "fp16", "--devices", "2"]
    copies = run(tmp_path / "copies.pt", arguments)
    shards = run(tmp_path / "shards.pt", [*arguments, "--shard"])
    assert shards["scaler"] == copies["scaler"]
    assert shards["scaler"][0] == shards["scaler"][1]
    assert shards["scaler"][0]["scale_of_mean"] < 65536
    assert relative_difference(shards["parameters"], copies["parameters"]) < 1e-3
