"""Inside the child: traces the engine's step, compiles its programs, adds up what they need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tpukit.hardware.out_of_memory import is_out_of_memory_text
from tpukit.io.units import GIB
from tpukit.probe.batch.trial import MemoryByKind, StepCost, Trial, first_line, wanted_and_limit
from tpukit.probe.compiler import hlo
from tpukit.probe.compiler.compile import (
    CompiledProgram,
    CompilerRefusedError,
    Effort,
    Program,
    TpuCompiler,
    installed_versions,
    program_key,
)
from tpukit.probe.compiler.report_cache import AnswerCache, cache_folder
from tpukit.probe.compiler.targets import Target
from tpukit.probe.compiler.trace import TracedStep, open_tracing, trace_step
from tpukit.train.config import TrainConfig
from tpukit.train.task import Task

SURELY_LESS = 0.9
"""The fast setting reads up to 0.2 GiB low; an evaluation this much under training is no matter."""


@dataclass(frozen=True)
class CompileRequest:
    """One batch to ask the compiler about."""

    rows: int
    """Samples a device and micro-step."""
    accumulate: int
    effort: Effort
    """At full effort the evaluation program is compiled too, and held together with training's."""


@dataclass(frozen=True)
class ProgramReport:
    """What is kept of one compiled program: all that JSON can hold."""

    total: int = 0
    temporaries: int = 0
    code: int = 0
    flops: float = 0.0
    kernel_flops: float = 0.0
    bytes_accessed: float = 0.0
    collectives: Mapping[str, int] = field(default_factory=dict)
    collective_bytes: int = 0
    largest: Sequence[Mapping[str, Any]] = ()
    refusal: str | None = None
    """The compiler's words where it would not."""


class RefusedForAnotherReasonError(Exception):
    """The compiler refused, and not for lack of memory."""


class Compilations:
    """Compiles programs for one target, or finds what was said of them before."""

    def __init__(self, target: Target, cache: AnswerCache) -> None:
        self.target = target
        self.cache = cache
        self.compiled = 0
        self._compiler: TpuCompiler | None = None

    def report(self, program: Program, effort: Effort) -> ProgramReport:
        """What the compiler says of it."""
        parts = {
            "program": program_key(program),
            "topology": self.target.topology,
            "devices": self.target.devices,
            "versions": installed_versions(),
            "effort": effort,
        }
        known = self.cache.read(parts)
        if known is not None:
            return ProgramReport(**known)
        report = self._compile(program, effort)
        self.cache.write(parts, dataclasses.asdict(report))
        return report

    def _compile(self, program: Program, effort: Effort) -> ProgramReport:
        self._compiler = self._compiler or TpuCompiler(self.target.topology, self.target.devices)
        self.compiled += 1
        try:
            compiled = self._compiler.compile(program, effort)
            return _report(compiled, program.kernel_share)
        except CompilerRefusedError as error:
            text = str(error)
            if not is_out_of_memory_text(text):
                raise RefusedForAnotherReasonError(first_line(text)) from error
            largest = [_shown(a) for a in hlo.refused_allocations(text)[:8]]
            return ProgramReport(refusal=first_line(text, 1000), largest=largest)


def _report(compiled: CompiledProgram, kernel_share: float) -> ProgramReport:
    kernels = hlo.kernel_flops(compiled.hlo) * kernel_share
    return ProgramReport(
        total=compiled.total,
        temporaries=compiled.temporaries,
        code=compiled.code,
        flops=compiled.flops + kernels,
        kernel_flops=kernels,
        bytes_accessed=compiled.bytes_accessed,
        collectives=hlo.collectives(compiled.hlo),
        collective_bytes=hlo.collective_bytes(compiled.hlo),
        largest=[_shown(allocation) for allocation in hlo.largest_buffers(compiled.hlo)],
    )


def _shown(allocation: hlo.Allocation) -> dict[str, Any]:
    place = f"{allocation.place.path}:{allocation.place.line}" if allocation.place else None
    return {
        "size_bytes": allocation.size_bytes,
        "shape": allocation.shape,
        "operator": allocation.operator,
        "place": place,
    }


class CompiledTrials:
    """Answers for one task on one target; lives in the child."""

    def __init__(self, task: Task, config: TrainConfig, target: Target) -> None:
        self.task = task
        self.config = config
        self.target = target
        self.compilations = Compilations(target, AnswerCache(cache_folder()))

    def run(self, request: CompileRequest) -> tuple[Trial, int]:
        """The trial, and the model's number of parameters."""
        precision = "fp32" if self.config.precision == "fp32" else "bf16"
        fused = self.target.has_kernels
        backend = open_tracing(cast("Any", precision), shard=self.config.shard, fused=fused)
        traced = trace_step(self.task, self.config, backend, request.rows, request.accumulate)
        before = self.compilations.compiled
        programs, reports = self._reports(traced, request.effort)
        compiles = self.compilations.compiled - before
        trial = self._trial(request, traced, programs, reports, compiles)
        return trial, traced.parameters

    def _reports(
        self, traced: TracedStep, effort: Effort
    ) -> tuple[list[Program], list[ProgramReport]]:
        """The step's programs and what was said of each, up to the first that was refused."""
        programs: list[Program] = []
        reports: list[ProgramReport] = []
        for program in traced.training:
            programs.append(program)
            reports.append(self.compilations.report(program, effort))
            if reports[-1].refusal is not None:
                return programs, reports
        if effort == "full":
            most = max(_held(p, r) for p, r in zip(programs, reports, strict=True))
            programs.append(traced.evaluation)
            reports.append(self._evaluation_report(traced.evaluation, most))
        return programs, reports

    def _evaluation_report(self, program: Program, most: int) -> ProgramReport:
        """Quickly, unless it comes near what training holds: then as carefully."""
        report = self.compilations.report(program, "fast")
        if report.refusal is None and _held(program, report) < SURELY_LESS * most:
            return report
        return self.compilations.report(program, "full")

    def _trial(
        self,
        request: CompileRequest,
        traced: TracedStep,
        programs: Sequence[Program],
        reports: Sequence[ProgramReport],
        compiles: int,
    ) -> Trial:
        resident = traced.training[-1].resident
        code = sum(report.code for report in reports)
        held = [_held(p, r) for p, r in zip(programs, reports, strict=True)]
        used, limit = max(held) + code, self.target.memory_bytes
        refusal, elsewhere = reports[-1].refusal, programs[len(reports) - 1].resident_elsewhere
        error = refusal
        if refusal is not None:
            wanted, stated = wanted_and_limit(refusal)
            used, limit = (wanted or 0) + elsewhere, stated or limit
        elif used > limit:
            error = f"all that is held together needs {used / GIB:.2f} of {limit / GIB:.2f} GiB"
        fullest = reports[-1] if refusal else reports[held.index(max(held))]
        kinds = {"parameters", "optimizer", "ema"}
        return Trial(
            batch=request.rows,
            fits=error is None,
            used_bytes=used or None,
            limit_bytes=limit,
            fixed_bytes=sum(resident.values()) + code,
            error=error,
            accumulate=request.accumulate,
            memory=None
            if refusal
            else MemoryByKind(
                **{kind: resident.get(kind, 0) for kind in kinds},
                temporaries=used - code - sum(resident.get(kind, 0) for kind in kinds),
                program=code,
            ),
            cost=None if refusal else _cost(request, reports),
            collectives=_added(reports[: len(traced.training)]),
            collective_bytes=_step_sum(request, [r.collective_bytes for r in reports]),
            largest=tuple(fullest.largest),
            effort=request.effort,
            cached=compiles == 0,
            compiles=compiles,
        )


def _held(program: Program, report: ProgramReport) -> int:
    """Bytes that are held while a program runs, without any program's code."""
    return report.total - report.code + program.resident_elsewhere


def _step_sum(request: CompileRequest, values: Sequence[float]) -> Any:
    """Over the programs of one step, micro-steps counted as often as they run."""
    if request.accumulate == 1:
        return values[0]
    return values[0] * request.accumulate + (values[1] if len(values) > 1 else 0)


def _cost(request: CompileRequest, reports: Sequence[ProgramReport]) -> StepCost:
    return StepCost(
        flops=_step_sum(request, [r.flops for r in reports]),
        bytes_accessed=_step_sum(request, [r.bytes_accessed for r in reports]),
        kernel_flops=_step_sum(request, [r.kernel_flops for r in reports]),
    )


def _added(reports: Sequence[ProgramReport]) -> dict[str, int]:
    names = {name for report in reports for name in report.collectives}
    return {name: sum(r.collectives.get(name, 0) for r in reports) for name in sorted(names)}
