"""Reconstruction of measured frames, from nothing: simulate, train, test, beside other ways.

    python benchmarks/eit_quality.py --uef2017 DIR --work DIR --out eit_quality.json

1. `tpukit data eit` simulates the training set.
2. `tpukit train` and a plain convolutional regressor (voltages in, image out, mean squared error)
   learn from the same samples at the same time, one thread each on two cores; the regressor stops
   when the command has, so both have had the same time.
3. `tpukit test` reconstructs the 22 measured frames of UEF2017 and the simulated test split with
   5-step sampling (mean of K and a single sample), and gives Tikhonov's and NOSER's images. The
   mean is over measurements turned and mirrored; the regressor is given with and without that.

Nothing measured takes part in training or in choosing weights. The simulator's ranges of contrast,
size and noise were chosen after looking at the measured voltages, for every way here alike.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recorded import write_result
from torch import Tensor, nn

from tpukit.tasks.eit.data.dataset import EITDataset, data_normalisation, open_split
from tpukit.tasks.eit.data.measured import open_test_set
from tpukit.tasks.eit.data.voltages import SYMMETRIES, voltage_map
from tpukit.tasks.eit.metrics import METRICS, measure_all
from tpukit.train.evaluation import mean_interval
from tpukit.train.requests import EvaluationOptions

WAYS = {
    "diffusion, mean of K": "",
    "diffusion, one sample": "_single",
    "NOSER": "_noser",
    "one-step Tikhonov": "_baseline",
}
"""Names and the suffix of their fields in the JSON of `tpukit test`."""
REGRESSOR, AVERAGED = "convolutional regressor", "the same, mean of 8 symmetries"
PAIRED = "difference, mean of K - {}, image by image"
REGRESSOR_BATCH = 32
REGRESSOR_RATE = 1e-3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uef2017", type=Path, required=True, help="folder of measured frames")
    parser.add_argument("--work", type=Path, required=True, help="folder for data and run")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--n", type=int, default=40_000, help="simulated samples (80 %% train)")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="K")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


# -- the two trainings -----------------------------------------------------------------------------


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "tpukit", *(str(word) for word in words)]


def run_json(*words: object) -> dict[str, Any]:
    """A command of tpukit: its JSON."""
    done = subprocess.run(command(*words, "--json"), check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def train_both(options: argparse.Namespace) -> tuple[dict[str, Any], nn.Module]:
    """The command's metrics, and the regressor, which learned meanwhile.

    Both are kept in the work folder. Where the command has run before, the regressor has as many
    minutes as the command took.
    """
    answer, weights = options.work / "train.json", options.work / "regressor.pt"
    started = time.monotonic()
    child = None if answer.exists() else start_command(options)
    minutes = math.inf if child else json.loads(answer.read_text())["minutes"]
    if weights.exists():
        kept = torch.load(weights)
        model = plain_regressor()
        model.load_state_dict(kept["weights"])
        samples = kept["samples"]
    else:

        def share_done() -> float:
            """Of the time there is: 1 ends the training."""
            if child is None:
                return min(1.0, (time.monotonic() - started) / 60 / minutes)
            return 1.0 if child.poll() is not None else steps_done(options)

        try:
            model, samples = train_regressor(options, share_done)
        finally:
            if child is not None and child.poll() is None:
                child.terminate()
        torch.save({"weights": model.state_dict(), "samples": samples}, weights)
    if child is not None:
        text = child.communicate()[0]
        if child.returncode:
            raise SystemExit(f"tpukit train failed; see {options.work / 'train.log'}")
        found = json.loads(text) | {"minutes": (time.monotonic() - started) / 60}
        answer.write_text(json.dumps(found))
    return json.loads(answer.read_text()) | {"regressor_samples_seen": samples}, model


def start_command(options: argparse.Namespace) -> subprocess.Popen[str]:
    words = command(
        "train", "--hw", "cpu", "--size", options.size, "--max-steps", options.steps,
        "--global-batch-size", options.batch, "--num-workers", 0, "--global-seed", options.seed,
        "--ckpt-every", options.steps // 3, "--data-path", options.work / "data",
        "--results-dir", options.work / "run", "--no-resume", "--json",
    )  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (options.work / "train.log").open("w") as stream:
        return subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=stream, env=environment, text=True
        )


def plain_regressor() -> nn.Module:
    """(batch, 1, 16, 16) voltages to (batch, 1, 128, 128) images."""

    def level(before: int, after: int) -> list[nn.Module]:
        return [
            nn.Upsample(scale_factor=2), nn.Conv2d(before, after, 3, padding=1), nn.GELU(),
            nn.Conv2d(after, after, 3, padding=1), nn.GELU(),
        ]  # fmt: skip

    return nn.Sequential(
        nn.Flatten(), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64 * 16 * 16), nn.GELU(),
        nn.Unflatten(1, (64, 16, 16)), nn.Conv2d(64, 64, 3, padding=1), nn.GELU(),
        *level(64, 48), *level(48, 24), *level(24, 12), nn.Conv2d(12, 1, 3, padding=1),
    )  # fmt: skip


def train_regressor(
    options: argparse.Namespace, share_done: Callable[[], float]
) -> tuple[nn.Module, int]:
    """Learns until all the time there is has gone by; the rate falls with the share of it."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    data = open_split(options.work / "data", "train")
    model = plain_regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=REGRESSOR_RATE, weight_decay=1e-4)
    generator = np.random.default_rng(options.seed)
    order, samples = generator.permutation(len(data)), 0
    while (share := share_done()) < 1:
        start = samples % (len(data) - REGRESSOR_BATCH)
        batch = [data[int(i)] for i in order[start : start + REGRESSOR_BATCH]]
        voltages, images = (
            torch.from_numpy(np.stack([item[name] for item in batch]))
            for name in ("voltages", "image")
        )
        for group in optimizer.param_groups:
            group["lr"] = REGRESSOR_RATE * (0.01 + 0.99 * (1 + np.cos(np.pi * share)) / 2)
        optimizer.zero_grad()
        (model(voltages) - images).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        samples += REGRESSOR_BATCH
    return model, samples


def steps_done(options: argparse.Namespace) -> float:
    """Share of the command's steps done, from its log of metrics."""
    path = options.work / "run" / "metrics.jsonl"
    try:
        last = path.read_text().strip().rsplit("\n", 1)[-1]
        return min(1.0, json.loads(last)["step"] / options.steps)
    except (OSError, ValueError, KeyError):
        return 0.0


# -- metrics ---------------------------------------------------------------------------------------


@torch.no_grad()
def regressor_images(model: nn.Module, data: EITDataset, ys: np.ndarray) -> dict[str, np.ndarray]:
    """Of the measurements as they are, and the mean over their symmetries, which tpukit takes."""
    images = []
    for symmetry in SYMMETRIES:
        turned = symmetry.of_voltages(ys)
        maps = voltage_map(turned, data.normalisation.mean, data.normalisation.std)
        inputs: Tensor = torch.from_numpy(np.asarray(maps, np.float32))[:, None]
        images.append(symmetry.undo(model(inputs).squeeze(1).numpy()))
    return {REGRESSOR: images[0], AVERAGED: np.mean(images, axis=0)}


def table_of(
    answer: dict[str, Any], regressors: dict[str, np.ndarray], truth: np.ndarray
) -> dict[str, Any]:
    """Each way's metrics: mean and 95 % interval."""
    table = {
        way: {
            metric: [answer["metrics"][f"{metric}{suffix}"],
                     *answer["intervals"][f"{metric}{suffix}"]]
            for metric in METRICS
        }
        for way, suffix in WAYS.items()
    }  # fmt: skip
    ours = measure_all(np.load(answer["predictions"])["images"], truth)
    regressed = {way: measure_all(images, truth) for way, images in regressors.items()}
    table |= {way: intervals(values) for way, values in regressed.items()}
    for way, name in ((REGRESSOR, "regressor"), (AVERAGED, "its mean")):
        differences = {metric: ours[metric] - regressed[way][metric] for metric in METRICS}
        table[PAIRED.format(name)] = intervals(differences)
    return table


def intervals(values: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """Each metric's mean and 95 % interval over the images."""
    return {n: [float(v.mean()), *(mean_interval(v) or ())] for n, v in values.items()}


def test_on(
    options: argparse.Namespace, model: nn.Module, data: str, path: Path, limit: int | None
) -> dict[str, Any]:
    words = (
        "test", "--run", options.work / "run", "--hw", "cpu", "--data", data, "--data-path", path,
        "--samples", options.samples, "--out", options.work / f"test-{data}",
    )  # fmt: skip
    answer = run_json(*words, *(["--limit", limit] if limit else []))
    frames = open_test_set(data, path, EvaluationOptions(limit=limit))
    train = open_split(options.work / "data", "train", data_normalisation(options.work / "data"))
    images = regressor_images(model, train, frames.ys)
    return table_of(answer, images, frames.xs)


def print_table(title: str, table: dict[str, Any]) -> None:
    print(f"\n{title}\n| |" + "|".join(METRICS) + "|\n|---|" + "---|" * len(METRICS))
    for way, metrics in table.items():
        cells = (f"{mean:.3f} [{low:.3f}, {high:.3f}]" for mean, low, high in metrics.values())
        print(f"| {way} | " + " | ".join(cells) + " |")


def main() -> None:
    options = parse()
    data = options.work / "data"
    if not (data / "mean.pth").exists():
        run_json("data", "eit", "--out", data, "--n", options.n, "--seed", options.seed)
    metrics, model = train_both(options)
    measured = test_on(options, model, "uef2017", options.uef2017, None)
    simulated = test_on(options, model, "simulated", data, 256)
    body = {
        "question": "correlation and errors on measured frames, trained on simulated data alone",
        "settings": {
            name: getattr(options, name)
            for name in ("n", "size", "steps", "batch", "samples", "seed")
        },
        "training_minutes": metrics["minutes"],
        "threads_each": 1,
        "cores": len(os.sched_getaffinity(0)),
        "samples_seen": {
            "diffusion": metrics["steps"] * options.batch,
            "regressor": metrics["regressor_samples_seen"],
        },
        "parameters": {"regressor": sum(p.numel() for p in model.parameters())},
        "uef2017": measured,
        "simulated": simulated,
    }
    write_result(options.out, body)
    print_table("UEF2017, 22 measured frames", measured)
    print_table("Simulated test split", simulated)
    print(f"\nTrained for {metrics['minutes']:.1f} minutes, one thread each. {options.out}")


if __name__ == "__main__":
    main()
