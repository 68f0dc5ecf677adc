"""Trials without the GPU: a traced step, what a GPU adds to it, and whether all of it fits."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tpukit.io.units import GIB
from tpukit.probe.gpu_memory.allocator import Usage, replay
from tpukit.probe.gpu_memory.recorder import MATMULS, Storage, Trace
from tpukit.probe.gpu_memory.traced_step import trace_fake_step
from tpukit.probe.targets import GpuTarget
from tpukit.probe.trial import Trial, TrialRequest
from tpukit.train.config import TrainConfig
from tpukit.train.task import Task

MIB = 2**20
CUBLAS_BYTES, CUBLAS_HOPPER_BYTES = 8519680, 32 * MIB
"""cuBLAS' workspace of a thread: the forward's and the backward's have one each."""
CUDNN_BYTES = 256 * MIB
"""Largest workspace of a convolution that is expected; cuDNN's benchmark may choose more."""
NCCL_BYTES = (180 * MIB, 420 * MIB)
"""Least and most that a communicator of NCCL and its streams take beside the allocator."""
UNPREDICTED = 0.05
"""Part of the reserved memory by which real runs may exceed the prediction. Public measurements
with a torch that does the same lie at most 3 % above it (docs/results.md)."""
AGREE = 0.002
"""Relative difference below which an extrapolated trace is as good as a traced one."""
LISTED, LISTED_MODULES = 8, 12
RESIDENT = ("parameters", "optimizer", "ema")
KINDS = (*RESIDENT, "gradients", "buckets", "gathered", "batch", "casts", "activations",
         "temporaries", "workspaces")  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """A batch's storages and events with the workspaces of CUDA's libraries."""

    sizes: Sequence[int]
    events: Sequence[int]
    storages: Sequence[Storage]
    start: int
    """Number of events before the step."""
    trace: Trace
    expandable: bool = False
    """Whether the allocator's segments can grow."""

    def replay(self, room: int | None = None) -> tuple[Usage, bool]:
        """What the allocator does in two steps: an optimizer's state is born after the first one,
        where there is room between the blocks that it left."""
        before, step = self.events[: self.start], self.events[self.start :]
        alive, born = alive_after(before), set(step)
        state = [index for index in alive if self.storages[index].kind == "optimizer"]
        for index in state:
            del alive[index]
        first = [event for event in step if max(event, ~event) in born]
        left = [~index for index in alive_after(first)]
        return replay(
            self.sizes,
            [*alive, *first, *left, *state, *step],
            room,
            expandable=self.expandable,
        )


class TracedTrials:
    """Runs trials of one task for GPUs of one kind.

    Two traced batches whose operators are the same give every other one: each storage's size is a
    line in the batch. A third trace, where it agrees, makes later answers as good as traced ones.
    """

    def __init__(
        self, task: Task, config: TrainConfig, target: GpuTarget, *, expandable: bool = False
    ) -> None:
        """expandable: predict the allocator with `expandable_segments`."""
        self.task, self.config, self.target = task, config, target
        self.expandable = expandable
        self._steps: dict[tuple[int, int], Trace] = {}
        self._checked = False

    def run(self, request: TrialRequest) -> Trial:
        """The result of one trial."""
        batch, accumulate = request.batch, request.accumulate
        found = self._extrapolated(batch, accumulate)
        if found is None or (request.effort == "full" and not self._checked):
            traced = self._predicted(self._traced(batch, accumulate))
            if found is not None:
                both = [p.replay()[0].most_reserved for p in (found, traced)]
                self._checked = abs(both[0] - both[1]) <= AGREE * both[1]
            found = traced
        return self._trial(request, found)

    def _traced(self, batch: int, accumulate: int) -> Trace:
        key = batch, accumulate
        if key not in self._steps:
            self._steps[key] = trace_fake_step(self.task, self.config, self.target, *key)
        return self._steps[key]

    def _extrapolated(self, batch: int, accumulate: int) -> Predicted | None:
        """The batch by the line through the two traced ones that are farthest apart."""
        known = sorted(b for b, n in self._steps if n == accumulate)
        if batch in known:
            return self._predicted(self._steps[batch, accumulate])
        if len(known) < 2:
            return None
        low, high = known[0], known[-1]
        first, last = (self._steps[b, accumulate] for b in (low, high))
        if first.events != last.events:
            return None
        return self._predicted(_on_line(first, last, (batch - low) / (high - low)))

    def _predicted(self, trace: Trace) -> Predicted:
        found = with_workspaces(trace, self.target)
        return dataclasses.replace(found, expandable=self.expandable)

    def _trial(self, request: TrialRequest, found: Predicted) -> Trial:
        target, trace = self.target, found.trace
        context = sum(target.context_bytes) // 2
        nccl = NCCL_BYTES if target.devices > 1 else (0, 0)
        beside = context + sum(nccl) // 2
        free, _ = found.replay()
        room = target.memory_bytes - beside
        # Where cached segments are released in time, less is reserved.
        packed, fits = found.replay(room) if free.most_reserved > room else (free, True)
        reserved = (packed if fits else free).most_reserved
        used = reserved + beside
        most = int(min(free.most_reserved, room if fits else sys.maxsize) * (1 + UNPREDICTED))
        alive = alive_at_peak(found)
        memory = _by_kind(found, alive)
        memory |= {"allocator": max(0, reserved - sum(memory.values())), "nccl": sum(nccl) // 2,
                   "context": context}  # fmt: skip
        error = None
        if not fits:
            error = f"needs {used / GIB:.2f} of {target.memory_bytes / GIB:.2f} GiB"
        return Trial(
            batch=request.batch,
            fits=fits,
            used_bytes=used,
            limit_bytes=target.memory_bytes,
            fixed_bytes=sum(memory[kind] for kind in RESIDENT if kind in memory) + beside,
            error=error,
            accumulate=request.accumulate,
            memory=memory,
            used_range=(free.most_allocated + target.context_bytes[0] + nccl[0],
                        most + target.context_bytes[1] + nccl[1]),
            allocated_bytes=free.most_allocated,
            flops=trace.flops,
            bytes_accessed=trace.bytes_accessed,
            collectives={"all-reduce": 1} if trace.reduced_bytes else {},
            collective_bytes=trace.reduced_bytes,
            largest=_largest(found, alive),
            modules=_by_module(found, alive),
            effort=request.effort,
            parameters=trace.parameters,
            devices=target.devices,
        )  # fmt: skip


def with_workspaces(trace: Trace, target: GpuTarget) -> Predicted:
    """The trace with what cuBLAS keeps and what a convolution of cuDNN takes while it runs."""
    storages, events = list(trace.storages), list(trace.events)
    sizes = [storage.size_bytes for storage in storages]
    for place, operands in sorted(trace.workspaces.items(), reverse=True):
        index = len(sizes)
        sizes.append(min(CUDNN_BYTES, operands))
        storages.append(_workspace("cudnn", sizes[-1]))
        events[place:place] = [index, ~index]
    start = trace.marks["step"]
    if MATMULS & trace.operators:
        size = CUBLAS_HOPPER_BYTES if int(target.capability) == 9 else CUBLAS_BYTES
        for _ in range(2):
            events.insert(start, len(sizes))
            sizes.append(size)
            storages.append(_workspace("cublas", size))
    return Predicted(sizes, events, storages, start, trace)


def _workspace(library: str, size: int) -> Storage:
    return Storage(size, "workspaces", library, "uint8", (size,), "", None)


def _on_line(first: Trace, last: Trace, share: float) -> Trace:
    """The trace at `first + share * (last - first)`, where each size is a line."""

    def between(a: float, b: float) -> float:
        return a + share * (b - a)

    pairs = zip(first.storages, last.storages, strict=True)
    return dataclasses.replace(
        first,
        storages=[
            dataclasses.replace(
                b,
                size_bytes=max(1, round(between(a.size_bytes, b.size_bytes))),
                shape=tuple(round(between(*pair)) for pair in zip(a.shape, b.shape, strict=True)),
            )
            if a.size_bytes != b.size_bytes
            else b
            for a, b in pairs
        ],
        flops=between(first.flops, last.flops),
        bytes_accessed=between(first.bytes_accessed, last.bytes_accessed),
        workspaces={
            place: round(between(size, last.workspaces[place]))
            for place, size in first.workspaces.items()
        },
    )


def alive_at_peak(found: Predicted) -> list[int]:
    """The storages that live at the moment when their sizes add up to most."""
    sizes = found.sizes
    totals = [*accumulate(sizes[e] if e >= 0 else -sizes[~e] for e in found.events)]
    return list(alive_after(found.events[: totals.index(max(totals)) + 1]))


def alive_after(events: Iterable[int]) -> dict[int, None]:
    """The storages that these events leave alive, in the order of their births."""
    alive: dict[int, None] = {}
    for event in events:
        if event >= 0:
            alive[event] = None
        else:
            alive.pop(~event, None)
    return alive


def _by_kind(found: Predicted, alive: Sequence[int]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for index in alive:
        sums[found.storages[index].kind] += found.sizes[index]
    return {kind: sums[kind] for kind in KINDS}


def _by_module(found: Predicted, alive: Sequence[int]) -> dict[str, int]:
    """Bytes of activations at the peak by the module that made them, layers together."""
    sums: Counter[str] = Counter()
    for index in alive:
        storage = found.storages[index]
        if storage.kind in ("activations", "casts"):
            sums[storage.module] += found.sizes[index]
    return dict(sums.most_common(LISTED_MODULES))


def _largest(found: Predicted, alive: Sequence[int]) -> list[Mapping[str, Any]]:
    ordered = sorted(alive, key=lambda index: -found.sizes[index])[:LISTED]
    return [
        {
            "size_bytes": found.sizes[index],
            "shape": f"{storage.dtype}[{','.join(map(str, storage.shape))}]",
            "operator": storage.operator or storage.kind,
            "module": storage.module,
            "place": storage.place,
        }
        for index in ordered
        for storage in [found.storages[index]]
    ]
