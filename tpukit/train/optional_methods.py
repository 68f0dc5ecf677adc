"""The methods of a task that `Task` does not have: most tasks need none of them."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from tpukit.hardware.backend import Backend
from tpukit.train.data import SampleSource
from tpukit.train.requests import EvaluationRequest, PredictionRequest
from tpukit.train.submission import Predictions
from tpukit.train.task import Task


class OptionalMethods(Task):
    """What a task may define beyond `Task`, not its base: `overrides` looks for each by name."""

    @abstractmethod
    def as_recorded(self, identity: Mapping[str, Any]) -> Self:
        """This task with the settings of an older run, whose checkpoint has this identity, where
        later versions have another default."""

    @abstractmethod
    def for_probing(self) -> Self:
        """The task where only shapes matter: it reads no weights and asks no network."""

    @abstractmethod
    def count_samples(self) -> int | None:
        """Number of training samples, where that costs little: a larger batch has no use."""

    @abstractmethod
    def forms(self) -> Sequence[Self]:
        """This task in the forms that memory chooses from, the fastest first: the first that fits
        whole is trained. Each has `given_settings` of its own, which tell them apart."""

    @abstractmethod
    def score(self, model: nn.Module, backend: Backend, data: SampleSource) -> dict[str, float]:
        """Further validation metrics (ROUGE on a few samples); costly ones limit their samples."""

    @abstractmethod
    def export(
        self, weights: Mapping[str, Tensor], artifacts: Mapping[str, bytes], folder: Path
    ) -> list[Path]:
        """Writes a run's weights and artifacts for use without tpukit; the files.

        Without it: a safetensors file of the model's state dict, with a README (`weights.export`).
        """

    @abstractmethod
    def read_checkpoint_file(self, path: Path) -> dict[str, Tensor]:
        """Weights from a checkpoint file of other code (`test --checkpoint FILE`)."""

    @abstractmethod
    def evaluate(
        self,
        model: nn.Module,
        backend: Backend,
        request: EvaluationRequest,
        log: Callable[[str], None],
    ) -> dict[str, Any]:
        """The JSON fields of `tpukit test`, called as `predict` is. Without it: the metrics of the
        validation data."""

    @abstractmethod
    def check_prediction(self, request: PredictionRequest) -> None:
        """Raises the errors of `predict` that can be found before a device is opened."""

    @abstractmethod
    def predict_rows(
        self,
        model: nn.Module,
        backend: Backend,
        request: PredictionRequest,
        log: Callable[[str], None],
    ) -> Predictions:
        """Raw predictions of the rows of a test file, called as `predict` is and in its place:
        several runs are averaged, decided and written as the sample submission asks."""
