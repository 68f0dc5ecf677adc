"""A child process of the self-test: it answers a part a line, and may crash or hang meanwhile.

Started by `tpukit.hardware.launch.child` with HW DESCRIPTOR PARENT as its arguments. A question
names a function below and its arguments; the answer has `message`, `values` and perhaps `warning`
(what to know although nothing failed), or `error` and `fix`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit.hardware.memory import is_out_of_memory
from tpukit.hardware.options import HardwareOptions
from tpukit.io.process import die_with_parent
from tpukit.io.units import format_bytes
from tpukit.probe.machine.checks.live_child import Kind, check_products, explained

if TYPE_CHECKING:
    from tpukit.hardware.backend import Backend

Answer = dict[str, Any]
SIDE = 2**24
"""Side of a square of fp32 numbers that takes a petabyte."""
MEMORY_UNKNOWN = (
    "The device does not report its memory: probe-batch goes by what the TPU compiler says."
)


class DeviceParts:
    """Parts that open the device, one process for all of them."""

    def __init__(self, hw: Kind, *, shard: bool = False) -> None:
        self.hw = hw
        self.shard = shard

    @cached_property
    def backend(self) -> Backend:
        """The device in fp32 with plain attention: the kernels are a part of their own."""
        from tpukit.hardware.select import find_kind, open_backend

        # One GPU is enough here, and several would need a launcher.
        devices = 1 if find_kind(HardwareOptions(hw=self.hw)) == "gpu" else None
        return open_backend(
            HardwareOptions(
                self.hw, devices, precision="fp32", shard=self.shard, compile=False, kernels="off"
            )
        )

    def devices(self) -> Answer:
        """Opens the device, adds on it, and reads its memory."""
        import torch

        from tpukit.hardware.select import are_virtual

        backend = self.backend
        total = backend.to_host({"total": torch.ones(8, device=backend.device).sum()})["total"]
        if float(total) != 8.0:
            raise RuntimeError(f"eight ones add up to {float(total)} on {backend.device}")
        memory = backend.usage().memory
        text = ", ".join(f"{name} {value}" for name, value in backend.describe().items())
        values: Answer = {**backend.describe(), "devices": backend.devices}
        if memory is not None:
            values |= {"memory_used_bytes": memory.used, "memory_limit_bytes": memory.limit}
            limit = f" of {format_bytes(memory.limit)}" if memory.limit else ""
            text += f"; memory {format_bytes(memory.used)}{limit} used on the fullest"
        answer = {"message": text, "values": values}
        if memory is None and not are_virtual(values["hardware"]):
            answer["warning"] = MEMORY_UNKNOWN
        return answer

    def products(self) -> Answer:
        """A matrix product in fp32 and in the precision of training."""
        return {"message": check_products(self.backend), "values": {}}

    def step(self, task: str, settings: Mapping[str, Any], folder: str) -> Answer:
        """A step on this device: compared with the one that `folder` has, or kept there."""
        from tpukit.probe.selftest.one_step import compare_or_keep

        return compare_or_keep(self.backend, task, settings, Path(folder))

    def generate(self) -> Answer:
        """Tokens of a small GPT-2."""
        from tpukit.probe.selftest.eight_tokens import generate_twice

        return generate_twice(self.backend)

    def out_of_memory(self) -> Answer:
        """Allocates more than any device holds: the failure must count as a lack of memory."""
        import torch

        backend = self.backend
        side = torch.ones(SIDE, device=backend.device)
        try:
            backend.to_host({"products": side[:, None] * side[None]})
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            if is_out_of_memory(error):
                return {"message": f"recognised: {text}", "values": {}}
            return {"error": f"not recognised: {text}", "fix": ""}
        return {"error": "a petabyte fitted", "fix": ""}

    def train(self, folder: str, steps: int, kill_at: int) -> Answer:
        """A run of the self-test's task, or the rest of one that was killed."""
        from tpukit.probe.selftest.selftest_task import SelfTestTask
        from tpukit.train.config import TrainConfig
        from tpukit.train.plan import TrainingRequest
        from tpukit.train.run import train_run
        from tpukit.train.storage.run_folder import RunFolder

        config = TrainConfig(
            global_batch_size=4 * self.backend.devices, max_steps=steps, ckpt_every=5,
            log_every=1, ema_decay=0.9, ema_warmup=5, num_workers=0,
        )  # fmt: skip
        request = TrainingRequest(SelfTestTask(kill_at), config, RunFolder(Path(folder)))
        result = train_run(request, self.backend, _log)
        values = {name: getattr(result, name) for name in
                  ("steps", "loss", "compilations", "compilations_after_warmup", "graphs",
                   "resumed_from", "samples_per_second")}  # fmt: skip
        message = (
            f"{result.steps} steps, {result.compilations} compilations, "
            f"{result.compilations_after_warmup} after the warm-up"
        )
        return {"message": message, "values": values}


class HostParts:
    """Parts whose own child processes open the device."""

    def __init__(self, hw: Kind) -> None:
        self.hw = hw

    def kernels(self, seconds: float) -> Answer:
        """Each kernel against plain operations, tried afresh; the result is kept for runs."""
        from tpukit.hardware.select import try_own_kernels

        result = try_own_kernels(HardwareOptions(self.hw), seconds)
        if result is None:
            return {"message": "there are no kernels for this hardware", "skip": True}
        if not result["works"]:
            fix = "Runs use plain attention here: send the report (docs/first_tpu.md)."
            return {"error": result["reason"], "fix": fix, "values": result["errors"]}
        largest = max(result["errors"].values())
        forms = len({name.partition(":")[0] for name in result["errors"]})
        message = f"{forms} forms, forward and backward, differ by at most {largest:.1e}"
        return {"message": message, "values": result["errors"]}

    def prediction(self, task: str, settings: Mapping[str, Any], batch: int) -> Answer:
        """Memory and time of a step, measured here, beside what the compiler says of it."""
        from tpukit.probe.selftest.predicted import measure_beside_prediction

        return measure_beside_prediction(self.hw, task, settings, batch)

    def reopen(self) -> Answer:
        """A batch search one of whose trials is killed."""
        from tpukit.probe.selftest.predicted import search_past_a_kill

        return search_past_a_kill(self.hw)

    def largest(self, task: str, settings: Mapping[str, Any]) -> Answer:
        """The batch that the compiler names, and the next one, tried here."""
        from tpukit.probe.selftest.predicted import try_largest

        return try_largest(self.hw, task, settings)


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(kind: str, hw: Kind, descriptor: int, parent: int) -> int:
    """Answers until standard input ends."""
    die_with_parent(parent)
    parts = HostParts(hw) if kind == "host" else DeviceParts(hw, shard=kind == "sharded")
    for line in sys.stdin:
        question = json.loads(line)
        part: Callable[..., Answer] = getattr(parts, question.pop("part"))
        try:
            answer = part(**question)
        except Exception as error:
            message, fix = explained(error)
            answer = {"error": message, "fix": fix}
        os.write(descriptor, (json.dumps(answer, default=str) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))  # type: ignore[arg-type]
