"""Dialogue summaries with GPT-2 as a task of the engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpukit.errors import ConfigError, DataError
from tpukit.hardware.backend import Backend, Batch, ModelOps
from tpukit.tasks.summarize.config import FINE_TUNING, FROM_SCRATCH, PRESETS, SummarizeConfig
from tpukit.tasks.summarize.data.buckets import (
    Bucket,
    BucketPlan,
    choose_lengths,
    evaluation_plan,
    make_buckets,
)
from tpukit.tasks.summarize.data.samples import (
    IGNORED,
    HasSizes,
    TokenSamples,
    collate,
    example_batch,
    split_samples,
)
from tpukit.tasks.summarize.data.token_cache import (
    TokenCache,
    file_digest,
    open_token_cache,
)
from tpukit.tasks.summarize.data.tokenizer import Tokenizer, load_tokenizer
from tpukit.tasks.summarize.data.tokenizer_choice import trained_tokenizer, usual_tokenizer
from tpukit.tasks.summarize.evaluation.rouge import rouge_scores
from tpukit.tasks.summarize.generation.generate import Decoding, Prompt
from tpukit.tasks.summarize.generation.summaries import clean_summary, summarise
from tpukit.tasks.summarize.model.gpt2 import GPT2, GPT2Config, PlainOps
from tpukit.tasks.summarize.model.lora import add_lora, merge_lora
from tpukit.tasks.summarize.model.weights import (
    Pretrained,
    cropped,
    parse_size,
    read_pretrained,
    require_vocabulary,
)
from tpukit.tasks.summarize.progress import RowProgress
from tpukit.train.requests import EvaluationRequest, PredictionRequest
from tpukit.train.restore import load_weights
from tpukit.train.task import (
    BatchPlan,
    Datasets,
    MicroBatch,
    PlanSettings,
    Sample,
    SampleSource,
    Task,
)

Log = Callable[[str], None]
TOKENIZER_FILE = "tokenizer.tiktoken"
MODEL_FILE = "model.json"


class SummarizeTask(Task):
    """Learns the summary that follows a dialogue; only its tokens are targets."""

    name = "summarize"
    config_class = SummarizeConfig
    presets = PRESETS

    def __init__(self, **settings: Any) -> None:
        """Settings are the fields of `SummarizeConfig`."""
        self.config = SummarizeConfig(**settings)
        self.config.check()
        self.defaults = replace(FINE_TUNING, lr=1e-3) if self.config.from_scratch else FINE_TUNING
        self.devices = 1
        self.buckets: list[Bucket] = []
        self._lengths: list[int] = []
        self._most_targets = 0
        self._digest = ""
        self._tokenizer: Tokenizer | None = None
        self._model_config: GPT2Config | None = None
        self._pretrained: Pretrained | None = None

    @property
    def generation_slots(self) -> int:
        return self.config.generation_slots

    # -- data -----------------------------------------------------------------------------------
    @property
    def train_file(self) -> Path:
        path = Path(self.config.data_path)
        return path if path.suffix == ".csv" else path / "train.csv"

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer: restored, read, or trained on the training file."""
        if self._tokenizer is None:
            name = self.config.tokenizer or usual_tokenizer(self.config.init)
            if name == "train":
                self._tokenizer = trained_tokenizer(self.train_file, self.config.vocabulary_size)
            else:
                self._tokenizer = load_tokenizer(name)
        return self._tokenizer

    def datasets(self) -> Datasets:
        """Training and validation samples as tokens; the cache is built on first use."""
        if not self.train_file.is_file():
            raise DataError(
                f"There is no training file {self.train_file}.",
                "`tpukit data dialogues --out data` makes one to try; --data-path names yours.",
            )
        self._digest = file_digest(self.train_file)[:16]
        cache = self.open_cache(self.train_file)
        valid: TokenSamples | None
        if self.config.valid_file is not None:
            train = TokenSamples(cache, np.arange(len(cache)))
            valid_cache = self.open_cache(Path(self.config.valid_file))
            valid = TokenSamples(valid_cache, np.arange(len(valid_cache)))
        else:
            train, valid = split_samples(cache, self.config.valid_fraction, self.config.split_seed)
        self._lengths = bucket_lengths(train, valid, self.config.buckets)
        self._most_targets = max(int(part.sizes.targets.max()) for part in (train, valid) if part)
        return Datasets(train, valid)

    def open_cache(self, path: Path) -> TokenCache:
        with RowProgress(f"Tokenising {path.name}") as progress:
            cache = open_token_cache(
                path, self.tokenizer, self.model_config.block_size, progress=progress.update
            )
            if cache.skipped:
                progress.tell(
                    f"{path}: {cache.skipped} of {cache.skipped + len(cache)} rows left out: their"
                    f" summaries take over 30 % of {self.model_config.block_size} tokens."
                )
        return cache

    # -- batches --------------------------------------------------------------------------------
    def plan(self, data: SampleSource, settings: PlanSettings) -> BatchPlan:
        assert isinstance(data, TokenSamples)
        self.devices = settings.devices
        rows_per_device = settings.micro_rows // settings.devices
        self.buckets = make_buckets(self._lengths, data.sizes, rows_per_device, self._most_targets)
        return BucketPlan(data.sizes, self.buckets, settings)

    def evaluation_batches(self, data: SampleSource, rows: int) -> Iterator[MicroBatch]:
        """Every sample once; `rows` over all devices are of mean length, as in training."""
        assert isinstance(data, HasSizes)
        return evaluation_plan(data.sizes, self.buckets, self.devices)

    def collate(self, samples: Sequence[Sample], micro: MicroBatch) -> Batch:
        assert micro.bucket is not None
        return collate(samples, micro, self.buckets[micro.bucket])

    def probe_batches(self, settings: PlanSettings) -> list[Batch]:
        """With data, its buckets; without, rows as long as the context, a tenth of it targets."""
        per_device = max(1, settings.micro_rows // settings.devices)
        if self.train_file.is_file():
            train = self.datasets().train
            assert isinstance(train, TokenSamples)
            buckets = make_buckets(self._lengths, train.sizes, per_device, self._most_targets)
        else:
            length = self.model_config.block_size
            buckets = [Bucket(length, per_device, per_device * -(-length // 10))]
        costliest = sorted(buckets, key=lambda b: (-b.rows * b.length, -b.targets))
        vocabulary = self.model_config.vocabulary_size
        return [example_batch(bucket, settings.devices, vocabulary) for bucket in costliest]

    # -- model ----------------------------------------------------------------------------------
    @property
    def pretrained(self) -> Pretrained | None:
        """The weights to start from; None from scratch."""
        if self.config.from_scratch:
            return None
        if self._pretrained is None:
            found = read_pretrained(self.config.init or self.config.model)
            require_vocabulary(found, self.tokenizer)
            self._require_size(found)
            self._pretrained = cropped(found, min(self.config.block_size, found.config.block_size))
        return self._pretrained

    def _require_size(self, found: Pretrained) -> None:
        asked, default = self.config.model, SummarizeConfig.model
        if self.config.init is None or asked == default:
            return
        size = parse_size(asked)
        if (size.layers, size.heads, size.width) != (
            found.config.layers, found.config.heads, found.config.width,
        ):  # fmt: skip
            raise ConfigError(
                f"--model {asked} is not the size of {found.source}"
                f" ({found.config.layers}x{found.config.heads}x{found.config.width}).",
                "Leave --model out: --init brings its size along.",
            )

    @property
    def model_config(self) -> GPT2Config:
        """The model's shape: restored, of the weights to start from, or asked for."""
        if self._model_config is None:
            if self.pretrained is not None:
                shape = self.pretrained.config
            else:
                shape = replace(
                    parse_size(self.config.model),
                    vocabulary_size=self.tokenizer.vocabulary_size,
                    block_size=self.config.block_size,
                )
            self._model_config = replace(
                shape, dropout=self.config.dropout, recompute=self.config.recompute
            )
        return self._model_config

    def build_model(self, ops: ModelOps) -> nn.Module:
        model = self.build_plain_model(ops)
        if self._pretrained is not None:
            model.load_state_dict(self._pretrained.tensors)
        if self.config.lora:
            add_lora(model, self.config.lora)
        return model

    def build_plain_model(self, ops: ModelOps) -> GPT2:
        """The model without adapters, freshly initialised."""
        self.devices = ops.devices
        return GPT2(self.model_config, PlainOps(ops) if self.config.loss == "reference" else ops)

    def for_probing(self) -> Self:
        task = copy.copy(self)
        if self._model_config is None and (self.config.init in (None, FROM_SCRATCH)):
            size = parse_size(self.config.model)
            if self.config.tokenizer == "train":
                size = replace(size, vocabulary_size=self.config.vocabulary_size)
            elif self.config.tokenizer not in (None, "gpt2"):
                size = replace(size, vocabulary_size=self.tokenizer.vocabulary_size)
            task._model_config = replace(
                size,
                block_size=self.config.block_size,
                dropout=self.config.dropout,
                recompute=self.config.recompute,
            )
        return task

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Mean cross entropy over the batch's targets, weighted by their number."""
        labels = batch["labels"]
        if self.config.loss == "lean":
            logits = model(batch["tokens"], batch["wanted"])
        else:
            logits = model(batch["tokens"])
            labels = spread_labels(labels, batch["wanted"], batch["tokens"].numel())
        counted = (labels != IGNORED).float()
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
        )
        weight = counted.sum()
        return {"loss": losses.sum() / weight.clamp(min=1.0), "weight": weight}

    # -- what a run keeps -------------------------------------------------------------------------
    def identity(self) -> dict[str, Any]:
        kept = ("model", "block_size", "vocabulary_size", "dropout", "valid_fraction", "split_seed",
                "buckets", "lora_rank", "lora_alpha", "lora_targets")  # fmt: skip
        # Files move between sessions: their names are kept, and the data's sum.
        files = ("init", "tokenizer", "valid_file")
        return {
            **{name: getattr(self.config, name) for name in kept},
            **{name: Path(getattr(self.config, name) or "").name for name in files},
            "data": self._digest,
        }

    def artifacts(self) -> dict[str, bytes]:
        """The tokenizer, and the model's shape."""
        return {
            TOKENIZER_FILE: self.tokenizer.to_bytes(),
            MODEL_FILE: json.dumps(asdict(self.model_config)).encode(),
        }

    def restore_artifacts(self, artifacts: Mapping[str, bytes]) -> None:
        self._tokenizer = Tokenizer.from_bytes(artifacts[TOKENIZER_FILE], TOKENIZER_FILE)
        shape = GPT2Config(**json.loads(artifacts[MODEL_FILE]))
        self._model_config = replace(
            shape, dropout=self.config.dropout, recompute=self.config.recompute
        )

    def restore(self, artifacts: Mapping[str, bytes]) -> Self:
        task = copy.copy(self)
        task.restore_artifacts(artifacts)
        return task

    # -- a trained run ----------------------------------------------------------------------------
    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A run's weights with the LoRA adapters added to their matrices."""
        lora = self.config.lora
        return merge_lora(weights, lora.scale) if lora else dict(weights)

    def inference_model(self, ops: ModelOps, weights: Mapping[str, Tensor]) -> nn.Module:
        """GPT-2 without adapters: they are merged into its matrices."""
        model = self.build_plain_model(ops)
        load_weights(model, self.merged(weights), "the checkpoint")
        return model

    def evaluate(
        self, model: nn.Module, backend: Backend, request: EvaluationRequest, log: Log
    ) -> dict[str, Any]:
        """Loss, ROUGE with intervals, baselines, the best and the worst summaries."""
        from tpukit.tasks.summarize.evaluation.evaluate import evaluate_run

        return evaluate_run(self, model, backend, request, log)

    def check_prediction(self, request: PredictionRequest) -> None:
        from tpukit.tasks.summarize.evaluation.prediction import job_of

        job_of(self, request)

    def predict(
        self, model: nn.Module, backend: Backend, request: PredictionRequest, log: Log
    ) -> dict[str, Any]:
        """Writes the summaries of a test file; goes on where a killed prediction stopped."""
        from tpukit.tasks.summarize.evaluation.prediction import predict_run

        return predict_run(self, model, backend, request, log)

    # -- scores -----------------------------------------------------------------------------------
    def score(self, model: nn.Module, backend: Backend, data: SampleSource) -> dict[str, float]:
        """ROUGE on the first few validation samples, greedily."""
        assert isinstance(data, TokenSamples)
        count = min(self.config.score_samples, len(data))
        if count == 0:
            return {}
        references, made = self.summarise_samples(model, backend, data, count)
        scores = rouge_scores(references, made)
        return {kind: float(values.mean()) for kind, values in scores.items()}

    def summarise_samples(
        self, model: nn.Module, backend: Backend, data: TokenSamples, count: int
    ) -> tuple[list[str], list[str]]:
        """References and written summaries of the first `count` samples."""
        parts = [data.prompt_and_targets(index) for index in range(count)]
        prompts = [Prompt(index, prompt) for index, (prompt, _) in enumerate(parts)]
        decoding = Decoding(max_new_tokens=min(self.config.max_new_tokens, room_of(prompts, self)))
        was_training = model.training
        model.eval()
        try:
            made = summarise(
                model, backend, prompts, decoding, self.tokenizer, self.generation_slots
            )
        finally:
            model.train(was_training)
        references = [clean_summary(self.tokenizer.decode(targets)) for _, targets in parts]
        return references, [made[index] for index in range(count)]


def spread_labels(labels: Tensor, wanted: Tensor, positions: int) -> Tensor:
    """`labels` (groups, count) put where `wanted` says among all positions, `IGNORED` elsewhere:
    (groups, positions / groups)."""
    groups = labels.shape[0]
    size = positions // groups
    places = torch.where(labels == IGNORED, size, wanted)
    everywhere = labels.new_full((groups, size + 1), IGNORED)
    return everywhere.scatter(1, places, labels)[:, :size]


def room_of(prompts: Sequence[Prompt], task: SummarizeTask) -> int:
    """New tokens that the context leaves to the shortest prompt."""
    return task.model_config.block_size - min(len(prompt.tokens) for prompt in prompts)


def bucket_lengths(train: TokenSamples, valid: TokenSamples | None, count: int) -> list[int]:
    """Bucket lengths with the least padding on the training samples that hold all others too."""
    longest = int(train.sizes.lengths.max())
    if valid is not None:
        longest = max(longest, int(valid.sizes.lengths.max()))
    return choose_lengths(train.sizes.lengths, count, longest)
