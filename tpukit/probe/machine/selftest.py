"""The parts of the self-test, each run by a child process with a time limit. Imports no torch."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpukit.hardware.launch.child import Child, ChildDiedError
from tpukit.hardware.launch.holders import BUSY, PAUSES
from tpukit.hardware.options import HardwareOptions, Kind
from tpukit.hardware.select import find_kind
from tpukit.io.units import format_duration
from tpukit.probe.machine.facts import Facts
from tpukit.probe.machine.live import CHILD, ENVIRONMENT, reason_of, verdict_of
from tpukit.probe.machine.verdict import CheckOptions, Result, failed, skipped
from tpukit.registry.declared import ClassSource, find_source, registered

SELFTEST_SECONDS = 600.0
"""Default time limit of the whole self-test."""
STEPS, KILLED_AT = 20, 17
FIX = "Send the report: docs/first_tpu.md says where."


@dataclass(frozen=True)
class TimedResult(Result):
    """A part's result, how long it took, and what it measured."""

    seconds: float = 0.0
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "seconds": self.seconds, "values": dict(self.values)}


class Bench(AbstractContextManager["Bench"]):
    """The child processes of the self-test: one a device at a time, as a TPU has one owner."""

    def __init__(self, hw: str, kind: Kind, folder: Path) -> None:
        self.hw = hw
        self.kind = kind
        self.folder = folder
        self.deadline = 0.0
        """End of the present part's time, by `time.monotonic`."""
        self._children: dict[str, Child] = {}

    def run(self, where: str, part: str, **arguments: Any) -> dict[str, Any]:
        """The result of a part, run in a child: `device` and `sharded` open the device, `cpu` the
        CPU, `host` none.

        A busy device is tried again in a new process. Raises ChildDiedError where a child dies or
        sends no result in time.
        """
        for pause in PAUSES:
            answer = self._run_once(where, part, arguments)
            if not BUSY.search(answer.get("error", "")) or pause >= self.seconds_left:
                return answer
            self.close(where)
            time.sleep(pause)
        return self._run_once(where, part, arguments)

    def _run_once(self, where: str, part: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if where != "cpu":
            for other in {"device", "sharded"} - {where}:
                self.close(other)
        if where not in self._children:
            kind = "device" if where == "cpu" else where
            hw = "cpu" if where == "cpu" else self.hw
            self._children[where] = Child(ENVIRONMENT, (*CHILD, kind, hw))
        self._children[where].send({"part": part, **arguments})
        try:
            return self._children[where].receive(self.deadline)
        except ChildDiedError:
            self._children.pop(where).close()
            raise

    @property
    def seconds_left(self) -> float:
        """Seconds left for the running part."""
        return self.deadline - time.monotonic()

    def close(self, where: str) -> None:
        """Ends a child: the device is free for another one."""
        if child := self._children.pop(where, None):
            child.finish()

    def __exit__(self, *_: object) -> None:
        for where in [*self._children]:
            self.close(where)


@dataclass(frozen=True)
class Part:
    """One part of the self-test."""

    id: str
    label: str
    seconds: float
    """Time limit, at most what is left of the whole; a longer limit of the whole stretches it."""
    run: Callable[[Bench], dict[str, Any]]
    kinds: tuple[Kind, ...] = ("tpu", "gpu", "cpu")
    """Hardware to which the part applies."""


def _device(part: str) -> Callable[[Bench], dict[str, Any]]:
    return lambda bench: bench.run("device", part)


def _declared(attribute: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The installed tasks that declare something for the self-test, with what it is."""
    for task in registered():
        source = find_source(task)
        if source is not None and (found := source.member(attribute)):
            yield task, found


_SETTINGS = dict(_declared("selftest"))
OF_TASKS = {
    part: (task, {**_SETTINGS.get(task, {}), **given} if isinstance(given, Mapping) else given)
    for task, found in _declared("selftest_parts")
    for part, given in found.items()
}
"""Part -> the task that declares it, with its settings or the class that it gives for it."""


def _own(part: str, task: str, source: ClassSource) -> Part:
    return Part(
        part, source.doc.removesuffix("."), source.member("seconds"),
        lambda bench: bench.run("device", "own", task=task, name=part),
    )  # fmt: skip


def _with_task(id: str, part: str, **further: Any) -> Callable[[Bench], dict[str, Any]]:
    """A part of the host, with the task that is declared for it."""
    task, settings = OF_TASKS[id]
    return lambda bench: bench.run("host", part, task=task, settings=settings, **further)


def _step(task: str, settings: Mapping[str, Any]) -> Part:
    return Part(
        f"step-{task}", f"A step of {task} in fp32 against the CPU's", 120,
        _compared_step("device", task, settings), ("tpu", "gpu"),
    )  # fmt: skip


def _compared_step(
    where: str, task: str, settings: Mapping[str, Any]
) -> Callable[[Bench], dict[str, Any]]:
    def run(bench: Bench) -> dict[str, Any]:
        folder = bench.folder / f"step-{where}-{task}"
        folder.mkdir()
        question = {"task": task, "settings": settings, "folder": str(folder)}
        answer = bench.run(where, "step", **question)
        return answer if "error" in answer else bench.run("cpu", "step", **question)

    return run


def _out_of_memory(bench: Bench) -> dict[str, Any]:
    """In a process of its own, which may die of it as a trial of the batch search does."""
    bench.close("device")
    try:
        return bench.run("device", "out_of_memory")
    except ChildDiedError as error:
        if error.death.return_code is None or not error.death.is_out_of_memory(limited=False):
            raise
        return {"message": f"recognised: the process {error.death.describe()}", "values": {}}
    finally:
        bench.close("device")


def _train(bench: Bench) -> dict[str, Any]:
    """The run that nothing interrupts; more compilations than at first are a failure."""
    folder = str(bench.folder / "whole")
    answer = bench.run("device", "train", folder=folder, steps=STEPS, kill_at=0)
    if "error" not in answer and answer["values"]["compilations_after_warmup"]:
        return {**answer, "error": answer["message"], "fix": FIX}
    return answer


def _resume(bench: Bench) -> dict[str, Any]:
    """The same run, killed and resumed in other processes, ends in the same bytes."""
    folder = bench.folder / "killed"
    bench.close("device")
    question = {"folder": str(folder), "steps": STEPS}
    try:
        answer = bench.run("device", "train", **question, kill_at=KILLED_AT)
        return {"error": answer.get("error", "the run was not killed"), "fix": FIX}
    except ChildDiedError as error:
        if error.death.return_code != -9:
            raise
    answer = bench.run("device", "train", **question, kill_at=0)
    if "error" in answer:
        return answer
    resumed = answer["values"]["resumed_from"]
    whole, files = _last(bench.folder / "whole"), sorted(_last(folder).glob("*.safetensors"))
    other = [file.name for file in files if file.read_bytes() != (whole / file.name).read_bytes()]
    if other or not resumed:
        text = f"{', '.join(other)} differ" if other else "it started anew"
        return {"error": f"resumed at step {resumed}: {text}", "fix": FIX}
    text = f"killed after step {KILLED_AT}, resumed at step {resumed}: the same bytes"
    return {"message": text, "values": {"resumed_from": resumed}}


def _last(folder: Path) -> Path:
    return folder / "checkpoints" / f"step-{STEPS:08d}"


PARTS = (
    Part("kernels", "Attention kernels against plain operations", 250,
         lambda bench: bench.run("host", "kernels", seconds=bench.seconds_left - 10), ("tpu",)),
    Part("devices", "The devices open, and say their memory", 120, _device("devices")),
    Part("products", "A matrix product in fp32 and bf16 agrees with float64", 60,
         _device("products")),
    *(_step(task, settings) for task, settings in _SETTINGS.items()),
    *(_own(part, task, given) for part, (task, given) in OF_TASKS.items()
      if isinstance(given, ClassSource)),
    Part("train", f"{STEPS} steps compile each program once", 120, _train),
    Part("resume", "A killed run resumes to the same bytes", 180, _resume),
    Part("shard", "A step with --shard against the CPU's", 120,
         _compared_step("sharded", *OF_TASKS["shard"]), ("tpu",)),
    Part("out-of-memory", "Running out of memory is recognised", 60, _out_of_memory),
    Part("reopen", "A search goes on after a trial that was killed", 180,
         lambda bench: bench.run("host", "reopen"), ("tpu", "gpu")),
    Part("prediction", "Memory and time of a step beside their prediction", 240,
         _with_task("prediction", "prediction", batch=8), ("tpu", "gpu")),
    Part("largest-batch", "The largest predicted batch fits, and the next does not", 600,
         _with_task("largest-batch", "largest"), ("tpu", "gpu")),
)  # fmt: skip


def run_selftest(
    facts: Facts, options: CheckOptions, log: Callable[[str], None], parts: tuple[Part, ...] = PARTS
) -> Iterator[TimedResult]:
    """Every part's result, as it comes; `log` gets the running part and the time that is left.

    Raises HardwareError where the requested hardware is not here.
    """
    kind = find_kind(HardwareOptions(hw=options.hw), facts)
    ends = time.monotonic() + options.live_seconds
    stretch = max(1.0, options.live_seconds / SELFTEST_SECONDS)
    with (
        tempfile.TemporaryDirectory(prefix="tpukit-selftest-") as folder,
        Bench(options.hw, kind, Path(folder)) as bench,
    ):
        for number, part in enumerate(parts, 1):
            left = ends - time.monotonic()
            limit = min(part.seconds * stretch, left)
            log(
                f"{number}/{len(parts)} {part.label} (at most {format_duration(max(limit, 0))};"
                f" {format_duration(max(left, 0))} left in all)"
            )
            result = _run(part, bench, limit)
            log(f"    {result.verdict.status}: {result.verdict.message}")
            yield result


def _run(part: Part, bench: Bench, limit: float) -> TimedResult:
    started = time.monotonic()
    values: Mapping[str, Any] = {}
    if bench.kind not in part.kinds:
        verdict = skipped(f"nothing to test on this hardware ({bench.kind})")
    elif limit < 1:
        verdict = skipped("no time was left: give it more (--time-limit)")
    else:
        bench.deadline = started + limit
        try:
            answer = part.run(bench)
            verdict, values = verdict_of(answer, FIX), answer.get("values", {})
        except ChildDiedError as error:
            verdict = failed(reason_of(error.death, limit), FIX)
    seconds = round(time.monotonic() - started, 1)
    return TimedResult(part.id, part.label, verdict, seconds, values)
