"""Which operations of a compiled training step move the bytes: the step's HLO, read line by line.

    python benchmarks/step_traffic.py llm --rows 56 [--keep]

Each instruction of the program reads its operands from HBM and writes its result there, once; what
stays on the chip is not counted. Nothing runs on a TPU.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from deciding_code import write_result

RESULT = Path(__file__).parent / "results" / "step_traffic.json"
ENVIRONMENT = {
    "PJRT_DEVICE": "CPU",
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "XLA_IR_DEBUG": "1",
    "XLA_HLO_DEBUG": "1",
    "TORCH_WARM_POOL": "0",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--target", default="v5e-1")
    parser.add_argument("--effort", default="fast", choices=["fast", "full"])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--hlo", type=Path, help="write the program's text here")
    parser.add_argument("--keep", action="store_true", help="add the figures to the results")
    return parser.parse_args()


def compiled(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The scheduled program and the compiler's figures."""
    from tpukit.probe.compiler.compile import TpuCompiler
    from tpukit.probe.compiler.hlo import costs_of, scheduled_hlo
    from tpukit.probe.compiler.trace import open_tracing, trace_step
    from tpukit.probe.targets import find_target
    from tpukit.registry.classes import load_task
    from tpukit.train.config import TrainConfig

    target = find_target(arguments.target)
    settings = {name: _value(text) for name, _, text in (s.partition("=") for s in arguments.set)}
    task = load_task(arguments.task, settings, "data").for_probing()
    backend = open_tracing("bf16", shard=False, fused=True)
    config = TrainConfig(lr=1e-4, precision="bf16")
    step = trace_step(task, config, backend, arguments.rows, 1)
    program = step.training[0]
    executable = TpuCompiler(target.topology, target.devices).compile(program, arguments.effort)
    found = costs_of(executable, program.kernel_share)
    chip = target.generation
    return scheduled_hlo(executable), {
        "gib": found.total / 2**30,
        "tflops": found.flops / 1e12,
        "gbytes": found.bytes_accessed / 1e9,
        "arithmetic_seconds": found.flops / chip.flops_per_second,
        "memory_seconds": found.bytes_accessed / chip.bytes_per_second,
    }


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def traffic(program: str) -> list[tuple[int, str, str, str, str]]:
    """For each instruction of the entry: bytes, name, result's shape, place, operator."""
    from tpukit.probe.compiler import hlo

    shapes: dict[str, str] = {}
    found = []
    for instruction in hlo.parse(hlo._entry(program)):
        shapes[instruction.name] = instruction.shape
        if instruction.opcode in hlo.VIEWS | hlo.NO_BUFFER:
            continue
        reads = sum(hlo.shape_bytes(shapes[n]) for n in set(instruction.operands) if n in shapes)
        one = instruction.allocation()
        operator = (one.operator or "?").rpartition("/")[2]
        found.append(
            (reads + one.size_bytes, instruction.name, one.shape, one.place or "?", operator)
        )
    return found


def main() -> None:
    arguments = parse()
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    program, figures = compiled(arguments)
    if arguments.hlo:
        arguments.hlo.write_text(program)
    found = traffic(program)
    by_operator: Counter[str] = Counter()
    for size, *_, operator in found:
        by_operator[operator.removeprefix("aten__")] += size
    figures["gbytes_by_operator"] = {
        name: round(size / 1e9, 2) for name, size in by_operator.most_common(8)
    }
    print(json.dumps(figures, indent=2))
    for size, name, shape, place, operator in sorted(found, reverse=True)[: arguments.top]:
        print(f"{size / 1e6:6.0f} MB {name:36} {shape[:60]:60} {Path(place).name} {operator}")
    if arguments.keep:
        keep(arguments, figures)


def keep(arguments: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Puts the figures in the place of earlier ones of the same step and tpukit commit."""
    import tpukit
    from tpukit.knowledge.versions import installed_versions
    from tpukit.probe.compiler.client import PARTS

    words = ["git", "describe", "--always"]
    package = Path(tpukit.__file__).parent
    done = subprocess.run(words, cwd=package, capture_output=True, text=True, check=False)
    step = {name: getattr(arguments, name) for name in ("task", "set", "rows", "target", "effort")}
    row = {**step, "commit": done.stdout.strip(), **figures}
    kept = json.loads(RESULT.read_text())["steps"] if RESULT.exists() else []
    same = {*step, "commit"}
    others = [other for other in kept if any(other[name] != row[name] for name in same)]
    found = {"steps": [*others, row], "versions": installed_versions(PARTS)}
    write_result(RESULT, found)


if __name__ == "__main__":
    main()
