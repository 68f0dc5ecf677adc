"""TPU: present, free, and known to this torch_xla."""

from __future__ import annotations

from tpukit.hardware.launch.holders import LOCK_FILE, Holder
from tpukit.probe.machine import Facts
from tpukit.probe.machine.checks.verdict import (
    CheckOptions,
    Verdict,
    failed,
    passed,
    skipped,
    warned,
)


def device(facts: Facts, options: CheckOptions) -> Verdict:
    """The requested hardware is here."""
    if options.hw == "tpu" and facts.emulated:
        return warned(
            "emulation on CPU (virtual devices): PJRT_DEVICE=CPU is set",
            "unset PJRT_DEVICE    # on a TPU",
        )
    here = {"tpu": facts.tpu is not None, "gpu": bool(facts.gpus), "cpu": True, "auto": True}
    if not here[options.hw]:
        return failed(f"no {options.hw.upper()} is here", _way_on(options.hw, facts))
    if facts.tpu is None and facts.host.environment.get("ISTPUVM"):
        return warned(
            "this image was made for a TPU (ISTPUVM is set), and no TPU is here",
            "Choose the TPU accelerator in the notebook's settings and start it again.",
        )
    return passed(describe_devices(facts))


def describe_devices(facts: Facts) -> str:
    """The machine's devices in one line."""
    if facts.kind == "tpu" and facts.tpu:
        generation = facts.tpu.generation
        memory = f", {generation.memory_gib} GiB each" if generation else ""
        return f"{facts.tpu.devices} x {facts.tpu.name}{memory}"
    if facts.kind == "gpu":
        names = [gpu.name for gpu in facts.gpus]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    virtual = (
        f", as {facts.virtual_devices} virtual devices with --hw tpu"
        if facts.virtual_devices > 1
        else ""
    )
    return f"CPU: {facts.cpu.name}, {facts.cpu.cores:g} cores{virtual}"


def _way_on(hw: str, facts: Facts) -> str:
    if hw == "gpu" and facts.hidden_gpus:
        return "unset CUDA_VISIBLE_DEVICES"
    if hw == "gpu":
        return "nvidia-smi    # must list the GPU; in a notebook choose a GPU accelerator"
    if facts.place.name in ("Kaggle", "Colab"):
        return f"Choose a TPU in {facts.place.name}'s settings (Accelerator) and restart."
    return (
        "export PJRT_DEVICE=CPU    # emulation on CPU (virtual devices), or ask the compiler: "
        "tpukit probe-batch --target v5e-8"
    )


def tpu_free(facts: Facts, options: CheckOptions) -> Verdict:
    """No other process holds the TPU."""
    if facts.tpu is None:
        return skipped("no TPU here")
    others = [holder for holder in facts.holders if not holder.is_own_kernel]
    if others:
        named = "; ".join(f"pid {h.pid} ({h.name}) holds {h.path}" for h in _once(others))
        return failed(named, f"kill {' '.join(str(h.pid) for h in _once(others))}")
    if facts.holders:
        own = facts.holders[0]
        return failed(
            f"this notebook's own kernel (pid {own.pid}) holds {own.path}",
            "Restart the notebook's kernel, and run the training before any cell touches the TPU.",
        )
    if facts.lock_file:
        return warned(f"{LOCK_FILE} is there, and nobody is seen to own it", f"rm {LOCK_FILE}")
    return passed("nobody else uses the TPU")


def _once(holders: list[Holder]) -> list[Holder]:
    return list({holder.pid: holder for holder in holders}.values())


def pjrt_device(facts: Facts, options: CheckOptions) -> Verdict:
    """PJRT_DEVICE fits the hardware."""
    value = facts.host.environment.get("PJRT_DEVICE", "").upper()
    if facts.version("torch-tpu") and not facts.version("torch-xla"):
        return skipped("torch_tpu does not read it")
    if facts.tpu and value not in ("", "TPU"):
        status = failed if options.hw == "tpu" else warned
        return status(
            f"PJRT_DEVICE={value}: torch_xla would leave this TPU idle", "export PJRT_DEVICE=TPU"
        )
    if not facts.tpu and value == "TPU":
        return failed(
            "PJRT_DEVICE=TPU and no TPU: torch_xla would wait for one, or fail",
            "unset PJRT_DEVICE    # or PJRT_DEVICE=CPU: emulation on CPU (virtual devices)",
        )
    return passed(f"PJRT_DEVICE={value}" if value else "PJRT_DEVICE is not set")
