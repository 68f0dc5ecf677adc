"""The text task: any encoder of transformers, or decoder with adapters, on a table of texts."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tpukit.errors import CheckpointError, DataError
from tpukit.hardware.backend import Backend, Batch, ModelOps, ParameterGroup
from tpukit.io.hub_data import local_data
from tpukit.io.process import is_first_rank
from tpukit.io.tables import Table, read_table, table_file
from tpukit.tasks.text.data.lengths import AlikePlan, LengthShapes, chosen_lengths
from tpukit.tasks.text.data.texts import (
    TextSamples,
    digest,
    text_columns,
    texts_in,
    tokenised,
    with_ids,
)
from tpukit.tasks.text.generate import Reviews
from tpukit.tasks.text.settings import SCRATCH, TextConfig
from tpukit.train.evaluation import infer
from tpukit.train.labelled import (
    LabelledTable,
    columns_of_tests,
    labelled,
    remarks_on_parts,
    sample_beside,
    table_with_rows,
    training_table,
    validation_rows_of,
)
from tpukit.train.metrics import mean_by_sample
from tpukit.train.pseudo import pseudo_labels, soft
from tpukit.train.requests import PredictionRequest
from tpukit.train.submission import Predictions
from tpukit.train.target import Target
from tpukit.train.target_loss import TargetLoss, balanced_weights
from tpukit.train.task import (
    BatchPlan,
    Datasets,
    MicroBatch,
    PlanSettings,
    Preset,
    Sample,
    SampleSource,
    Task,
    TrainingDefaults,
    stack_samples,
)
from tpukit.train.weights import README_FILE, readme, write_export

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET_FILE, TEXT_FILE, MODEL_FILE = "target.json", "text.json", "model.json"
TOKENIZER = "tokenizer-"
"""What the names of a tokenizer's files begin with in a checkpoint."""
ELSEWHERE = (
    "data_path", "table", "id_column", "columns", "target", "sample_submission", "text_columns",
    "probabilities", "recompute", "pseudo",
)  # fmt: skip
"""Settings that do not decide the arithmetic of a run that goes on."""
PROBLEM_TYPES = {
    "cross_entropy": "single_label_classification",
    **dict.fromkeys(("bce", "asymmetric", "ordinal"), "multi_label_classification"),
    **dict.fromkeys(("mse", "mae", "huber"), "regression"),
}
"""Loss -> what transformers' pipelines apply to scores: softmax, sigmoid or nothing."""
LORA_LR = 2e-4
"""Peak rate of adapters."""


class TextTask(Task):
    """Learns what a `Target` says of a text.

    A batch has `input_ids`, `attention_mask` (rows, tokens), `label` (see `Target.values`), and
    `sample` (rows,), the text that a row is a window of.
    """

    name = "text"
    settings: TextConfig
    options = TextConfig
    data_columns: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("text", "label"), ("text", "target"), ("full_text", "score"), ("comment_text", "toxic"),
        ("excerpt", "target"), ("sentence", "label"), ("review", "sentiment"),
        ("premise", "hypothesis", "label"),
    )  # fmt: skip
    data_needs: ClassVar[str] = "train.csv of texts and labels (text, label)"
    generators: ClassVar[Mapping[str, type[Any]]] = {"reviews": Reviews}
    metric_names: ClassVar[Mapping[str, str]] = {"accuracy": "accuracy ↑"}
    defaults = TrainingDefaults(
        global_batch_size=32, epochs=3, lr=2e-5, schedule="linear", warmup_steps=20,
        final_lr_fraction=0.0, weight_decay=0.01,
    )  # fmt: skip
    presets: ClassVar[Mapping[str, Preset]] = {
        "quick": Preset(
            train={"global_batch_size": 32, "epochs": 3, "lr": 1e-3, "warmup_steps": 10},
            task={"model": SCRATCH, "max_length": 128},
        ),
    }
    predicts: Target | None = None
    """What is learned, once the data or a run has said it."""
    columns: tuple[str, ...] = ()
    """The columns of the texts."""
    lengths: tuple[int, ...] = ()
    """Those that batches of training have."""
    kept: Mapping[str, bytes] | None = None
    """A run's artifacts, which it goes on with; None: of a new run."""
    reads_weights = True

    def __init__(self, **settings: Any) -> None:
        """Settings are the fields of `TextConfig`."""
        super().__init__(**settings)
        if self.settings.lora_rank:
            self.defaults = replace(type(self).defaults, lr=LORA_LR)

    # -- data -------------------------------------------------------------------------------------
    @property
    def criterion(self) -> TargetLoss:
        """The loss of what is learned; where no data is opened, of two classes."""
        target = self.predicts or Target("class", ("label",), ("0", "1"))
        return TargetLoss(target, self.settings.loss)

    @cached_property
    def tokenizer(self) -> Any:
        """A run's, that of the model, or one trained on the texts."""
        from tpukit.tasks.text.model import reader

        if self.kept is not None:
            files = {n.removeprefix(TOKENIZER): c for n, c in self.kept.items()
                     if n.startswith(TOKENIZER)}  # fmt: skip
            return reader.tokenizer_from(files)
        if self.weights is not None:
            return reader.read_tokenizer(self.weights)
        table = self._table()
        if table is None:
            return reader.tokenizer_of_texts(["a text"])
        found = self._labelled(table)
        columns = self._columns(found)
        return reader.tokenizer_of_texts([t for name in columns for t in table.column(name)])

    @cached_property
    def weights(self) -> Path | None:
        """The folder of the model to start from."""
        from tpukit.tasks.text.model import reader

        return reader.folder_of(self.settings)

    @cached_property
    def form(self) -> Any:
        """The configuration of the model."""
        from tpukit.tasks.text.model import reader

        if self.kept is not None:
            return reader.config_from(json.loads(self.kept[MODEL_FILE]))
        return reader.read_form(self.weights, self.tokenizer, self.settings)

    @property
    def _data(self) -> TextConfig:
        return replace(self.settings, data_path=str(local_data(self.settings.data_path)))

    def _table(self) -> Table | None:
        return training_table(self._data)

    def _labelled(self, table: Table, known: Target | None = None) -> LabelledTable:
        data, root = self._data, Path(self._data.data_path)
        texts = self.columns or texts_in(table, data.texts)
        sample = sample_beside(root, data.sample_submission)
        table, ids = with_ids(table, data, texts, sample, columns_of_tests(root))
        return labelled(table, replace(data, id_column=ids), known or self.predicts, apart=texts)

    def _columns(self, found: LabelledTable) -> tuple[str, ...]:
        tests, learned = columns_of_tests(Path(self._data.data_path)), found.target.of_table
        return self.columns or tuple(
            text_columns(found.table, self.settings, found.id_column, learned, tests)
        )

    def datasets(self) -> Datasets:
        """The rows of the training table, those for validation apart."""
        table = self._table()
        if table is None:
            raise DataError(
                f"There is no table {table_file(Path(self._data.data_path), 'train')}.",
                "`tpukit data reviews --out data` makes one to try; --data-path names yours.",
            )
        found = self._labelled(table)
        self.columns = self._columns(found)
        texts = [table.column(name) for name in self.columns]
        beside = table_file(Path(self._data.data_path), "valid")
        if beside.is_file() and self.settings.fold is None and not self.settings.group_column:
            other = self._labelled(table_with_rows(beside), found.target)
            parts, ids = (
                [(texts, found.values), (self._texts(other.table), other.values)],
                other.ids,
            )
        else:
            joined = ["\n".join(row) for row in zip(*texts, strict=True)]
            apart = validation_rows_of(found, self._data, joined)
            rows = [[r for r in range(len(joined)) if (r in apart) == is_apart]
                    for is_apart in (False, True)]  # fmt: skip
            parts = [([[t[r] for r in part] for t in texts], found.values[part]) for part in rows]
            ids = [found.ids[row] for row in rows[1]]
        # A run keeps its own mean and standard deviation, whatever it is tested on.
        self.predicts = self.predicts or found.target.fitted(parts[0][1])
        if more := pseudo_labels(self._data, self.predicts):
            (texts, values), further = parts[0], self._texts(more.rows_of(*self._tests()))
            both = [soft(self.predicts, values), more.values]
            parts[0] = [[*a, *b] for a, b in zip(texts, further, strict=True)], np.concatenate(both)
        _ = self.criterion  # a loss that does not fit ends here
        if is_first_rank():
            for remark in (self._remark(), *remarks_on_parts(table, found.target, self._data)):
                print(remark, file=sys.stderr, flush=True)
        weights = self._weights(parts[0][1])
        train = tokenised(self.tokenizer, *parts[0], self.settings, weights)
        valid = tokenised(self.tokenizer, *parts[1], self.settings) if len(parts[1][1]) else None
        known = np.concatenate([train.lengths, valid.lengths if valid else train.lengths[:0]])
        most = self.settings.max_length
        self.lengths = tuple(chosen_lengths(known, self.settings.shapes, most))
        return Datasets(
            train, valid,
            artifacts={
                TARGET_FILE: self.predicts.to_json(),
                TEXT_FILE: json.dumps({"columns": self.columns}).encode(),
                MODEL_FILE: json.dumps(self.form.to_dict()).encode(),
                **self._tokenizer_files(),
            },
            identity={"data": digest(*parts[0], *parts[1])}, ids=ids,
        )  # fmt: skip

    def _remark(self) -> str:
        assert self.predicts is not None
        return f"{self.predicts.remark()}; of the text in {', '.join(self.columns)}."

    def _texts(self, table: Table) -> list[list[str]]:
        return [table.column(name) for name in self.columns]

    def _weights(self, values: NDArray[Any]) -> dict[str, NDArray[np.float32]]:
        if self.settings.class_weights == "none":
            return {}
        target = self.criterion.target
        name = "label_weight" if target.kind == "labels" else "weight"
        return {name: balanced_weights(target, values)}

    def _tokenizer_files(self) -> dict[str, bytes]:
        from tpukit.tasks.text.model import reader

        files = reader.tokenizer_files(self.tokenizer)
        return {f"{TOKENIZER}{name}": content for name, content in files.items()}

    def identity(self) -> dict[str, Any]:
        return {n: value for n, value in asdict(self.settings).items() if n not in ELSEWHERE}

    def restore(self, artifacts: Mapping[str, bytes]) -> Self:
        if TEXT_FILE not in artifacts:
            raise CheckpointError(
                f"The checkpoint holds no {TEXT_FILE}.", "Is it a run of the text task?"
            )
        other = type(self)(**asdict(self.settings))
        other.kept = artifacts
        other.predicts = Target.from_json(artifacts[TARGET_FILE])
        other.columns = tuple(json.loads(artifacts[TEXT_FILE])["columns"])
        return other

    # -- batches ----------------------------------------------------------------------------------
    def _shapes(self, data: TextSamples, settings: PlanSettings) -> LengthShapes:
        fixed = self.lengths
        if not fixed or data.lengths.max() > fixed[-1]:
            fixed = tuple(
                chosen_lengths(data.lengths, self.settings.shapes, self.settings.max_length)
            )
        return LengthShapes(data.lengths, fixed, settings.compiles)

    def plan(self, data: Any, settings: PlanSettings) -> BatchPlan:
        return AlikePlan(self._shapes(data, settings), settings)

    def evaluation_batches(
        self, data: SampleSource, settings: PlanSettings
    ) -> Iterator[MicroBatch]:
        assert isinstance(data, TextSamples)
        return self._shapes(data, settings).all_once(settings)

    def collate(self, samples: Sequence[Sample], micro: MicroBatch) -> Batch:
        """Filled up to the length of the batch on the right."""
        fill = {"input_ids": self.tokenizer.pad_token_id, "token_type_ids": 0}
        rows = []
        for sample in samples:
            tokens = sample["input_ids"]
            row = {**sample, "attention_mask": np.zeros(micro.shape, np.int64)}
            row["attention_mask"][: len(tokens)] = 1
            for name in fill.keys() & sample.keys():
                row[name] = np.full(micro.shape, fill[name], np.int64)
                row[name][: len(tokens)] = sample[name]
            rows.append(row)
        return stack_samples(rows, micro.rows)

    def probe_batches(self, settings: PlanSettings) -> list[Batch]:
        """A batch of each length, the longest first; without data of `max_length` alone."""
        if not self.lengths and self._table() is not None:
            self.known_samples = len(self.datasets().train)
        target = self.criterion.target
        label = target.blank(soft=self.settings.pseudo is not None)
        tokens = np.ones(1, np.int32)
        weights = self._weights(label[None])
        data = TextSamples([tokens], None, np.zeros(1, np.int64), label[None], weights)
        if "token_type_ids" in self.tokenizer.model_input_names:
            data = replace(data, kinds=[tokens * 0])
        rows = settings.micro_rows
        micros = [MicroBatch((), rows, n) for n in self.lengths[::-1] or [self.settings.max_length]]
        batches = [self.collate([data[0]] * rows, micro) for micro in micros]
        return [{**b, "attention_mask": torch.ones_like(b["attention_mask"])} for b in batches]

    def for_probing(self) -> Self:
        other = type(self)(**asdict(self.settings))
        other.reads_weights = False
        return other

    def forms(self) -> Sequence[Self]:
        """With `recompute=auto` the task without and with recomputation."""
        if self.settings.recompute != "auto":
            return (self,)
        return tuple(self._with_recompute(choice) for choice in (False, True))

    def _with_recompute(self, choice: bool) -> Self:
        other = type(self)(**{**asdict(self.settings), "recompute": choice})
        other.__dict__ |= {**self.__dict__, "config": other.settings}
        other.given_settings = {**self.given_settings, "recompute": choice}
        return other

    # -- model ------------------------------------------------------------------------------------
    def build_model(self, ops: ModelOps) -> nn.Module:
        from tpukit.tasks.text.model import reader

        criterion, is_new = self.criterion, self.kept is None
        names = criterion.target.predicted if criterion.target.kind in ("class", "labels") else ()
        return reader.build_reader(
            self.settings, self.form, ops, outputs=criterion.outputs, names=names,
            folder=self.weights if is_new and self.reads_weights else None,
            pad=self.tokenizer.pad_token_id, recompute=self.settings.recompute is True,
            drawn=is_new,
        )  # fmt: skip

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        from tpukit.tasks.text.model import reader

        return list(reader.reader_groups(model, weight_decay, self.settings.layer_decay))

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """(rows, outputs) of the model."""
        names = ("input_ids", "attention_mask", "token_type_ids")
        found: Tensor = model(**{name: batch[name] for name in names if name in batch}).logits
        return found.float()

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Each row's loss; while training with label smoothing and weights."""
        scores, label = self.scores(model, batch), batch["label"]
        smoothing = self.settings.smoothing if model.training else 0.0
        labels = batch.get("label_weight") if model.training else None
        criterion = self.criterion
        loss = criterion.losses(scores, label, smoothing=smoothing, weights=labels)
        found = {"loss": loss, "weight": batch["weight"]}
        if criterion.target.kind == "class":
            best = label.argmax(1) if label.ndim == 2 else label
            found["accuracy"] = (scores.argmax(1) == best).float()
        elif criterion.target.kind == "labels":
            found["accuracy"] = ((scores > 0) == (label > 0.5)).float().mean(1)
        return found

    def predictions(self, model: nn.Module, batch: Batch) -> Tensor:
        """(rows, predicted) probabilities, numbers or expected scores."""
        return self.criterion.predictions(self.scores(model, batch))

    def validation_rows(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        predicted = self.predictions(model, batch)
        if self.criterion.target.kind == "score":
            predicted = predicted[:, 0]
        return {"target": batch["label"], "prediction": predicted, "sample": batch["sample"]}

    # -- a trained run ----------------------------------------------------------------------------
    def export(
        self, weights: Mapping[str, Tensor], artifacts: Mapping[str, bytes], folder: Path
    ) -> list[Path]:
        """A Hugging Face directory, adapters merged; of another pooling the state dict."""
        from tpukit.tasks.text.export import export_hugging_face_classifier

        model: Any = self.plain_model(weights)
        if self.settings.pooling != "model":
            text = readme(self, weights, artifacts)
            return write_export(
                folder, model.state_dict(), {**artifacts, README_FILE: text.encode()}
            )
        model.config.problem_type = PROBLEM_TYPES[self.criterion.name or ""]
        texts = ", ".join(f'"a {name}"' for name in self.columns[:2])
        return export_hugging_face_classifier(
            model, self.tokenizer, artifacts[TARGET_FILE], folder, texts=texts,
            length=self.settings.max_length, what=self.criterion.target,
            formula=self.criterion.formula(),
            overlap=self.settings.overlap if self.settings.long_texts == "windows" else None,
        )  # fmt: skip

    def check_prediction(self, request: PredictionRequest) -> None:
        self._texts(self._tests(request)[0])

    def _tests(self, request: PredictionRequest | None = None) -> tuple[Table, str]:
        """The test table and the column of its ids."""
        folder = Path(self._data.data_path)
        path, sample = table_file(folder, "test"), None
        if request is not None:
            path = request.test_csv or table_file(request.data_path or folder, "test")
            sample = request.sample_submission and read_table(request.sample_submission)
        table = table_with_rows(path)
        return with_ids(table, self._data, {*self.columns}, sample or None, needed=1)

    def predict_rows(
        self, model: nn.Module, backend: Backend, request: PredictionRequest,
        log: "Callable[[str], None]",
    ) -> Predictions:  # fmt: skip
        """The predictions of a test table; a text's windows are averaged."""
        (table, ids), target = self._tests(request), self.criterion.target
        texts = self._texts(table)
        blank = np.zeros((len(table.rows), 1), np.float32)
        data = tokenised(self.tokenizer, texts, blank, self.settings)

        def forward(batch: Batch) -> Tensor:
            found: Tensor = backend.call(model, self.predictions, batch)
            return found

        found = infer(self, data, forward, backend)
        return Predictions(
            table.column(ids), mean_by_sample(data.text, found), target, ids,
            probabilities=self.settings.probabilities,
        )  # fmt: skip
