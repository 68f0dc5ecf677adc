"""A finished training as `test`, `predict` and exports need it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from tpukit.errors import CheckpointError
from tpukit.hardware.backend import Backend
from tpukit.tasks.summarize.evaluation.prediction import default_test_file
from tpukit.tasks.summarize.model.weights import export_hugging_face
from tpukit.tasks.summarize.task import SummarizeTask
from tpukit.train.run_folder import RunFolder, TrainedRun, open_run, read_config

Tell = Callable[[str], None]


@dataclass(frozen=True)
class TrainedSummarizer:
    """A run's task with its tokenizer and shape restored, and the run itself."""

    task: SummarizeTask
    run: TrainedRun

    def tensors(self) -> dict[str, Tensor]:
        """The weights with adapters merged, on the CPU."""
        return self.task.merged(self.run.weights())

    def model(self, backend: Backend) -> nn.Module:
        """The model on its device, in eval mode."""
        model = self.task.inference_model(backend, self.run.weights())
        return backend.prepare(model, train=False).eval()


def open_summarizer(path: Path, tell: Tell) -> TrainedSummarizer:
    """Opens a run folder of summaries. Raises `CheckpointError` for any other run."""
    return summarizer_of(open_run(path, tell))


def summarizer_of(run: TrainedRun) -> TrainedSummarizer:
    """The task of an opened run. Raises `CheckpointError` for another task's."""
    if run.task != SummarizeTask.name:
        raise CheckpointError(
            f"{run.path} is a run of task {run.task!r}, not of summaries.",
            "Give the run folder of a summarize-train with --run DIR.",
        )
    settings = {"data_path": run.train_config.get("data_path", "./data"), **run.task_config}
    task = SummarizeTask(**settings)
    return TrainedSummarizer(task.restore(run.checkpoint.artifacts()), run)


def export_run(path: Path, folder: Path, tell: Tell) -> None:
    """Writes a run's best weights as a Hugging Face directory."""
    trained = open_summarizer(path, tell)
    export_hugging_face(
        folder, trained.task.model_config, trained.tensors(), trained.task.tokenizer
    )


def usual_test_file(path: Path) -> Path:
    """The test.csv beside the file that a run was trained on."""
    folder = path.parent.parent if path.parent.name == "checkpoints" else path
    tables = read_config(RunFolder(folder))
    return default_test_file(Path(tables.get("train", {}).get("data_path", "./data")))
