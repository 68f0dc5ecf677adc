"""An evaluator whose memory and speed are formulas."""

from typing import ClassVar

from tpukit.io.units import GIB
from tpukit.probe.batch.recommend import Recommender
from tpukit.probe.batch.search import SearchSettings
from tpukit.probe.targets import GpuTarget, find_any
from tpukit.probe.trial import Trial, TrialRequest, memory_by_kind


class Simulated:
    """An evaluator with memory `fixed + per_row * batch`, `more` at the compiler's full effort.

    `used`: the memory of a request in GiB, instead. Above `slow_above` rows no trial ends in time.
    """

    versions: ClassVar[dict[str, str]] = {}
    on_cpu = by_speed = False

    def __init__(
        self, per_row=0.5, fixed=1.0, target=None, speed=None, devices=1, more=0.0, work=1.0,
        used=None, slow_above=10**9,
    ):  # fmt: skip
        self.per_row, self.fixed, self.more, self.work = per_row, fixed, more, work
        self.target = find_any(target) if target else None
        if isinstance(self.target, GpuTarget):
            self.target = self.target.at("fp16")
        self.devices = self.target.devices if self.target else devices
        self.speed, self.used, self.slow_above = speed, used or self.linear, slow_above
        self.requests: list[TrialRequest] = []

    def evaluate(self, request: TrialRequest) -> Trial:
        return self.trial(request)

    def linear(self, request: TrialRequest) -> float:
        used = self.fixed + self.per_row * request.batch + 0.5 * (request.accumulate > 1)
        return used + self.more * (request.effort == "full")

    def trial(self, request: TrialRequest) -> Trial:
        self.requests.append(request)
        if request.batch > self.slow_above:
            return Trial(request.batch, False, error="no result within 30m", slow=True)
        used = self.used(request)
        fits = used <= 16
        return Trial(
            request.batch,
            fits,
            int(used * GIB),
            16 * GIB,
            int(self.fixed * GIB),
            samples_per_second=self.speed(request.batch) if self.speed and fits else None,
            accumulate=request.accumulate,
            memory=memory_by_kind(int(used * GIB), 0, {}) if fits else None,
            flops=1e12 * self.work * request.batch if self.target and fits else None,
            bytes_accessed=1e9 if self.target and fits else None,
            effort=request.effort if self.target else None,
            compiles=1,
        )


def recommend(evaluator, **settings):
    lines: list[str] = []
    found = Recommender(evaluator, SearchSettings(**settings), lines.append).recommend()
    assert len(lines) == 2 * len(found.trials)
    return found
