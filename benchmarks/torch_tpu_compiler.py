"""What the TPU compiler says of a training step on torch_tpu, beside torch_xla's, without a TPU.

    python benchmarks/torch_tpu_compiler.py [--torch-xla PYTHON] [--effort fast full]

In the environment of scripts/try_torch_tpu.sh; PYTHON is an interpreter whose environment has
tpukit's extra [plan]; without it torch_tpu's answers alone are renewed. Each stack records the
engine's own step as one program, which libtpu's compile-only client compiles for one v5e chip.
torch_xla's program is compiled by both releases of libtpu: that tells what the stacks do otherwise
from what the compilers do otherwise.

torch_tpu has no public function for this: the step is recorded as a run records it, through private
ones, in a process whose device is the CPU plugin of the tests. Other releases are refused.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deciding_code import write_result

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "torch_tpu_compiler.json"
PLUGIN = ROOT / "tests" / "support" / "torch_tpu_on_cpu"
WRITTEN_AGAINST = {"torch_tpu": "0.2.0", "jax": "0.10.2"}
ROWS = {"GPT-2 124M": 8, "EIT published": 8}
COMPILER = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}  # fmt: skip
TOPOLOGY = "v5e:2x2"


def network(name: str) -> tuple[Any, Any]:
    """The task and the config that are traced."""
    from tpukit.tasks.eit.task import EITTask
    from tpukit.tasks.summarize.task import SummarizeTask
    from tpukit.train.config import TrainConfig

    if name.startswith("EIT"):
        config = TrainConfig(ema_decay=0.995, ema_every=10, precision="bf16")
        return EITTask(size="published").for_probing(), config
    task = SummarizeTask(loss="reference", init="scratch", tokenizer="gpt2")
    return task.for_probing(), TrainConfig(precision="bf16")


def batch_of(task: Any, rows: int) -> Any:
    from tpukit.train.task import PlanSettings

    return task.probe_batches(PlanSettings(rows, rows, 1, 0))[0]


# -- torch_tpu -------------------------------------------------------------------------------------
def record_torch_tpu(name: str, kernels: bool) -> tuple[bytes, dict[int, int]]:
    """The step as a run records it, as a StableHLO artifact, and which argument becomes which
    result."""
    found = {package: importlib.metadata.version(package) for package in WRITTEN_AGAINST}
    if found != WRITTEN_AGAINST:
        sys.exit(f"written against {WRITTEN_AGAINST}; this environment has {found}")
    import torch

    from tpukit.hardware.eager.programs import StepPrograms
    from tpukit.hardware.kernels.torch_attention import RUNNING
    from tpukit.hardware.options import HardwareOptions
    from tpukit.hardware.select import open_backend
    from tpukit.train.learner import build_learner

    backend: Any = open_backend(HardwareOptions(hw="tpu", precision="bf16", compile=True))
    backend.fused = kernels
    from torch_tpu._internal.compile import tpu_torch_compile as recorder

    # The tests' hook turns torch_tpu's own kernel off, as the CPU cannot execute it.
    torch.backends.cuda.enable_cudnn_sdp(kernels)
    torch.backends.cuda.enable_flash_sdp(kernels)
    task, config = network(name)
    torch.manual_seed(0)
    learner = build_learner(task, backend, task.build_model(backend), config)
    batches = [next(iter(backend.batches([batch_of(task, ROWS[name])])))]
    programs = StepPrograms(backend.device, print)
    RUNNING.set(backend)
    recording = programs.recorded(learner._step, batches, programs.inputs(batches, (1e-4, 0.0)))
    places = {id(kept): place for place, kept in enumerate(recording.recorder.kept)}
    aliases = {places[id(kept)]: result for result, kept in enumerate(recording.recorder.changed)}
    return recorder.serialize_mlir_portable_artifact(recording.module), aliases


# -- torch_xla -------------------------------------------------------------------------------------
def trace_torch_xla(name: str, kernels: bool) -> tuple[bytes, dict[int, int]]:
    """The step as a StableHLO artifact, as `probe-batch --target` traces it."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo

    from tpukit.probe.compiler.client import check_versions
    from tpukit.probe.compiler.compile import _with_arguments
    from tpukit.probe.compiler.trace import open_tracing, trace_step

    check_versions()
    task, config = network(name)
    backend = open_tracing("bf16", shard=False, fused=kernels)
    [program] = trace_step(task, config, backend, ROWS[name], 1).training
    with mlir.make_ir_context():
        module = ir.Module.parse(_with_arguments(program, 1))
        artifact: bytes = hlo.serialize_portable_artifact(module, hlo.get_current_version())
    return artifact, {}  # marked already


# -- libtpu ----------------------------------------------------------------------------------------
def compile_for_v5e(path: Path, effort: str) -> dict[str, Any]:
    """The compiler's report on a program for one chip, with the releases that made it."""
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir.dialects import hlo
    from jax.experimental import topologies

    from tpukit.probe.compiler.compile import FAST_EFFORT
    from tpukit.probe.compiler.hlo import costs_of, scheduled_hlo

    chip = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices[0]
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=1, device_assignment=np.array([[chip.id]])
    )
    options.executable_build_options.use_shardy_partitioner = False
    if effort == "fast":
        options.executable_build_options.exec_time_optimization_effort = FAST_EFFORT
    with mlir.make_ir_context() as context:
        module = hlo.deserialize_portable_artifact(context, path.read_bytes())
        mark_aliases(module, json.loads(path.with_suffix(".json").read_text()))
        is_old = importlib.metadata.version("jax").startswith("0.7.")
        given = mlir.module_to_bytecode(module) if is_old else module
        made_by = {"effort": effort, "libtpu": importlib.metadata.version("libtpu")}
        try:
            executable = chip.client.compile(given, xla_client.DeviceList((chip,)), options)
        except Exception as error:  # XlaRuntimeError or ValueError: the class varies
            return {**made_by, "refusal": str(error).splitlines()[0]}
    found = asdict(costs_of(executable))
    memory = executable.get_compiled_memory_stats()
    return {
        **made_by,
        "arguments": memory.argument_size_in_bytes,
        "kernels": scheduled_hlo(executable).count('custom_call_target="tpu_custom_call"'),
        **{name: found[name] for name in ("total", "temporaries", "code", "flops")},
        "bytes_accessed": found["bytes_accessed"],
        "largest": [{"size_bytes": a["size_bytes"], "shape": a["shape"]}
                    for a in found["largest"][:4]],
    }  # fmt: skip


def mark_aliases(module: Any, aliases: list[tuple[int, int]]) -> None:
    """Gives arguments' memory to results, as a run does."""
    from jax._src.lib.mlir import ir

    main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    given: list[dict[str, Any]] = [{} for _ in main.type.inputs]
    i32 = ir.IntegerType.get_signless(32)
    for argument, result in aliases:
        given[argument]["tf.aliasing_output"] = ir.IntegerAttr.get(i32, result)
    if aliases:
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in given])


# -- the stages, one a process ---------------------------------------------------------------------
def stage(python: str, name: str, *arguments: object, env: dict[str, str]) -> Any:
    """What a stage prints last, as JSON; None where it fails."""
    # Not the hook where libtpu compiles: TPU_LIBRARY_PATH would name the plugin.
    given = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "TPU_LIBRARY_PATH")}
    given |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT), **env}
    command = [python, str(Path(__file__)), "--stage", name, *map(str, arguments)]
    done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def run_stage(name: str, *arguments: str) -> Any:
    if name == "compile":
        return compile_for_v5e(Path(arguments[0]), arguments[1])
    record = {"torch_tpu": record_torch_tpu, "torch_xla": trace_torch_xla}[name]
    network_name, kernels, path = arguments
    artifact, aliases = record(network_name, kernels == "True")
    Path(path).write_bytes(artifact)
    Path(path).with_suffix(".json").write_text(json.dumps(list(aliases.items())))
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-xla", metavar="PYTHON")
    parser.add_argument("--torch-tpu", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--effort", nargs="+", default=["fast"], choices=["fast", "full"])
    parser.add_argument("--only", nargs="+", default=list(ROWS), metavar="NETWORK")
    parser.add_argument("--stage", nargs="+")
    asked = parser.parse_args()
    if asked.stage:
        print(json.dumps(run_stage(*asked.stage)))
        return
    on_cpu = {"PYTHONPATH": os.pathsep.join([str(PLUGIN), str(ROOT)])}
    virtual = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", **COMPILER}
    pythons = {"torch_tpu": (asked.torch_tpu, on_cpu), "torch_xla": (asked.torch_xla, virtual)}
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"answers": []}
    packages = ("torch", "torch_tpu", "libtpu", "jax")
    result["versions"] = {name: importlib.metadata.version(name) for name in packages}
    with tempfile.TemporaryDirectory() as folder:
        for kernels in (True, False):
            for name in asked.only:
                for stack, (python, env) in pythons.items():
                    path = Path(folder) / "program"
                    if python is None or not stage(python, stack, name, kernels, path, env=env):
                        continue
                    # The kernels of one release are not those of another.
                    for compiled_by in {python} if kernels else {asked.torch_tpu, python}:
                        for effort in asked.effort:
                            found = stage(compiled_by, "compile", path, effort, env=COMPILER)
                            answer = {"network": name, "rows": ROWS[name], "stack": stack}
                            answer["attention"] = "kernel" if kernels else "plain"
                            if found is not None:
                                keep(result, {**answer, **found})


def keep(result: dict[str, Any], answer: dict[str, Any]) -> None:
    """Adds an answer in place of an earlier one, and writes the file: a stopped run keeps some."""
    key = ("network", "rows", "stack", "attention", "effort", "libtpu")
    same = [answer.get(name) for name in key]
    others = [a for a in result["answers"] if [a.get(name) for name in key] != same]
    result["answers"] = [*others, answer]
    print(json.dumps({n: v for n, v in answer.items() if n != "largest"}), flush=True)
    write_result(RESULT, result)


if __name__ == "__main__":
    main()
