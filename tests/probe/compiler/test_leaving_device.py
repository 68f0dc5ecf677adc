"""An operator that leaves the device is laid at the model's line, a library's with the user's."""

from __future__ import annotations

from traceback import FrameSummary

import pytest

from tpukit.probe.compiler.leaving_device import leaving_error

USER = FrameSummary("/home/user/task.py", 20, "loss", line="outputs = model(batch)")
LIBRARY = FrameSummary("/env/site-packages/transformers/masks.py", 30, "mask", line="if all(x):")
ENGINE = FrameSummary("/env/site-packages/tpukit/train/learner.py", 5, "train_step", line="loss()")
TORCH = FrameSummary("/env/site-packages/torch/nn/modules/module.py", 40, "call", line="forward()")
STANDARD = FrameSummary("/usr/lib/python3.11/contextlib.py", 81, "inner", line="return func()")


def test_a_library_is_named_with_the_users_line():
    error = leaving_error(["aten::nonzero"], [ENGINE, USER, TORCH, LIBRARY, TORCH, STANDARD])
    assert error.message == (
        "aten::nonzero would leave the TPU in the middle of the step, at"
        " /env/site-packages/transformers/masks.py:30: `if all(x):`, called at"
        " /home/user/task.py:20: `outputs = model(batch)`."
    )


def test_the_users_own_line_stands_alone():
    error = leaving_error(["aten::nonzero"], [ENGINE, USER, TORCH])
    assert error.message.endswith("at /home/user/task.py:20: `outputs = model(batch)`.")


@pytest.mark.parametrize(
    ("operators", "instead"),
    [
        (["aten::_local_scalar_dense"], "torch.where"),
        (["aten::_unique2"], "depends on values"),
        (["aten::_fft_r2c"], "cosines"),
        (["aten::digamma"], "other operators"),
        ([], "other operators"),
    ],
)
def test_each_operator_has_a_replacement(operators, instead):
    assert instead in leaving_error(operators, [USER]).hint


@pytest.mark.parametrize("line", ['print("mean", x.mean())', "array = x.detach().numpy()"])
def test_a_line_that_reads_is_not_what_xla_lacks(line):
    reads = FrameSummary("/home/user/task.py", 21, "forward", line=line)
    hint = leaving_error(["aten::abs"], [ENGINE, USER, reads, TORCH]).hint
    assert "reads the tensor's values: leave it out" in hint and "XLA lacks" not in hint
