"""Call stacks in a traced module are cut down to the model's own line."""

from __future__ import annotations

from tpukit.probe.compiler.source_map import SourceLine, resolve_places

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
    assert SourceLine("/home/user/model.py", 1).is_model_code
    assert not SourceLine("/x/tpukit/train/learner.py", 1).is_model_code
    assert not SourceLine("<string>", 1).is_model_code
    assert SourceLine("/x/tpukit/tasks/eit/blocks.py", 1).is_model_code
