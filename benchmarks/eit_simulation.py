"""Samples per CPU-second of `data eit`, beside a sparse factorisation a sample on the same mesh.

tpukit's side runs the whole command in processes of its own and counts the CPU time of all of them:
start, simulation, files, normalisation. The other side solves the same samples' forward problems
(scipy's SuperLU of the assembled system, 16 drives at once; files and images left out) and checks
that both give the same voltages.

    python benchmarks/eit_simulation.py --out benchmarks/results/eit_simulation.json
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

os.environ.update({f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")})

import numpy as np
from deciding_code import write_result
from scipy import sparse
from scipy.sparse.linalg import splu

from tpukit.tasks.eit.generate import SimulatedData, simulate
from tpukit.tasks.eit.simulation.forward import drive_currents, forward_model, measure_drives
from tpukit.tasks.eit.simulation.inclusions import draw_inclusions, sigma_on

REPEATS = 3


def children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_command(samples: int, *options: str) -> dict[str, float]:
    """The command, once: samples per second of CPU time and of wall time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tpukit", "data", "eit", "--out", f"{folder}/data"]
        cpu, wall = children_cpu_seconds(), time.monotonic()
        done = subprocess.run(
            [*command, "--n", str(samples), "--json", *options],
            check=True, capture_output=True,
        )  # fmt: skip
        cpu, wall = children_cpu_seconds() - cpu, time.monotonic() - wall
        assert json.loads(done.stdout)["samples"] == samples
    return {"per_cpu_second": samples / cpu, "per_second": samples / wall}


def best(runs: list[dict[str, float]]) -> dict[str, float]:
    """The fastest of the runs: the others were disturbed."""
    chosen = max(runs, key=lambda run: run["per_cpu_second"])
    return {name: round(value, 1) for name, value in chosen.items()}


def time_samples(samples: int) -> float:
    """Samples per CPU-second in this process, without files."""
    settings = SimulatedData()
    simulate(settings, 0)
    started = time.process_time()
    for index in range(samples):
        simulate(settings, index)
    return samples / (time.process_time() - started)


def compare_solvers(samples: int) -> dict[str, float]:
    """Forward solves per CPU-second: changes of one inverse, and a factorisation a sample."""
    model = forward_model(SimulatedData().electrode_degrees)
    generators = [np.random.default_rng(i) for i in range(samples)]
    sigmas = [sigma_on(model.mesh, draw_inclusions(rng, "strong")) for rng in generators]
    model.change(sigmas[0])
    started = time.process_time()
    ours = np.array([model.change(sigma) for sigma in sigmas])
    ours_seconds = time.process_time() - started
    solve = factorising_solver(model)
    started = time.process_time()
    others = np.array([solve(sigma) for sigma in sigmas]) - model.background
    others_seconds = time.process_time() - started
    difference = float(np.abs(ours - others).max() / np.abs(others).max())
    assert difference < 1e-9, difference
    return {
        "changes_of_one_inverse": round(samples / ours_seconds, 1),
        "factorisation_a_sample": round(samples / others_seconds, 1),
        "ratio": round(others_seconds / ours_seconds, 2),
        "largest_difference": difference,
    }


def factorising_solver(model):
    """Assembly with a fixed pattern and SuperLU with its ordering for symmetric matrices."""
    mesh, nodes = model.mesh, len(model.mesh.nodes)
    rows = np.repeat(mesh.triangles, 3, axis=1).ravel()
    columns = np.tile(mesh.triangles, (1, 3)).ravel()
    empty = np.zeros(len(mesh.triangles))
    fixed = sparse.csc_matrix(model.system(empty))
    shape = fixed.shape
    right = np.zeros((nodes + 16, 16))
    right[nodes:] = drive_currents()

    def solve(sigma: np.ndarray) -> np.ndarray:
        values = (sigma[:, None, None] * model.stiffness).ravel()
        matrix = sparse.csc_matrix((values, (rows, columns)), shape=shape) + fixed
        factors = splu(
            matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )  # fmt: skip
        return measure_drives(factors.solve(right)[nodes:])

    return solve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    n = arguments.samples
    mesh = forward_model(SimulatedData().electrode_degrees).mesh
    result = {
        "samples": n,
        "nodes": len(mesh.nodes),
        "triangles": len(mesh.triangles),
        "with_files": best([run_command(n) for _ in range(REPEATS)]),
        "with_files_and_recon": best([run_command(n // 4, "--recon") for _ in range(REPEATS)]),
        "without_files_per_cpu_second": round(max(time_samples(1000) for _ in range(REPEATS)), 1),
        "forward_solves_per_cpu_second": compare_solvers(200),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("tpukit", "numpy", "scipy")},
    }
    print(json.dumps(result, indent=2))
    if arguments.out:
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()
