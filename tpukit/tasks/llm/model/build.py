"""The model of a task: weights, adapters, the lean form."""

from pathlib import Path
from typing import TYPE_CHECKING

from tpukit.errors import ConfigError
from tpukit.hardware.backend import ModelOps
from tpukit.tasks.hub import adapters
from tpukit.tasks.llm.model import four_bits
from tpukit.tasks.llm.model.lean import LanguageModel
from tpukit.tasks.llm.model.load import load_lm

if TYPE_CHECKING:
    from tpukit.tasks.llm.task import SummarizeTask


def language_model(
    task: "SummarizeTask", ops: ModelOps, *, unpacked: bool = False
) -> LanguageModel:
    """unpacked: weights in 4 bits have their values in bf16."""
    settings = task.settings
    lm = load_lm(
        task.shape, task.dtype, dropout=settings.dropout,
        folder=None if task.pretrained is None else task.pretrained.folder,
        drawn=not task.is_restored, attention=task.rows.attention,
    )  # fmt: skip
    packs = settings.weights == "nf4"
    if packs:
        kind = (task.adapter or {}).get("peft_type")
        if kind in four_bits.NEED_WEIGHTS:
            raise ConfigError(
                f"weights nf4: {kind} of peft computes with the whole weights.",
                "Choose another adapter, such as LORA, or weights bf16.",
            )
        (four_bits.rounded_to_four_bits if unpacked else four_bits.in_four_bits)(lm)
    if task.adapter:
        continued, takes = settings.lora_init, adapters.takes_part(task.adapter)
        bias = task.adapter.get("bias", "none")
        if task.has_pairs and bias != "none":
            raise ConfigError(
                f"adapter: bias {bias!r}: preferences need the model at the start, and biases that"
                " are trained stay where adapters are switched off.",
                "Leave bias out.",
            )
        if task.has_pairs and continued and takes:
            raise ConfigError(
                f"lora_init {continued}: preferences do not go on from PiSSA or OLoRA itself.",
                "Save it as LoRA: peft's path_initial_model_for_weight_conversion.",
            )
        adapters.add_adapter(
            lm, task.adapter, fresh=not task.is_restored,
            keep_start=takes or bool(task.has_pairs and continued),
        )  # fmt: skip
        if continued and not task.is_restored:
            adapters.load_adapter(lm, Path(continued).expanduser())
    recompute, last = settings.recompute not in (False, "auto"), task.rows.last_at_wanted
    model = LanguageModel(lm, ops, recompute=recompute, last_at_wanted=last, balances=task.balances)
    if packs:
        four_bits.keep_trained_alone(model)
    return model
