"""Checks of devices: a TPU that is free, GPUs, their driver and number formats."""

from typing import Any

from tpukit.hardware.detect import Gpu
from tpukit.hardware.launch.holders import LOCK_FILE, Holder
from tpukit.io.units import GIB
from tpukit.knowledge.accelerators import Support, cpu_bf16, cpu_fp16, gpu_bf16, gpu_fp16
from tpukit.knowledge.versions import architectures_of, driver_for, parse_version, runs_on
from tpukit.probe.machine.facts import Facts
from tpukit.probe.machine.verdict import (
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


def gpu_architecture(facts: Facts, options: CheckOptions) -> Verdict:
    """This build of torch has code for every GPU here."""
    if not facts.gpus:
        return skipped("no GPU here")
    torch = facts.version("torch")
    if torch and facts.torch_cuda is None:
        return failed(
            f"torch {torch} is a build for the CPU", "pip install --force-reinstall torch"
        )
    known = built_for(facts)
    if known is None:
        return skipped(f"the table does not know torch {torch} for CUDA {facts.torch_cuda}")
    left_out = [gpu for gpu in facts.gpus if gpu.capability and not runs_on(gpu.capability, known)]
    if left_out:
        return _left_out(left_out[0], facts)
    return passed(f"torch {torch} for CUDA {facts.torch_cuda}")


def _left_out(gpu: Gpu, facts: Facts) -> Verdict:
    way_on = (
        "Choose a T4 or L4 in the notebook's settings."
        if facts.place.notebook
        else "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/"
        + ("cu126" if (gpu.capability or 0) < 9 else "cu128")
    )
    return failed(
        f"{gpu.name} (sm_{(gpu.capability or 0) * 10:.0f}) is not in this build of torch "
        f'({facts.version("torch")} for CUDA {facts.torch_cuda}): "no kernel image is available"',
        way_on,
    )


def built_for(facts: Facts) -> list[float] | None:
    """Compute capabilities this torch was compiled for; None where that is not known."""
    torch = facts.version("torch")
    if torch is None or facts.torch_cuda is None:
        return None
    return architectures_of(torch, facts.torch_cuda)


def driver(facts: Facts, options: CheckOptions) -> Verdict:
    """The driver is new enough for torch's CUDA."""
    if not facts.gpus:
        return skipped("no GPU here")
    wanted = driver_for(facts.torch_cuda) if facts.torch_cuda else None
    if wanted is None or facts.driver is None:
        return skipped("the driver's version or torch's CUDA is not known")
    if parse_version(facts.driver) >= parse_version(wanted):
        return passed(f"driver {facts.driver}, CUDA {facts.torch_cuda}")
    return failed(
        f"driver {facts.driver} is too old for CUDA {facts.torch_cuda} (from {wanted} on)",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126",
    )


def number_formats(facts: Facts, options: CheckOptions) -> Verdict:
    """bf16 and fp16 on every device: native, emulated or none."""
    devices = device_list(facts)
    said = [
        f"{device['name']}: bf16 {device['bf16']}, fp16 {device['fp16']}"
        for device in {device["name"]: device for device in devices}.values()
    ]
    slow = [d for d in devices if d["bf16"] != "native"] if facts.kind == "gpu" else []
    if slow:
        return warned("; ".join(said), "tpukit train --precision fp16    # `auto` chooses it too")
    return passed("; ".join(said))


def device_list(facts: Facts) -> list[dict[str, Any]]:
    """Name, memory and number formats of every device training would use."""
    if facts.kind == "tpu" and facts.tpu:
        generation = facts.tpu.generation
        memory = generation.memory_gib * GIB if generation else None
        return [_device(facts.tpu.name, memory, "native", "none")] * facts.tpu.devices
    if facts.kind == "gpu":
        return [_gpu(gpu, built_for(facts)) for gpu in facts.gpus]
    flags, count = facts.cpu.flags, facts.virtual_devices
    # Virtual devices share the host's memory.
    memory = facts.memory_bytes and facts.memory_bytes // count
    return [_device(facts.cpu.name, memory, cpu_bf16(flags), cpu_fp16(flags))] * count


def _gpu(gpu: Gpu, architectures: list[float] | None) -> dict[str, Any]:
    capability = gpu.capability or 0.0
    usable = architectures is None or not gpu.capability or runs_on(capability, architectures)
    bf16: Support = gpu_bf16(capability) if usable else "none"
    fp16: Support = gpu_fp16(capability) if usable else "none"
    return _device(gpu.name, gpu.memory_bytes, bf16, fp16)


def _device(name: str, memory: int | None, bf16: Support, fp16: Support) -> dict[str, Any]:
    return {"name": name, "memory_bytes": memory, "bf16": bf16, "fp16": fp16}


def gpus_alike(facts: Facts, options: CheckOptions) -> Verdict:
    """All GPUs are of one kind."""
    if len(facts.gpus) < 2:
        return skipped("fewer than two GPUs here")
    names = dict.fromkeys(gpu.name for gpu in facts.gpus)
    if len(names) == 1:
        return passed(f"{len(facts.gpus)} x {next(iter(names))}")
    return warned(
        f"{', '.join(names)}: the slowest and the smallest decide every step",
        "export CUDA_VISIBLE_DEVICES=0",
    )
