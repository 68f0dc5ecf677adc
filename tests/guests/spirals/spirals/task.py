"""The task: a small denoising diffusion model of points in the plane."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from spirals.settings import Drawing, Sampling, Settings, SpiralPoints
from tpukit import Datasets, Preset, Task, TpukitError, TrainingDefaults


class Points:
    def __init__(self, points):
        self.points = points

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return {"point": self.points[index]}


class Spirals(Task):
    """Points on a spiral by diffusion."""

    name = "spirals"
    options = Settings
    test_options = Sampling
    predict_options = Drawing
    folder = "spirals-run"
    generators = {"spiral-points": SpiralPoints}
    metric_names = {"distance": "distance to the data ↓"}
    defaults = TrainingDefaults(global_batch_size=64, max_steps=20, lr=3e-3)
    presets = {"quick": Preset(train={"max_steps": 4}, task={"width": 8})}

    def datasets(self):
        file = Path(self.settings.data_path) / "points.npy"
        if not file.is_file():
            raise TpukitError(f"{file} does not exist.", "Run `tpukit data spiral-points`.")
        points = np.load(file)
        return Datasets(Points(points[10:]), Points(points[:10]))

    def build_model(self, ops):
        width = self.settings.width
        return nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, 2))

    def draw(self, sample, rng):
        noise = rng.standard_normal(2).astype(np.float32)
        return {**sample, "level": np.float32(rng.uniform()), "noise": noise}

    def loss(self, model, batch):
        level = batch["level"][:, None]
        noisy = (1 - level).sqrt() * batch["point"] + level.sqrt() * batch["noise"]
        target = batch["noise"] if self.settings.target == "noise" else batch["point"]
        return {"loss": (model(torch.cat([noisy, level], 1)) - target).square().mean(1)}

    @torch.no_grad()
    def sample(self, model, device, options):
        generator = torch.Generator().manual_seed(0)
        points = torch.randn(options.draws, 2, generator=generator)
        levels = torch.linspace(0.99, 0.01, self.settings.noise_levels)
        for level, after in zip(levels, [*levels[1:], torch.tensor(0.0)], strict=True):
            given = torch.cat([points, level.expand(len(points), 1)], 1)
            made = model(given.to(device)).cpu().float()
            clean = (points - level.sqrt() * made) / (1 - level).sqrt()
            clean = clean if self.settings.target == "noise" else made
            noise = (points - (1 - level).sqrt() * clean) / level.sqrt()
            if options.ancestral:
                noise = torch.randn(points.shape, generator=generator)
            points = (1 - after).sqrt() * clean + after.sqrt() * noise
        return points.numpy()

    def evaluate(self, model, backend, request, log):
        made = self.sample(model, backend.device, request.options)
        truth = np.load(Path(self.settings.data_path) / "points.npy")[: request.limit]
        distances = np.linalg.norm(made[:, None] - truth[None], axis=2).min(1)
        picture = request.run.path / "points.png"
        if backend.is_main:
            self.draw_picture(made, truth, picture)
        metrics = {"distance": float(distances.mean())}
        return {
            "task": self.name,
            "samples": len(made),
            "metrics": metrics,
            "picture": str(picture),
            "ancestral": request.options.ancestral,
        }

    def draw_picture(self, made, truth, path):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3, 3))
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(*truth.T, ".", *made.T, ".")
        figure.savefig(path)

    def predict(self, model, backend, request, log):
        made = self.sample(model, backend.device, request.options)
        out = request.out or Path(f"points.{request.options.file_type}")
        if out.suffix == ".csv":
            np.savetxt(out, made, delimiter=",")
        else:
            np.save(out, made)
        log(f"{len(made)} points in {out}")
        return {"rows": len(made), "path": str(out)}
