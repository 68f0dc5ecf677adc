"""Trials without the GPU: a traced step, what a GPU adds to it, and whether all of it fits."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tpukit.io.units import GIB
from tpukit.probe.gpu_memory.allocator import MIB, Usage, replay
from tpukit.probe.gpu_memory.recorder import Storage, Trace, alive_after
from tpukit.probe.gpu_memory.traced_step import trace_fake_step
from tpukit.probe.targets import GpuTarget
from tpukit.probe.trial import Trial, TrialRequest
from tpukit.train.config import TrainConfig
from tpukit.train.task import Task

NCCL_BYTES = (180 * MIB, 420 * MIB)
"""Least and most that a communicator of NCCL and its streams take beside the allocator."""
UNPREDICTED = 0.05
"""Part of the reserved memory by which real runs may exceed the prediction. Public measurements
with a torch that does the same lie at most 3 % above it (docs/lab/results.md)."""
AGREE = 0.002
"""Relative difference below which an extrapolated trace is as good as a traced one."""
LISTED, LISTED_MODULES = 8, 12
RESIDENT = ("parameters", "optimizer", "ema")
KINDS = (*RESIDENT, "gradients", "buckets", "gathered", "batch", "casts", "activations",
         "temporaries", "workspaces")  # fmt: skip


class TracedTrials:
    """Runs trials of one task for GPUs of one kind.

    Two traced batches with the same operators give every other one beside them: each storage's size
    is a line in the batch. A further trace that agrees makes such answers as good as traced ones.
    """

    def __init__(
        self, task: Task, config: TrainConfig, target: GpuTarget, *, expandable: bool = False,
        **how: Any,
    ) -> None:  # fmt: skip
        """expandable: predict the allocator with `expandable_segments`.
        how: further arguments of `trace_fake_step`."""
        self.task, self.config, self.target = task, config, target
        self.expandable, self.how = expandable, how
        self._steps: dict[tuple[int, int], Trace] = {}
        self._checked: list[int] = []
        """Events of traces whose line was checked."""

    def run(self, request: TrialRequest) -> Trial:
        """The result of one trial."""
        key = request.batch, request.accumulate
        traced = self._steps.get(key)
        found = traced or self._extrapolated(*key)
        if found is None or (request.effort == "full" and found.events != self._checked):
            if traced is None:
                traced = trace_fake_step(self.task, self.config, self.target, *key, **self.how)
                self._steps[key] = traced
            if found is not None:
                both = [self._replay(trace)[0].most_reserved for trace in (found, traced)]
                if abs(both[0] - both[1]) <= AGREE * both[1]:
                    self._checked = found.events
            found = traced
        return self._trial(request, found)

    def _extrapolated(self, batch: int, accumulate: int) -> Trace | None:
        """The batch by the line through traced ones, the farthest apart of those with the events of
        its neighbours; None where these differ: a model may cut a batch into parts by its size."""
        known = {b: trace for (b, n), trace in sorted(self._steps.items()) if n == accumulate}
        near = [*[b for b in known if b < batch][-1:], *[b for b in known if b > batch][:1]]
        same = [b for b in known if all(known[b].events == known[n].events for n in near)]
        if len(same) < 2:
            return None
        low, high = same[0], same[-1]
        return _on_line(known[low], known[high], (batch - low) / (high - low))

    def _replay(self, trace: Trace, room: int | None = None) -> tuple[Usage, bool]:
        """What the allocator does in two steps: an optimizer's state is born after the first one,
        where there is room between the blocks that it left."""
        start = trace.marks["step"]
        before, step = trace.events[:start], trace.events[start:]
        alive, born = alive_after(before), set(step)
        state = [index for index in alive if trace.storages[index].kind == "optimizer"]
        for index in state:
            del alive[index]
        first = [event for event in step if max(event, ~event) in born]
        left = [~index for index in alive_after(first)]
        events = [*alive, *first, *left, *state, *step]
        return replay(trace.sizes, events, room, expandable=self.expandable)

    def _trial(self, request: TrialRequest, trace: Trace) -> Trial:
        target = self.target
        context = sum(target.context_bytes) // 2
        nccl = NCCL_BYTES if target.devices > 1 else (0, 0)
        beside = context + sum(nccl) // 2
        free, _ = self._replay(trace)
        room = target.memory_bytes - beside
        # Where cached segments are released in time, less is reserved.
        packed, fits = self._replay(trace, room) if free.most_reserved > room else (free, True)
        reserved = (packed if fits else free).most_reserved
        used = reserved + beside
        most = int(min(free.most_reserved, room if fits else sys.maxsize) * (1 + UNPREDICTED))
        sizes = trace.sizes
        alive = [(trace.storages[index], sizes[index]) for index in trace.alive_at_peak()]
        sums, modules = Counter[str](), Counter[str]()
        for storage, size in alive:
            sums[storage.kind] += size
            if storage.kind in ("activations", "casts"):
                modules[storage.module] += size
        memory = {kind: sums[kind] for kind in KINDS}
        memory |= {"allocator": max(0, reserved - sum(memory.values())), "nccl": sum(nccl) // 2,
                   "context": context}  # fmt: skip
        too_much = f"needs {used / GIB:.2f} of {target.memory_bytes / GIB:.2f} GiB"
        return Trial(
            batch=request.batch,
            fits=fits,
            used_bytes=used,
            limit_bytes=target.memory_bytes,
            fixed_bytes=sum(memory[kind] for kind in RESIDENT) + beside,
            error=None if fits else too_much,
            accumulate=request.accumulate,
            memory=memory,
            used_range=(free.most_allocated + target.context_bytes[0] + nccl[0],
                        most + target.context_bytes[1] + nccl[1]),
            allocated_bytes=free.most_allocated,
            flops=trace.flops,
            bytes_accessed=trace.bytes_accessed,
            collectives={"all-reduce": 1} if trace.reduced_bytes else {},
            collective_bytes=trace.reduced_bytes,
            largest=_largest(alive),
            modules=dict(modules.most_common(LISTED_MODULES)),
            effort=request.effort,
            parameters=trace.parameters,
            devices=target.devices,
        )  # fmt: skip


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
    )


def _largest(alive: Iterable[tuple[Storage, int]]) -> list[Mapping[str, Any]]:
    return [
        {
            "size_bytes": size,
            "shape": f"{storage.dtype}[{','.join(map(str, storage.shape))}]",
            "operator": storage.operator or storage.kind,
            "module": storage.module,
            "place": storage.place,
        }
        for storage, size in sorted(alive, key=lambda pair: -pair[1])[:LISTED]
    ]
