"""Checks of variables, memory, disks, ports and the network."""

from tpukit.io.folders import VARIABLE
from tpukit.knowledge.environment import problematic
from tpukit.probe.machine.facts import Facts
from tpukit.probe.machine.verdict import (
    CheckOptions,
    Verdict,
    failed,
    passed,
    skipped,
    warned,
    worst,
)

_LEAST_SHM = 1 << 30
_LEAST_DISK_FAIL = 1 << 30
_LEAST_DISK_WARN = 10 << 30
_LEAST_MEMORY = 4 << 30
_NETWORK_SECONDS = 3.0


def variables(facts: Facts, options: CheckOptions) -> Verdict:
    """No environment variable interferes with training."""
    environment = facts.host.environment
    found = []
    for variable in problematic(environment):
        value = environment[variable.name][:60]
        found.append(warned(f"{variable.name}={value}: {variable.message}", variable.fix))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if facts.hidden_gpus and not facts.gpus:
        found.append(
            warned(
                f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES"
            )
        )
    return worst(found, passed("none of the known ones is set"))


def memory(facts: Facts, options: CheckOptions) -> Verdict:
    """The host has memory for data and checkpoints."""
    if facts.memory_bytes is None:
        return skipped("the host does not report its memory")
    said = f"{_gib(facts.memory_bytes)}" + (
        " (a container's limit)" if facts.memory_limited else ""
    )
    if facts.memory_bytes < _LEAST_MEMORY:
        return warned(said, "tpukit train --num-workers 0 --preset safe")
    return passed(f"{said}, {facts.cpu.cores:g} cores")


def shared_memory(facts: Facts, options: CheckOptions) -> Verdict:
    """/dev/shm has room for the DataLoader workers' batches."""
    if facts.shm is None:
        return skipped("no /dev/shm here")
    if facts.shm.free < _LEAST_SHM:
        return warned(
            f"/dev/shm has {_gib(facts.shm.free)} free of {_gib(facts.shm.total)}: data workers "
            'die of "Bus error"',
            "mount -o remount,size=8G /dev/shm    # docker: --shm-size=8g; else --num-workers 0",
        )
    return passed(f"{_gib(facts.shm.free)} free")


def free_disk(facts: Facts, options: CheckOptions) -> Verdict:
    """The disk has room for checkpoints."""
    if facts.disk is None:
        return skipped("the disk does not report its size")
    said = f"{_gib(facts.disk.free)} free"
    if facts.disk.free < _LEAST_DISK_FAIL:
        return failed(f"{said}: a GPT-2 checkpoint takes 1.5 GiB", "du -sh ./* | sort -h | tail")
    if facts.disk.free < _LEAST_DISK_WARN:
        return warned(
            f"{said}: two checkpoints and the best are kept", "du -sh ./* | sort -h | tail"
        )
    return passed(said)


def cache(facts: Facts, options: CheckOptions) -> Verdict:
    """The cache folder can be written."""
    environment = facts.host.environment
    given = environment.get(VARIABLE)
    folder = given or f"{_user_cache(facts)}/tpukit"
    if facts.host.is_writable(folder):
        return passed(folder)
    if given:
        return failed(f"{VARIABLE}={folder} cannot be written", f"unset {VARIABLE}")
    return warned(
        f"{folder} cannot be written: a temporary folder takes its place, and is lost with it",
        f"export {VARIABLE}=DIR    # a folder that is kept",
    )


def cxx_compiler(facts: Facts, options: CheckOptions) -> Verdict:
    """A C++ compiler is here where torch.compile needs one."""
    if facts.kind == "tpu" or facts.emulated:
        return skipped("XLA needs none")
    compiler = facts.host.environment.get("CXX") or "g++"
    if facts.host.finds(compiler):
        return passed(compiler)
    return warned(
        f"no C++ compiler `{compiler}`: training is not compiled, and slower",
        "apt-get install -y g++    # or name another one: export CXX=clang++",
    )


def weights_reachable(facts: Facts, options: CheckOptions) -> Verdict:
    """GPT-2's tokenizer and weights are cached or can be downloaded."""
    if _cached(facts) or facts.host.reaches("huggingface.co", 443, _NETWORK_SECONDS):
        return passed("cached, or their server answers")
    return warned(
        "not cached, and huggingface.co cannot be reached",
        "tpukit summarize-train --init DIR --tokenizer FILE    # attached files; in a notebook "
        "switch the internet on",
    )


def _cached(facts: Facts) -> bool:
    """Whether GPT-2's tokenizer and weights lie in the cache of huggingface_hub."""
    environment = facts.host.environment
    hugging_face = environment.get("HF_HOME", f"{_user_cache(facts)}/huggingface")
    hub = environment.get("HF_HUB_CACHE", f"{hugging_face}/hub")
    kept = [
        f"{hub}/{model}/snapshots" for model in ("models--gpt2", "models--openai-community--gpt2")
    ]
    names = [set(facts.host.names(f"{folder}/{revision}"))
             for folder in kept for revision in facts.host.names(folder)]  # fmt: skip
    return any({"model.safetensors", "tokenizer.json"} <= files for files in names)


def _user_cache(facts: Facts) -> str:
    environment = facts.host.environment
    return environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '/root')}/.cache"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
