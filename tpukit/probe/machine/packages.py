"""Checks of releases and packages for compatibility."""

from tpukit.knowledge.versions import (
    jax_seen_with,
    old_packages,
    pair_of,
    parse_version,
    same_release,
    torchvision_of,
    version_table,
)
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

_JAX_USERS = ("flax", "optax", "orbax-checkpoint", "chex", "equinox", "dm-haiku", "numpyro")
"""Packages that another version of jax would break."""


def torch_and_torch_xla(facts: Facts, options: CheckOptions) -> Verdict:
    """torch and torch_xla are of the same release."""
    torch, torch_xla = facts.version("torch"), facts.version("torch-xla")
    if torch is None:
        return failed("torch is not installed", "pip install torch==2.9.0")
    if torch_xla is None:
        return _without_torch_xla(facts, options)
    pair = pair_of(torch_xla)
    wanted = pair.torch if pair else ".".join(map(str, parse_version(torch_xla)[:2]))
    if not same_release(torch, wanted):
        return failed(
            f"torch {torch} with torch_xla {torch_xla}: the two must be of the same release "
            '("_XLAC: undefined symbol")',
            _install(torch_xla),
        )
    return _python(facts, "torch_xla") or passed(f"torch {torch}, torch_xla {torch_xla}")


def _without_torch_xla(facts: Facts, options: CheckOptions) -> Verdict:
    if facts.version("torch-tpu"):
        return passed("torch_tpu replaces torch_xla")
    if facts.tpu or options.hw == "tpu":
        problem = failed if options.hw == "tpu" or facts.kind == "tpu" else warned
        return problem("a TPU needs torch_xla, which is not installed", _install("2.9.0"))
    return passed(f"torch {facts.version('torch')}, no torch_xla (GPUs and CPUs need none)")


def _install(torch_xla: str) -> str:
    release = _release(torch_xla)
    return f"pip install 'torch=={release}' 'torch_xla[tpu]=={release}'"


def _release(version: str) -> str:
    return ".".join(map(str, (*parse_version(version), 0, 0)[:3]))


def _python(facts: Facts, package: str) -> Verdict | None:
    oldest, newest = version_table()[package]["python"]
    here = parse_version(facts.python)[:2]
    if parse_version(oldest) <= here <= parse_version(newest):
        return None
    return warned(
        f"{package} has wheels for Python {oldest} to {newest}, none for {facts.python}",
        "uv venv --python 3.12 .venv",
    )


def libtpu(facts: Facts, options: CheckOptions) -> Verdict:
    """libtpu is the one that torch_xla was built for."""
    torch_xla, here = facts.version("torch-xla"), facts.version("libtpu")
    if torch_xla is None:
        has_other = facts.version("torch-tpu")
        return _libtpu_of_torch_tpu(here) if has_other else skipped("no torch_xla here")
    pair = pair_of(torch_xla)
    if pair is None:
        return skipped(f"unknown torch_xla release {torch_xla}")
    problem = failed if facts.tpu or options.hw == "tpu" else warned
    if here is None:
        if not facts.tpu:
            return skipped("libtpu is not installed, and no TPU is here")
        return problem("libtpu is not installed", _install(torch_xla))
    if same_release(here, pair.libtpu):
        return passed(f"libtpu {here}")
    newer = parse_version(here) > parse_version(pair.libtpu)
    message = (
        f"libtpu {here} is {'newer' if newer else 'older'} than torch_xla {torch_xla} was built "
        f"for ({pair.libtpu})" + (': "Mismatched PJRT plugin PJRT API version"' if newer else "")
    )
    return problem(message, f"pip install 'libtpu=={pair.libtpu}.*'")


def _libtpu_of_torch_tpu(here: str | None) -> Verdict:
    oldest = str(version_table()["torch_tpu"]["libtpu"])
    if here and parse_version(here) >= parse_version(oldest):
        return passed(f"libtpu {here}")
    return failed(
        f"torch_tpu needs libtpu {oldest} or newer, found {here or 'none'}",
        f"pip install 'libtpu>={oldest}'",
    )


def jax(facts: Facts, options: CheckOptions) -> Verdict:
    """jax is the one that torch_xla's kernels and the compiler need."""
    torch_xla, here = facts.version("torch-xla"), facts.version("jax")
    pair = pair_of(torch_xla) if torch_xla else None
    if torch_xla is None or pair is None or here is None:
        return skipped("no jax beside torch_xla")
    jaxlib = facts.version("jaxlib")
    libtpu = facts.version("libtpu") or pair.libtpu
    of_compiler = {"torch": pair.torch, "torch_xla": torch_xla, "libtpu": libtpu}
    fitting = [pair.jax, *jax_seen_with(of_compiler)]
    if any(same_release(here, jax) and same_release(jaxlib or "", jax) for jax in fitting):
        return passed(f"jax {here}")
    wanted = f"'jax=={pair.jax}' 'jaxlib=={pair.jax}'"
    message = (
        f"jax {here} with jaxlib {jaxlib}: torch_xla {torch_xla} needs {pair.jax} for its kernels"
    )
    users = [name for name in _JAX_USERS if facts.version(name)]
    if not users and facts.place.name not in ("Kaggle", "Colab"):
        return warned(message, f"pip install {wanted}")
    others = ", ".join(users) or f"{facts.place.name}'s image"
    return warned(
        f"{message}; {others} may need the one that is here",
        "python -m venv own && own/bin/pip install TPUKIT.whl "
        f"'torch_xla[tpu]=={_release(torch_xla)}' {wanted}    # an environment of its own",
    )


def torch_tpu(facts: Facts, options: CheckOptions) -> Verdict:
    """torch_tpu does not interfere with torch_xla or with the CPU."""
    here = facts.version("torch-tpu")
    if here is None:
        return skipped("no torch_tpu here")
    problems = []
    if facts.version("torch-xla"):
        problems.append(
            failed(
                f"torch_tpu {here} and torch_xla {facts.version('torch-xla')} in one environment: "
                "they need different releases of libtpu and torch",
                "pip uninstall -y torch_tpu    # or torch_xla: one environment each",
            )
        )
    first, before = (parse_version(text) for text in version_table()["torch_tpu"]["torch"])
    torch = facts.version("torch") or ""
    if not first <= parse_version(torch)[:2] < before:
        problems.append(
            failed(f"torch_tpu {here} needs torch 2.11 to 2.15, found {torch or 'none'}",
                   "pip install 'torch>=2.11,<2.16'")
        )  # fmt: skip
    if wrong_python := _python(facts, "torch_tpu"):
        problems.append(wrong_python)
    if not facts.tpu and facts.host.environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        problems.append(
            failed(
                "torch_tpu without a TPU: plain CPU training hangs in its first backward pass "
                "(it queries the cloud's metadata server)",
                "export TORCH_DEVICE_BACKEND_AUTOLOAD=0",
            )
        )
    return worst(problems, passed(f"torch_tpu {here}"))


def torchvision(facts: Facts, options: CheckOptions) -> Verdict:
    """torchvision matches torch."""
    here, torch = facts.version("torchvision"), facts.version("torch")
    wanted = torchvision_of(torch) if torch else None
    if here is None or wanted is None:
        return skipped("no torchvision here" if here is None else f"torch {torch} is not known")
    if same_release(here, wanted):
        return passed(f"torchvision {here}")
    return failed(
        f'torchvision {here} with torch {torch}: "operator torchvision::nms does not exist"',
        f"pip install 'torchvision=={wanted}.*'",
    )


def tensorflow(facts: Facts, options: CheckOptions) -> Verdict:
    """tensorflow does not take the TPU from torch_xla."""
    here, without_gpu = facts.version("tensorflow"), facts.version("tensorflow-cpu")
    if facts.version("torch-xla") is None or (here is None and without_gpu is None):
        return skipped("no tensorflow beside torch_xla")
    if here is None:
        return passed(f"tensorflow-cpu {without_gpu}: it leaves the TPU alone")
    message = f"tensorflow {here} beside torch_xla: both try to use the TPU"
    return warned(message, "pip uninstall -y tensorflow && pip install tensorflow-cpu")


def old_releases(facts: Facts, options: CheckOptions) -> Verdict:
    """No package was renamed, replaced or discontinued."""
    found = [
        warned(f"{old.message} (found: {facts.version(old.name)})", old.fix)
        for old in old_packages()
        if (version := facts.version(old.name)) is not None and old.concerns(version)
    ]
    return worst(found, passed("none"))
