"""Images a second a core: tpukit's loader, timm's and torchvision's, on the same JPEG files.

    python benchmarks/image_loading.py [--images 1500] [--rounds 3]

Each decodes, crops to 224 x 224, flips and jitters colours in two DataLoader workers, in turn, in
one run. timm's loader and torchvision's also normalise to float32 on the host; tpukit's sends uint8
and normalises on the device.
"""

import argparse
import importlib.metadata
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deciding_code import write_result
from PIL import Image

RESULTS = Path(__file__).parent / "results"
WORKERS, BATCH, SIDE = 2, 50, 224
SIZE = (500, 375)
"""Of the files, as in ImageNet."""
JITTER = 0.4


def write_photographs(folder: Path, count: int) -> None:
    """Smooth random images with some noise: about 60 kB each at quality 90."""
    rng = np.random.default_rng(0)
    for index in range(count):
        small = Image.fromarray(rng.integers(0, 255, (12, 16, 3), np.uint8))
        smooth = np.asarray(small.resize(SIZE, Image.Resampling.BICUBIC), np.float32)
        noisy = np.clip(smooth + rng.normal(0, 8, smooth.shape), 0, 255).astype(np.uint8)
        path = folder / f"class{index % 4}" / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy).save(path, quality=90)


def ours(folder: Path) -> Iterable[Any]:
    from tpukit.io.process import WorkerInit
    from tpukit.tasks.images.task import ImagesTask
    from tpukit.train.loader import LoaderSettings, PlannedMicroBatches, make_loader
    from tpukit.train.task import PlanSettings

    task = ImagesTask(data_path=str(folder), model="resnet50", image_size=SIDE, valid_fraction=0)
    data = task.datasets().train
    plan = task.plan(data, PlanSettings(BATCH, BATCH, 1, 0))
    steps = PlannedMicroBatches(plan, range(len(data) // BATCH), 0, 1)
    return make_loader(task, data, steps, LoaderSettings(WORKERS, 0, WorkerInit()))


def timms(folder: Path) -> Iterable[Any]:
    from timm.data import create_dataset, create_loader

    return create_loader(
        create_dataset("", folder), (3, SIDE, SIDE), BATCH, is_training=True, use_prefetcher=False,
        num_workers=WORKERS, color_jitter=JITTER, persistent_workers=False, pin_memory=False,
        device=torch.device("cpu"), interpolation="bicubic",
    )  # fmt: skip


def torchvisions(folder: Path) -> Iterable[Any]:
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    transform = transforms.Compose([
        transforms.RandomResizedCrop(
            SIDE, interpolation=transforms.InterpolationMode.BICUBIC),
        transforms.RandomHorizontalFlip(),
        transforms.ColorJitter(JITTER, JITTER, JITTER),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])  # fmt: skip
    return torch.utils.data.DataLoader(
        ImageFolder(str(folder), transform), BATCH, shuffle=True, num_workers=WORKERS,
        drop_last=True,
    )  # fmt: skip


LOADERS: dict[str, Callable[[Path], Iterable[Any]]] = {
    "tpukit": ours, "timm": timms, "torchvision": torchvisions,
}  # fmt: skip


def rate(loader: Iterable[Any]) -> float:
    """Images a second a core, from the second batch on."""
    batches = iter(loader)
    next(batches)
    started, count = time.monotonic(), 0
    for _ in batches:
        count += BATCH
    return count / (time.monotonic() - started) / WORKERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in LOADERS}
    with tempfile.TemporaryDirectory() as place:
        write_photographs(Path(place), options.images)
        for _ in range(options.rounds):
            for name, make in LOADERS.items():
                rates[name].append(rate(make(Path(place))))
                print(f"{name}: {rates[name][-1]:.0f} images/s a core", flush=True)
    middle = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "question": "images loaded a second a core",
        "settings": {"images": options.images, "size": SIZE, "side": SIDE, "workers": WORKERS,
                     "rounds": options.rounds, "cores": os.cpu_count()},
        "versions": {n: importlib.metadata.version(n)
                     for n in ("torch", "torchvision", "timm", "pillow", "tpukit")},
        "images_per_second_per_core": middle,
        "ratio_to_timm": middle["tpukit"] / middle["timm"],
        "ratio_to_torchvision": middle["tpukit"] / middle["torchvision"],
        "rates": rates,
    }  # fmt: skip
    write_result(RESULTS / "image_loading.json", result)


if __name__ == "__main__":
    main()
