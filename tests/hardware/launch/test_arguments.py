from torch.distributed.run import parse_args

from tpukit.hardware.launch.launcher import torchrun_command


def test_torchrun_leaves_our_options_alone():
    """`--run` is the beginning of two options of torchrun's own."""
    ours = ["tpukit", "test", "--run", "results/deit", "--data", "uef2017", "--json"]
    command = torchrun_command(ours, 2, None)
    start = command.index("tpukit.hardware.launch.torchrun") + 1
    parsed = parse_args(command[start:])
    assert (parsed.training_script, parsed.training_script_args) == (
        "tpukit.hardware.launch.rank",
        ours,
    )
    assert parsed.module
