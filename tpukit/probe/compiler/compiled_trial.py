"""Trials by the compiler: trace the training step, compile its programs, add up what they need."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tpukit.hardware.memory import is_out_of_memory_text
from tpukit.hardware.options import Precision
from tpukit.io.folders import JsonCache, cache_folder
from tpukit.io.units import GIB
from tpukit.knowledge.versions import installed_versions
from tpukit.probe.compiler import hlo
from tpukit.probe.compiler.client import PARTS
from tpukit.probe.compiler.compile import (
    CompilerRefusedError,
    Program,
    TpuCompiler,
    TracedStep,
    program_key,
    program_text,
)
from tpukit.probe.compiler.source_map import located_operations
from tpukit.probe.targets import Target
from tpukit.probe.trial import (
    Effort,
    Trial,
    TrialRequest,
    compiler_failure,
    memory_by_kind,
    summary_line,
)
from tpukit.train.config import TrainConfig
from tpukit.train.task import Task

SURELY_LESS = 0.9
"""Part of training's memory below which an evaluation is compiled at the fast setting alone (which
reports too little; see `FAST_EFFORT`)."""
LISTED_ALLOCATIONS = 8
FORMAT = 4
"""Version of the fields of `hlo.ProgramCosts` in the cache."""


@dataclass(frozen=True)
class Compiled:
    """A program and what it needs."""

    program: Program
    costs: hlo.ProgramCosts

    @property
    def held(self) -> int:
        """Bytes held while it runs, without any program's code."""
        return self.costs.total - self.costs.code + self.program.resident_elsewhere


class CachedCompiler:
    """Compiles programs for one target; reads costs that were kept."""

    def __init__(self, target: Target, cache: JsonCache) -> None:
        self.target = target
        self.cache = cache
        self.compiles = 0
        """Programs that were not in the cache."""
        self._compiler: TpuCompiler | None = None

    def compile(self, program: Program, effort: Effort) -> Compiled:
        """The program with its costs; raises `CompilerRefusedError` where memory is not why."""
        key = {
            "program": program_key(program),
            "topology": self.target.topology,
            "devices": self.target.devices,
            "versions": {**dict.fromkeys(PARTS), **installed_versions(PARTS)},
            "effort": effort,
        }
        known = self.cache.read(key)
        if known is not None:
            return Compiled(program, hlo.ProgramCosts(**known))
        found = self._costs(program, effort)
        self.cache.write(key, dataclasses.asdict(found))
        return Compiled(program, found)

    def _costs(self, program: Program, effort: Effort) -> hlo.ProgramCosts:
        self._compiler = self._compiler or TpuCompiler(self.target.topology, self.target.devices)
        self.compiles += 1
        try:
            return hlo.costs_of(self._compiler.compile(program, effort), program.kernel_share)
        except CompilerRefusedError as error:
            text = str(error)
            if not is_out_of_memory_text(text):
                raise
            largest = hlo.listed_allocations(text)[:LISTED_ALLOCATIONS]
            if not largest:
                operations = located_operations(program_text(program, places=True))
                largest = hlo.refused_buffer(text, operations)
            return hlo.ProgramCosts(
                refusal=summary_line(text, 1000), largest=[dataclasses.asdict(a) for a in largest]
            )


class CompiledTrials:
    """Runs trials of one task for one target."""

    def __init__(self, task: Task, config: TrainConfig, target: Target) -> None:
        self.task = task
        self.config = config
        self.target = target
        # torch_xla reads its variables when it is imported.
        from tpukit.probe.compiler import trace

        self.tracer = trace
        self.compiler = CachedCompiler(target, JsonCache(cache_folder() / "compiled", FORMAT))

    def run(self, request: TrialRequest) -> Trial:
        """The result of one trial."""
        precision: Precision = "fp32" if self.config.precision == "fp32" else "bf16"
        fused = self.target.has_kernels and self.config.kernels != "off"
        backend = self.tracer.open_tracing(precision, shard=self.config.shard, fused=fused)
        step: TracedStep = self.tracer.trace_step(
            self.task, self.config, backend, request.batch, request.accumulate
        )
        before = self.compiler.compiles
        try:
            training, evaluation = self._compile(step, request)
        except CompilerRefusedError as error:
            raise compiler_failure(request.batch, summary_line(str(error))) from error
        compiles = self.compiler.compiles - before
        trial = Trial(
            batch=request.batch,
            fits=False,
            accumulate=request.accumulate,
            effort=request.effort,
            cached=compiles == 0,
            compiles=compiles,
            parameters=step.parameters,
            devices=self.target.devices,
        )
        refused = next((c for c in (*training, *evaluation) if c.costs.refusal), None)
        if refused:
            return self._refused(trial, step, refused)
        return self._compiled(trial, step, training, evaluation)

    def _compile(
        self, step: TracedStep, request: TrialRequest
    ) -> tuple[list[Compiled], list[Compiled]]:
        """The training programs; at full effort the evaluation program. Up to the first refusal."""
        training: list[Compiled] = []
        for program in step.training:
            training.append(self.compiler.compile(program, request.effort))
            if training[-1].costs.refusal:
                return training, []
        if request.effort == "fast" or not request.evaluate:
            return training, []
        evaluation = self.compiler.compile(step.evaluation, "fast")
        most = max(compiled.held for compiled in training)
        if evaluation.costs.refusal or evaluation.held >= SURELY_LESS * most:
            evaluation = self.compiler.compile(step.evaluation, "full")
        return training, [evaluation]

    def _refused(self, trial: Trial, step: TracedStep, refused: Compiled) -> Trial:
        message = refused.costs.refusal or ""
        requested, limit = hlo.requested_and_limit(message)
        return dataclasses.replace(
            trial,
            used_bytes=(requested or 0) + refused.program.resident_elsewhere or None,
            limit_bytes=limit or self.target.memory_bytes,
            fixed_bytes=sum(step.resident.values()),
            error=message,
            largest=refused.costs.largest,
        )

    def _compiled(
        self, trial: Trial, step: TracedStep, training: list[Compiled], evaluation: list[Compiled]
    ) -> Trial:
        programs = [*training, *evaluation]
        costs = [compiled.costs for compiled in training]
        fullest = max(programs, key=lambda compiled: compiled.held)
        # The programs of a run stay on the device together.
        code = sum(compiled.costs.code for compiled in programs)
        used, limit = fullest.held + code, self.target.memory_bytes
        error = None
        if used > limit:
            error = f"all programs together need {used / GIB:.2f} of {limit / GIB:.2f} GiB"
        steps = trial.accumulate
        trial = dataclasses.replace(
            trial,
            fits=error is None,
            used_bytes=used,
            limit_bytes=limit,
            fixed_bytes=sum(step.resident.values()) + code,
            error=error,
            memory=memory_by_kind(used, code, step.resident),
            bytes_accessed=_over_step([r.bytes_accessed for r in costs], steps),
            largest=fullest.costs.largest,
            unread=any(r.unread for r in costs),
        )
        if trial.unread:
            return trial
        collectives = sum((Counter(r.collectives) for r in costs), Counter())
        return dataclasses.replace(
            trial,
            flops=_over_step([r.flops for r in costs], steps),
            kernel_flops=_over_step([r.kernel_flops for r in costs], steps),
            collectives=dict(sorted(collectives.items())),
            collective_bytes=int(_over_step([r.collective_bytes for r in costs], steps)),
        )


def _over_step(values: Sequence[float], accumulate: int) -> float:
    """Sum over the programs of one optimizer step; of several the first runs once a micro-batch."""
    if len(values) == 1:
        return values[0]
    return values[0] * accumulate + sum(values[1:])
