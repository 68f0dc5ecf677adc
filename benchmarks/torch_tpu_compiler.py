"""What the TPU compiler says of a training step on torch_tpu, beside torch_xla's, without a TPU.

    python benchmarks/torch_tpu_compiler.py [--torch-xla PYTHON] [--effort fast full]

In an environment with torch_tpu and jax; PYTHON is an interpreter whose environment has tpukit's
extra [plan]; without it torch_tpu's answers alone are renewed. Each stack records the engine's own
step as `probe-batch --target` has it, which libtpu's compile-only client compiles for one v5e chip.
torch_xla's program is compiled by both releases of libtpu: that tells what the stacks do otherwise
from what the compilers do otherwise.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deciding_code import write_result

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "torch_tpu_compiler.json"
ROWS = {"GPT-2 124M": 8, "EIT published": 8}
TOPOLOGY = "v5e:2x2"


def network(name: str) -> tuple[Any, Any]:
    """The task and the config that are traced."""
    from tpukit.tasks.eit.task import EITTask
    from tpukit.tasks.llm.task import SummarizeTask
    from tpukit.train.config import TrainConfig

    if name.startswith("EIT"):
        config = TrainConfig(ema_decay=0.995, ema_every=10, precision="bf16")
        return EITTask(size="published").for_probing(), config
    task = SummarizeTask(init="scratch", tokenizer="gpt2")
    return task.for_probing(), TrainConfig(precision="bf16")


def record(name: str, attention: str, path: str) -> bool:
    """Keeps the step's program, as this environment's stack traces it."""
    from tpukit.probe.compiler.client import find_client
    from tpukit.probe.compiler.compiled_trial import TRACERS

    stack = find_client().stack
    tracer: Any = importlib.import_module(f"tpukit.probe.compiler.{TRACERS[stack]}")
    task, config = network(name)
    backend = tracer.open_tracing(
        "bf16", shard=False, fused=attention == "kernel", topology=TOPOLOGY
    )
    if stack == "torch_tpu" and attention == "plain":
        import torch

        # torch_tpu has a kernel of its own for torch's attention.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    [program] = tracer.trace_step(task, config, backend, ROWS[name], 1).training
    Path(path).write_bytes(pickle.dumps(program))
    return True


def compile_for_v5e(path: str, effort: Any) -> dict[str, Any]:
    """The compiler's report on a program for one chip, with the releases that made it."""
    from tpukit.probe.compiler.compile import CompilerRefusedError, TpuCompiler
    from tpukit.probe.compiler.hlo import costs_of, scheduled_hlo

    program = pickle.loads(Path(path).read_bytes())
    made_by = {"effort": effort, "libtpu": importlib.metadata.version("libtpu")}
    try:
        executable = TpuCompiler(TOPOLOGY, 1).compile(program, effort)
    except CompilerRefusedError as error:
        return {**made_by, "refusal": str(error).splitlines()[0]}
    found = asdict(costs_of(executable, program.kernel_share))
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


# -- the stages, one a process ---------------------------------------------------------------------
STAGES = {"record": record, "compile": compile_for_v5e}


def stage(python: str, name: str, *arguments: str) -> Any:
    """What a stage prints last, as JSON; None where it fails."""
    from tpukit.probe.trials.evaluators import COMPILER_ENVIRONMENT

    given = {**os.environ, **COMPILER_ENVIRONMENT, "CPU_NUM_DEVICES": "1"}
    given |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT)}
    command = [python, str(Path(__file__)), "--stage", name, *arguments]
    done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-xla", metavar="PYTHON")
    parser.add_argument("--effort", nargs="+", default=["fast"], choices=["fast", "full"])
    parser.add_argument("--only", nargs="+", default=list(ROWS), metavar="NETWORK")
    parser.add_argument("--attention", nargs="+", default=["kernel", "plain"])
    parser.add_argument("--stage", nargs="+")
    asked = parser.parse_args()
    if asked.stage:
        name, *arguments = asked.stage
        print(json.dumps(STAGES[name](*arguments)))
        return
    pythons = {"torch_tpu": sys.executable, "torch_xla": asked.torch_xla}
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"answers": []}
    packages = ("torch", "torch_tpu", "libtpu", "jax")
    result["versions"] = {name: importlib.metadata.version(name) for name in packages}
    with tempfile.TemporaryDirectory() as folder:
        for attention in asked.attention:
            for name in asked.only:
                for stack, python in pythons.items():
                    path = str(Path(folder) / "program")
                    if python is None or not stage(python, "record", name, attention, path):
                        continue
                    # The kernels of one release are not those of another.
                    for compiled_by in {python, *((sys.executable,) * (attention == "plain"))}:
                        for effort in asked.effort:
                            found = stage(compiled_by, "compile", path, effort)
                            answer = {"network": name, "rows": ROWS[name], "stack": stack}
                            answer["attention"] = attention
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
