"""Prompts and completions as a task of the engine: any causal model of transformers."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tpukit.errors import ConfigError, DataError, UsageError
from tpukit.hardware.backend import Backend, Batch, ModelOps, TorchOps
from tpukit.io.hub_data import is_hub_data, local_data
from tpukit.io.mirror import local_copy
from tpukit.io.progress import Progress
from tpukit.io.remote import address_of
from tpukit.tasks.llm.data.dataset import (
    IGNORED,
    TokenSamples,
    collate_tokens,
    example_batch,
    sample_sizes,
    split_indices,
)
from tpukit.tasks.llm.data.packing import (
    PackedPlan,
    RowShape,
    SetSizes,
    evaluation_packs,
    packed_shape,
)
from tpukit.tasks.llm.data.prompt import PromptFormat
from tpukit.tasks.llm.data.rows import training_file
from tpukit.tasks.llm.data.token_cache import (
    SampleSizes,
    TokenCache,
    file_digest,
    open_token_cache,
)
from tpukit.tasks.llm.data.tokenizer import Tokenizer, has_tokenizer, tokenizer_from_bytes
from tpukit.tasks.llm.data.tokenizer_choice import (
    load_tokenizer,
    trained_tokenizer,
)
from tpukit.tasks.llm.generate import GeneratedDialogues
from tpukit.tasks.llm.generation.decoding import Decoding
from tpukit.tasks.llm.model.old_runs import OldRun
from tpukit.tasks.llm.model.sizes import GPT2_SIZES, parse_model_size
from tpukit.tasks.llm.predict import Log, checked_job, predict_run
from tpukit.tasks.llm.preferences import preference_loss
from tpukit.tasks.llm.selftest import GenerationPart
from tpukit.tasks.llm.settings import (
    DPO_LORA_LR,
    DPO_LR,
    FINE_TUNING,
    FROM_SCRATCH,
    LORA_LR,
    PRESETS,
    PROMPTING,
    RECORDED,
    SummarizeConfig,
)
from tpukit.train.requests import EvaluationRequest, PredictionRequest
from tpukit.train.task import (
    BatchPlan,
    Datasets,
    MasterAdamW,
    MicroBatch,
    OptimizerSettings,
    ParameterGroup,
    PlanSettings,
    Sample,
    SampleSource,
    Task,
    load_weights,
)

if TYPE_CHECKING:  # a second's import, of transformers
    from tpukit.tasks.llm.model.load import Pretrained, Shape
    from tpukit.tasks.llm.model.rows import Rows

Array = np.ndarray[Any, Any]
TOKENIZER_FILE = "tokenizer.tiktoken"
MODEL_FILE = "model.json"
ADAPTER_FILE = "adapter.json"


class SummarizeTask(Task):
    """Learns the completion that follows a prompt; only its tokens are targets."""

    name = "llm"
    settings: SummarizeConfig
    earlier_names: ClassVar[tuple[str, ...]] = ("summarize",)
    options = SummarizeConfig
    predict_options = Decoding
    folder = "out-summarization"
    # Written here: what a task declares is read from its source.
    data_columns: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("dialogue", "summary"), ("prompt", "completion"), ("prompt", "response"),
        ("prompt", "answer"), ("question", "answer"), ("instruction", "output"),
        ("instruction", "response"), ("input", "output"), ("text", "summary"), ("messages",),
        ("conversations",), ("chosen", "rejected"),
    )  # fmt: skip
    data_needs: ClassVar[str] = "train.csv or train.jsonl of prompts and completions, or messages"
    generators: ClassVar[Mapping[str, type[Any]]] = {"dialogues": GeneratedDialogues}
    metric_names: ClassVar[Mapping[str, str]] = {
        "rouge1": "ROUGE-1 ↑", "rouge2": "ROUGE-2 ↑", "rougeL": "ROUGE-L ↑",
        "exact_match": "exact match ↑",
        "names_copied": "names copied ↑", "unseen_names_copied": "unseen names copied ↑",
    }  # fmt: skip
    selftest: ClassVar[Mapping[str, Any]] = {
        "model": "3x4x128", "tokenizer": "train", "vocabulary_size": 2048, "block_size": 256,
    }  # fmt: skip
    selftest_parts: ClassVar[Mapping[str, Any]] = {"generate": GenerationPart, "shard": {}}
    presets = PRESETS
    earlier_settings: ClassVar[Mapping[str, str]] = {
        "buckets": "Rows hold several samples, or with packing=false one: there is one shape.",
        "loss": "The loss is computed where there are targets alone.",
    }
    is_restored = False
    """Whether it is a run's, whose weights are loaded into what `build_model` returns."""
    old: OldRun | None = None
    """How to read the weights of a run from before models were transformers'."""

    def __init__(self, **settings: Any) -> None:
        """Settings are the fields of `SummarizeConfig`."""
        super().__init__(**settings)
        adapted, whole = (LORA_LR, 1e-3 if self.settings.from_scratch else FINE_TUNING.lr)
        if self.settings.rejected_column:
            adapted, whole = DPO_LORA_LR, DPO_LR
        self.defaults = replace(FINE_TUNING, lr=adapted if self.settings.adapts else whole)

    # -- data -------------------------------------------------------------------------------------
    @property
    def train_file(self) -> Path:
        return training_file(local_data(self.settings.data_path))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """A run's tokenizer, else the one read, or trained on the training file."""
        name = self.settings.tokenizer
        if not name:
            name = "gpt2"
            if not (self.settings.from_scratch or self._named in GPT2_SIZES):
                from tpukit.tasks.llm.model.load import weights_folder

                folder = weights_folder(self._named)
                name = str(folder) if has_tokenizer(folder) else name
        if name == "train":
            columns = self.settings.style.columns
            found = trained_tokenizer(self.train_file, self.settings.vocabulary_size, columns)
        else:
            found = load_tokenizer(name)
        return found.for_chat() if self.settings.chat else found

    @cached_property
    def _named(self) -> str:
        """The weights to start from: a directory, of an address its copy, or a name on the hub."""
        named = self.settings.init or self.settings.model
        if is_hub_data(named):
            return named.removeprefix("hf://")
        return str(local_copy(named)) if address_of(named) else named

    @cached_property
    def learned_format(self) -> PromptFormat:
        """Builds the samples that are learned, pairs too."""
        return self.prompt_format

    @cached_property
    def prompt_format(self) -> PromptFormat:
        """Builds prompts for the model."""
        return PromptFormat(self.tokenizer, self.shape.block_size, self.settings.style)

    def datasets(self) -> Datasets:
        """Training and validation samples as tokens; the cache is built on first use."""
        if not self.train_file.is_file():
            raise DataError(
                f"There is no training file {self.train_file}.",
                "`tpukit data dialogues --out data` makes one to try; --data-path names yours.",
            )
        train, valid = self._parts()
        if self.settings.packing and not self.packs:
            kind = self.shape.config.model_type
            if self.has_pairs:
                raise ConfigError(
                    f"a {kind} learns no preferences: a pair is a row of two samples, and"
                    f" {self.rows.reason}.",
                    "Choose one of the packed models of docs/llm_models.md.",
                )
            with Progress("Rows") as progress:
                progress.message(f"One sample to a row, for a {kind}: {self.rows.reason}.")
        if self._has_routers and not self.balances:
            with Progress("Experts") as progress:
                progress.message(
                    "output_router_logits of config.json: the auxiliary loss of the experts is not"
                    " added to that of pairs, or of rows of one sample."
                )
        whole, pairs = self.settings.loss_on_prompt, self.has_pairs
        sizes = [sample_sizes(*part, whole=whole) for part in (train, valid)]
        set_sizes = SetSizes.of(*sizes)
        return Datasets(
            TokenSamples(*train, set_sizes, whole=whole, pairs=pairs),
            TokenSamples(*valid, set_sizes, whole=whole, pairs=pairs) if len(sizes[1]) else None,
            artifacts={
                TOKENIZER_FILE: self.tokenizer.to_bytes(),
                MODEL_FILE: json.dumps(asdict(self.shape)).encode(),
                **({ADAPTER_FILE: json.dumps(self.adapter).encode()} if self.adapter else {}),
            },
            identity={"data": file_digest(self.train_file)[:16]},
        )

    def _parts(self) -> list[tuple[TokenCache, Array]]:
        """Training and validation samples: a cache, and which of its samples."""
        cache = self.open_cache(self.train_file)
        if self.settings.valid_file is None:
            split = split_indices(
                len(cache), self.settings.valid_fraction, self.settings.split_seed
            )
            return [(cache, indices) for indices in split]
        valid = self.open_cache(Path(self.settings.valid_file))
        return [(part, np.arange(len(part))) for part in (cache, valid)]

    def open_cache(self, path: Path) -> TokenCache:
        block_size = self.shape.block_size
        with Progress(f"Tokenising {path.name}") as progress:
            cache = open_token_cache(
                path, self.tokenizer, block_size, progress=progress, style=self.settings.style
            )
            if cache.skipped:
                progress.message(
                    f"{path}: {cache.skipped} of {cache.skipped + len(cache)} rows left out:"
                    f" {self.settings.style.too_long(block_size)}."
                )
        return cache

    # -- batches ----------------------------------------------------------------------------------
    def _row_shape(self, sizes: SetSizes, settings: PlanSettings) -> RowShape:
        return packed_shape(sizes, settings, packed=self.packs)

    def plan(self, data: SampleSource, settings: PlanSettings) -> BatchPlan:
        assert isinstance(data, TokenSamples)
        return PackedPlan(data.sizes, self._row_shape(data.set_sizes, settings), settings)

    def evaluation_batches(
        self, data: SampleSource, settings: PlanSettings
    ) -> Iterator[MicroBatch]:
        """Every sample once; micro-batches have the shape of training's."""
        assert isinstance(data, TokenSamples)
        shape = self._row_shape(data.set_sizes, settings)
        return iter(evaluation_packs(data.sizes, shape, settings))

    def collate(self, samples: Sequence[Sample], micro: MicroBatch) -> Batch:
        return collate_tokens(samples, micro)

    def probe_batches(self, settings: PlanSettings) -> list[Batch]:
        """The shape of the training data; without data, of samples as long as the context, a tenth
        of it targets."""
        if self.train_file.is_file():
            train = self.datasets().train
            assert isinstance(train, TokenSamples)
            self.known_samples = len(train.sizes)
            sizes = train.set_sizes
        else:
            length = np.array([self.shape.block_size * (1 + self.has_pairs)])
            sizes = SetSizes.of(SampleSizes(length, -(-length // 10)))
        rows, vocabulary = self._row_shape(sizes, settings), self.shape.vocabulary_size
        example = example_batch(
            rows, settings.devices, vocabulary, sizes.longest, pairs=self.has_pairs
        )
        return [example]

    # -- model ------------------------------------------------------------------------------------
    @cached_property
    def pretrained(self) -> "Pretrained | None":
        """The weights to start from; None from scratch."""
        if self.settings.from_scratch:
            return None
        from tpukit.tasks.llm.model.load import read_pretrained, require_vocabulary

        given = None if self.settings.init is None else self.settings.model
        size = None if given == SummarizeConfig.model else given
        found = read_pretrained(self._named, self.settings.block_size, size)
        require_vocabulary(found, self.tokenizer)
        return found

    @cached_property
    def shape(self) -> "Shape":
        """The model's shape: a run's, of the weights to start from, or the config's."""
        if self.pretrained is not None:
            return self.pretrained.shape
        return self._from_scratch(self.tokenizer.vocabulary_size)

    def _from_scratch(self, vocabulary_size: int) -> "Shape":
        from tpukit.tasks.llm.model.load import from_scratch

        return from_scratch(self.settings.model, vocabulary_size, self.settings.block_size)

    @cached_property
    def rows(self) -> "Rows":
        """How rows are made for this model; DataError where it cannot be trained."""
        from tpukit.tasks.llm.model.rows import rows_of

        return rows_of(self.shape.config, self.shape.block_size)

    @property
    def packs(self) -> bool:
        return self.settings.packing and self.rows.packed

    @property
    def _has_routers(self) -> bool:
        """Whether config.json asks for the auxiliary loss of experts."""
        return bool(getattr(self.shape.config.get_text_config(), "output_router_logits", False))

    @property
    def balances(self) -> bool:
        """Whether that loss is added."""
        return self._has_routers and self.packs and not self.has_pairs

    def forms(self) -> Sequence[Self]:
        """With `recompute=auto` the task without and with recomputation."""
        if self.settings.recompute != "auto":
            return (self,)
        return tuple(
            self._with(
                settings=replace(self.settings, recompute=choice),
                given_settings={**self.given_settings, "recompute": choice},
            )
            for choice in (False, True)
        )

    @cached_property
    def adapter(self) -> dict[str, Any] | None:
        """The fields of peft's configuration: a run's, or the config's."""
        return self.settings.adapter_fields()

    @property
    def has_pairs(self) -> bool:
        """Whether samples are a completion and a rejected one."""
        return self.settings.rejected_column is not None

    def build_model(self, ops: ModelOps) -> nn.Module:
        from tpukit.tasks.llm.model.build import language_model

        model = language_model(self, ops)
        if self.has_pairs and not self.adapter:
            start = language_model(self, ops)
            start.load_state_dict(model.state_dict())
            model.reference = start.requires_grad_(False).eval()
        return model

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, adapters aside."""
        return torch.float32 if self.settings.weights == "fp32" else torch.bfloat16

    def build_optimizer(
        self, groups: Sequence[ParameterGroup], settings: OptimizerSettings
    ) -> Optimizer | None:
        trained = [parameter for group in groups for parameter in group.parameters]
        if all(parameter.dtype == torch.float32 for parameter in trained):
            return None
        if settings.name != "adamw":
            raise ConfigError(
                f"weights bf16: {settings.name} keeps no fp32 master copies.",
                "Use the optimizer adamw, weights fp32 or LoRA.",
            )
        return MasterAdamW(groups, settings.lr, settings.betas, settings.eps)

    def restore(self, artifacts: Mapping[str, bytes]) -> Self:
        from tpukit.tasks.llm.model.load import Shape

        recorded = json.loads(artifacts[MODEL_FILE])
        tokenizer = tokenizer_from_bytes(artifacts[TOKENIZER_FILE], TOKENIZER_FILE)
        known: dict[str, Any] = {"tokenizer": tokenizer, "is_restored": True}
        if "fields" not in recorded:
            adapter = replace(self.settings, lora_init=None).adapter_fields()
            known |= {"old": (old := OldRun(recorded, adapter)), "adapter": None}
            recorded = old.shape()
        known["shape"] = Shape(**recorded)
        if ADAPTER_FILE in artifacts:
            known["adapter"] = json.loads(artifacts[ADAPTER_FILE])
        if self.settings.weights != "nf4":  # which a checkpoint has not
            known["pretrained"] = None
        return self._with(**known)

    def for_probing(self) -> Self:
        if self.settings.init not in (None, FROM_SCRATCH):
            _ = self.rows
            return self
        if self.settings.tokenizer == "train":
            vocabulary = self.settings.vocabulary_size
        elif self.settings.tokenizer in (None, "gpt2"):
            vocabulary = parse_model_size(self.settings.model)["vocab_size"]
        else:
            vocabulary = self.tokenizer.vocabulary_size
        task = self._with(shape=self._from_scratch(vocabulary), pretrained=None)
        # Found out here: models are built next without storage, which cannot be compared.
        _ = task.rows
        return task

    def _with(self, **known: Any) -> Self:
        """The same task, but these attributes are given instead of found out."""
        task = copy.copy(self)
        assert all(name in vars(task) or hasattr(type(task), name) for name in known)
        vars(task).update(known)
        return task

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Mean cross entropy over the batch's targets, weighted by their number."""
        labels = batch["labels"]
        packed = {"starts": batch["starts"]} if "starts" in batch else {}
        losses = model(batch["tokens"], batch["wanted"], labels=labels, **packed)
        if "pairs" in batch:
            from tpukit.tasks.hub.adapters import as_at_start

            with torch.no_grad(), as_at_start(model.lm):
                before = model(
                    batch["tokens"], batch["wanted"], labels=labels, at_start=True, **packed
                )
            return preference_loss(losses, before, batch["pairs"], self.settings.dpo_beta)
        weight = (labels != IGNORED).float().sum()
        return {"loss": losses.sum() / weight.clamp(min=1.0), "weight": weight}

    def identity(self) -> dict[str, Any]:
        # Files move between sessions: their names are kept, not their paths.
        files = ("init", "tokenizer", "valid_file")
        default = SummarizeConfig()
        return {
            **{
                name: getattr(self.settings, name)
                for name in (*RECORDED, *PROMPTING)
                # Runs from before these settings had none of them.
                if name not in PROMPTING or getattr(self.settings, name) != getattr(default, name)
            },
            **{name: Path(getattr(self.settings, name) or "").name for name in files},
        }

    # -- a trained run ----------------------------------------------------------------------------
    def _loaded(
        self, ops: ModelOps, weights: Mapping[str, Tensor], *, unpacked: bool = False
    ) -> nn.Module:
        from tpukit.tasks.llm.model.build import language_model

        model = language_model(self, ops, unpacked=unpacked)
        own = {n: t for n, t in weights.items() if not n.startswith("reference.")}
        read = own if self.old is None else self.old.renamed(own)
        load_weights(model, read, "the checkpoint")
        return model

    def inference_model(self, ops: ModelOps, weights: Mapping[str, Tensor]) -> nn.Module:
        """The model with its adapters merged; weights in bf16 or 4 bits, which would round most of
        an update away, keep them beside."""
        from tpukit.tasks.hub import adapters

        model: Any = self._loaded(ops, weights)
        if self.adapter and self.dtype is not torch.bfloat16:
            adapters.merge_adapter(model.lm)
        return model  # type: ignore[no-any-return]

    def evaluate(
        self, model: nn.Module, backend: Backend, request: EvaluationRequest, log: Log
    ) -> dict[str, Any]:
        """Loss, ROUGE with intervals, baselines, the best and the worst summaries."""
        from tpukit.tasks.llm.evaluate import evaluate_run

        return evaluate_run(self._evaluated(), model, backend, request, log)

    def check_prediction(self, request: PredictionRequest) -> None:
        checked_job(self.settings, request)

    def predict(
        self, model: nn.Module, backend: Backend, request: PredictionRequest, log: Log
    ) -> dict[str, Any]:
        """Writes the summaries of a test file; goes on where a killed prediction stopped."""
        return predict_run(self._evaluated(), model, backend, request, log)

    def _evaluated(self) -> Self:
        """The task as it generates; of pairs the chosen completions."""
        if not self.rows.packed:
            raise UsageError(
                f"a {self.shape.config.model_type} writes no answers here, where rows are packed:"
                f" {self.rows.reason}.",
                "Write it with `tpukit test --export DIR`, and generate with transformers.",
            )
        settings = replace(self.settings, rejected_column=None)
        formats = PromptFormat(self.tokenizer, self.shape.block_size, settings.style)
        return self._with(
            settings=settings, prompt_format=formats, learned_format=self.prompt_format
        )

    def export(
        self, weights: Mapping[str, Tensor], artifacts: Mapping[str, bytes], folder: Path
    ) -> list[Path]:
        """A Hugging Face directory, adapters merged and rounded to the weights' own type."""
        from tpukit.tasks.hub import adapters
        from tpukit.tasks.llm.export import export_hugging_face

        model: Any = self._loaded(TorchOps(), weights, unpacked=True)
        files = {}
        if self.adapter:
            files = adapters.adapter_files(model.lm)
            adapters.merge_adapter(model.lm)
        return export_hugging_face(
            folder, self.shape, model.lm, self.tokenizer, self.settings.style, files
        )

    def score(self, model: nn.Module, backend: Backend, data: SampleSource) -> dict[str, float]:
        from tpukit.tasks.llm.evaluate import score_samples

        return score_samples(self, model, backend, data)
