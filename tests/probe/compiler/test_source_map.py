"""Call stacks reduced to the model's line, which names what leaves the device."""

import contextlib
from traceback import FrameSummary

import pytest

from tpukit.io.code_owner import PACKAGE, is_model_code
from tpukit.probe.compiler.source_map import leaving_error, resolve_places

MODULE = """module {
  func.func @main(%arg0: tensor<f32> loc("xla__device_data"(#loc9))) {
    %0 = stablehlo.add %arg0, %arg0 : tensor<f32> loc(#loc10)
  }
}
#loc1 = loc("/env/site-packages/torch/nn/functional.py":10:0)
#loc2 = loc("/home/user/model.py":20:0)
#loc3 = loc("/home/user/main.py":30:0)
#loc4 = loc("relu"(#loc1))
#loc5 = loc("forward"(#loc2))
#loc6 = loc("main"(#loc3))
#loc7 = loc(callsite(#loc5 at #loc6))
#loc8 = loc(callsite(#loc4 at #loc7))
#loc9 = loc(callsite(#loc4 at #loc4))
#loc10 = loc("aten__relu"(#loc8))
"""


def test_the_models_innermost_line_is_kept():
    resolved = resolve_places(MODULE)
    assert '#loc8 = loc("/home/user/model.py":20:0)' in resolved
    assert '#loc10 = loc("aten__relu"(#loc8))' in resolved


def test_without_a_line_of_the_models_the_innermost_stays():
    resolved = resolve_places(MODULE)
    assert '#loc9 = loc("/env/site-packages/torch/nn/functional.py":10:0)' in resolved


def test_libraries_and_the_engine_are_not_the_model():
    assert is_model_code("/home/user/model.py")
    assert not is_model_code(f"{PACKAGE}train/learner.py")
    assert not is_model_code("<string>")
    assert is_model_code(f"{PACKAGE}tasks/eit/blocks.py")


USER = FrameSummary("/home/user/task.py", 20, "loss", line="outputs = model(batch)")
LIBRARY = FrameSummary("/env/site-packages/transformers/masks.py", 30, "mask", line="if all(x):")
ENGINE = FrameSummary(f"{PACKAGE}train/learner.py", 5, "train_step", line="loss()")
TORCH = FrameSummary("/env/site-packages/torch/nn/modules/module.py", 40, "call", line="forward()")
STANDARD = FrameSummary(contextlib.__file__, 81, "inner", line="return func()")


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
