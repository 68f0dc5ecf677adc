"""What a device is tried for in a child process before a run relies on it: the package's own
kernels, and steps that are recorded.

On a TPU one process owns the device, so the child has ended before the parent opens it. A result
is kept by device, versions and source. Imports no torch.
"""

import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpukit.hardware.detect import CHIP_BOUNDS, Hardware, emulates_kernels
from tpukit.hardware.launch.child import Child, ChildDiedError
from tpukit.hardware.launch.holders import BUSY, PAUSES
from tpukit.hardware.options import HardwareOptions
from tpukit.io.folders import JsonCache, cache_folder
from tpukit.io.process import die_with_parent
from tpukit.knowledge.versions import installed_versions

TRIAL_SECONDS = 240.0
"""Time limit of a trial: a TPU opens, and ten small programs are compiled, in a minute."""
PACKAGES = ("torch", "torch_xla", "torch_tpu", "jax", "jaxlib", "libtpu")
FORMAT = 1
HELD: Mapping[str, Any] = {
    "works": False, "opened": False, "reason": "they are not tried yet, and this process holds it"
}  # fmt: skip
Log = Callable[[str], None]


def kernel_device(hardware: Hardware) -> str | None:
    """The kind of device that kernels were written for; None where there are none, or no jax."""
    if importlib.util.find_spec("jax") is None:
        return None
    if hardware.emulated:
        return "the emulation on CPU" if emulates_kernels(os.environ) else None
    generation = hardware.tpu.generation if hardware.tpu else None
    return f"TPU {generation.name}" if generation and generation.has_kernels else None


def steps_device(hardware: Hardware) -> str:
    """The kind of device that steps are recorded for."""
    if hardware.emulated:
        return "the emulation on CPU"
    generation = hardware.tpu.generation if hardware.tpu else None
    return f"TPU {generation.name}" if generation else "this TPU"


@dataclass(frozen=True)
class DeviceTrial:
    """What a child process finds out about a kind of device, once."""

    name: str
    """Name of the option, and of the folder of results."""
    child: str
    """Its module, which calls `answer_parent`."""
    subject: str
    without: str
    """What a run does where it fails."""
    sources: Sequence[str]
    """Files that decide the result, below `tpukit/hardware`."""

    def works(
        self,
        device: str,
        hardware: Hardware,
        options: HardwareOptions,
        log: Log,
        *,
        runs: Sequence[Path] = (),
        may_try: bool = True,
    ) -> bool:
        """The kept result for this kind of device, or that of a trial in a child process.

        Where it says no, `log` is given a line with the reason.
        runs: run folders that may keep results too, as a cache is lost with a notebook's session.
        may_try: whether the device is free for a child process.
        """
        key, caches = self._key(device, options), self._caches(options, runs)
        result: Mapping[str, Any] = next(filter(None, (c.read(key) for c in caches)), HELD)
        if result is HELD and may_try:
            log(f"Trying {self.subject} on {device} once, up to {TRIAL_SECONDS:.0f} s ...")
            result = self.attempt(hardware, options, TRIAL_SECONDS)
        if result["opened"]:
            self.keep(device, options, result, runs)
        if not result["works"]:
            kept = f" Kept in {caches[0].path(key)}." if result["opened"] else ""
            log(f"{self.without}: on {device} {result['reason']}.{kept}")
        return bool(result["works"])

    def keep(
        self,
        device: str,
        options: HardwareOptions,
        result: Mapping[str, Any] | None = None,
        runs: Sequence[Path] = (),
    ) -> None:
        """Keeps a result (else the cache's) there, beside compiled programs and in `runs`."""
        there = [run for run in runs if run.is_dir()]
        key, caches = self._key(device, options), self._caches(options, there)
        if found := result or caches[0].read(key):
            for cache in caches:
                if cache.read(key) is None:
                    cache.write(key, found)

    def _caches(self, options: HardwareOptions, runs: Sequence[Path]) -> list[JsonCache]:
        """The cache, those beside compiled programs, and those of run folders."""
        compiled = [Path(options.compile_cache)] if options.compile_cache else []
        folders = (cache_folder(), *compiled, *runs)
        return [JsonCache(folder / self.name, FORMAT) for folder in folders]

    def attempt(
        self, hardware: Hardware, options: HardwareOptions, time_limit: float
    ) -> dict[str, Any]:
        """A trial in a child process, of `time_limit` seconds.

        Returns `works`, `reason` (empty where it works), `opened` (whether the device did open:
        else what was tried is not to blame), `errors` (relative to the plain result, by part) and
        `seconds`.
        """
        deadline = time.monotonic() + time_limit
        for pause in (*PAUSES, None):
            result = self._try_once(hardware, options, deadline)
            held = not result["opened"] and BUSY.search(result["reason"])
            if pause is None or not held or time.monotonic() + pause >= deadline:
                break
            time.sleep(pause)
        return {**result, "seconds": time_limit - (deadline - time.monotonic())}

    def _try_once(
        self, hardware: Hardware, options: HardwareOptions, deadline: float
    ) -> dict[str, Any]:
        errors: dict[str, float] = {}
        opened, place, reason = False, "opening the device", ""
        command = ("-m", self.child, options.precision, str(options.devices or 0))
        with Child(_environment(hardware), command) as child:
            try:
                while place:
                    answer = child.receive(deadline)
                    errors |= answer["errors"]
                    opened, place, reason = True, answer["next"], answer["reason"]
                child.finish()
            except ChildDiedError as death:
                reason = f"{place}: {death.death.describe()}"
                if death.death.return_code is not None:
                    reason += f" ({death.death.last_line or 'no message'})"
        return {"works": not reason, "reason": reason, "opened": opened, "errors": errors}

    def _key(self, device: str, options: HardwareOptions) -> dict[str, Any]:
        source = hashlib.sha256()
        for name in self.sources:
            source.update((Path(__file__).parent / name).read_bytes())
        return {
            "device": device,
            "devices": options.devices,
            "precision": options.precision,
            "versions": installed_versions(PACKAGES),
            "source": source.hexdigest(),
        }


KERNELS = DeviceTrial(
    "kernels",
    "tpukit.hardware.kernels.trial",
    "the attention kernels",
    "Attention without its kernels (--kernels on uses them all the same)",
    ("kernels/pallas_attention.py", "kernels/flash_attention.py", "kernels/trial.py"),
)
STEPS = DeviceTrial(
    "steps",
    "tpukit.hardware.step_trial",
    "recorded steps",
    "Each step is traced",
    ("xla/cached_graphs.py", "xla/recorder.py", "xla/programs.py", "step_trial.py"),
)


def answer_parent(
    answers: Callable[[HardwareOptions], Iterator[dict[str, Any]]], arguments: list[str],
    **options: Any,
) -> int:  # fmt: skip
    """What a child does: it writes its answers to the pipe that it was started with."""
    precision, devices, descriptor, parent = arguments
    die_with_parent(int(parent))
    options |= {"devices": int(devices) or None, "precision": precision}
    for answer in answers(HardwareOptions(hw="tpu", **options)):
        os.write(int(descriptor), (json.dumps(answer) + "\n").encode())
    return 0


def _environment(hardware: Hardware) -> dict[str, str]:
    """The chips of this host alone: a pod's other hosts may have their result already."""
    if hardware.tpu is None or "," not in os.environ.get("TPU_WORKER_HOSTNAMES", ""):
        return {}
    bounds = CHIP_BOUNDS.get(hardware.tpu.chips)
    if bounds is None:
        return {}
    return {
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        "TPU_VISIBLE_CHIPS": ",".join(map(str, range(hardware.tpu.chips))),
    }
