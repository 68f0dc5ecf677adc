"""Runs of models with rotary positions, packed, split, killed and resumed, beside one process."""

import json
import shutil

import pytest
from runs import VIRTUAL_TPU, latest, parameters, relative_difference, result, script, tpukit

from tpukit.tasks.llm.generate import write_dialogues
from tpukit.tasks.llm.generation.decoding import PREFILL_LENGTHS

transformers = pytest.importorskip("transformers")

SIZE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 400, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 7,
}  # fmt: skip
FAMILIES = {
    # Grouped queries, their norm, tied embeddings.
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    # Windows, scaled embeddings, capped logits.
    "Gemma3": {"head_dim": 16, "sliding_window": 9, "final_logit_softcapping": 3.0,
               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    # Capped scores.
    "Gemma2": {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 5.0},
    # A head of its own, norms after the branches.
    "Olmo2": {},
}  # fmt: skip
TRAIN = [
    "--tokenizer", "train", "--set", "vocabulary_size=400", "--block-size", "256",
    "--global-batch-size", "16", "--precision", "fp32", "--set", "score_samples=4",
    "--set", "max_new_tokens=8", "--set", "warmup_steps=2",
    "--num-workers", "0", "--max-steps", "8", "--ckpt-every", "4",
]  # fmt: skip
BF16 = ["--set", "weights=bf16"]
LORA = ["--lora-rank", "4", "--lora-targets", "qkv,attention_out,mlp_in,mlp_out"]
CPU, RANKS, SHARDED = ["--hw", "cpu"], ["--hw", "cpu", "--devices", "2"], ["--shard"]
WAYS = {
    "packed": (CPU, ["--accumulate", "2", "--packing", "--set", "recompute=true"]),
    "two ranks": (RANKS, []),
    "sharded ranks": ([*RANKS, *SHARDED], []),
    "virtual devices": (["--hw", "tpu"], []),
    "sharded virtual devices": (["--hw", "tpu", *SHARDED], ["--accumulate", "2"]),
}


class Runs:
    """Runs of one family that share their data and a folder."""

    def __init__(self, folder, family):  # type: ignore[no-untyped-def]
        self.folder, self.env = folder, {"TPUKIT_CACHE_DIR": str(folder / "cache")}
        write_dialogues(folder / "data", 300, 0)
        kind = "Gemma3Text" if family == "Gemma3" else family
        config = getattr(transformers, f"{kind}Config")(**SIZE, **FAMILIES[family])
        model = getattr(transformers, f"{family}ForCausalLM")._from_config(config)
        model.save_pretrained(folder / "start")

    def argv(self, name, hardware, *options):  # type: ignore[no-untyped-def]
        # A second try of a test must not go on with the run of its first.
        shutil.rmtree(self.folder / name, ignore_errors=True)
        words = ["summarize-train", "--data-path", self.folder / "data", "--init",
                 self.folder / "start", *TRAIN, "--results-dir", self.folder / name,
                 *hardware, *options]  # fmt: skip
        return [str(word) for word in words]

    def tell(self, argv):  # type: ignore[no-untyped-def]
        env = {**self.env, **(VIRTUAL_TPU if "tpu" in argv else {})}
        return result(tpukit(*argv, "--json", env=env, timeout=900))

    def train(self, name, hardware, *options):  # type: ignore[no-untyped-def]
        return self.tell(self.argv(name, hardware, *options))

    def losses(self, name):  # type: ignore[no-untyped-def]
        rows = map(json.loads, (self.folder / name / "metrics.jsonl").read_text().splitlines())
        return {(r["kind"], r["step"]): r.get("loss", r.get("valid_loss")) for r in rows}

    def predict(self, name, hardware):  # type: ignore[no-untyped-def]
        out = self.folder / f"{name}.csv"
        words = ["predict", "--run", self.folder / name, "--out", out, *hardware,
                 "--precision", "fp32", "--max-new-tokens", "12"]  # fmt: skip
        return self.tell(list(map(str, words))), out.read_text()


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):  # type: ignore[no-untyped-def]
    made = Runs(tmp_path_factory.mktemp(request.param), request.param)
    made.train("whole", CPU)
    made.answers = made.predict("whole", CPU)[1]
    return made


of_gemma3 = pytest.mark.parametrize("runs", ["Gemma3"], indirect=True)
"""The family with the most kinds of layers stands for the others where they share the code."""


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "way"), [
    *((name, "packed") for name in ("Qwen3", "Gemma2", "Olmo2")),
    *(("Gemma3", way) for way in WAYS),
], indirect=["runs"])  # fmt: skip
def test_the_same_losses_weights_and_answers(runs, way):  # type: ignore[no-untyped-def]
    hardware, options = WAYS[way]
    told = runs.train(way, hardware, *options)
    assert runs.losses(way) == pytest.approx(runs.losses("whole"), rel=1e-4)
    whole = parameters(runs.folder / "whole")
    assert relative_difference(parameters(runs.folder / way), whole) < 1e-4
    if "tpu" in hardware:
        assert told["compilations_after_warmup"] == 0
        assert told["graphs"]["train"] == 1 + ("--accumulate" in options)
    assert runs.predict(way, hardware)[1] == runs.answers


@pytest.mark.slow
@of_gemma3
def test_weights_in_bf16(runs):  # type: ignore[no-untyped-def]
    """As with weights in fp32, to what bf16 knows; one program on virtual devices."""
    for way, hardware in (("one", CPU), ("shards", [*RANKS, *SHARDED]),
                          ("tpu", ["--hw", "tpu", *SHARDED])):  # fmt: skip
        told = runs.train(f"bf16 {way}", hardware, *BF16)
        assert runs.losses(f"bf16 {way}") == pytest.approx(runs.losses("whole"), rel=1e-2)
    assert (told["graphs"]["train"], told["compilations_after_warmup"]) == (1, 0)


@pytest.mark.slow
@of_gemma3
@pytest.mark.parametrize(
    ("hardware", "options"),
    [(CPU, LORA), ([*RANKS, *SHARDED], BF16)],
    ids=["one-LoRA", "sharded-bf16"],
)
def test_killed_and_resumed_in_the_same_bytes(runs, hardware, options):  # type: ignore[no-untyped-def]
    ranks = 1 if hardware is CPU else 2
    names = [f"{name}-{ranks}-{len(options)}" for name in ("undisturbed", "killed")]
    undisturbed, killed = (runs.argv(name, hardware, *options) for name in names)
    plan = runs.folder / "plan.json"
    plan.write_text(json.dumps([
        {"argv": argv, "ranks": ranks, "at": at}
        for argv, at in ((undisturbed, None), (killed, "step:6"), (killed, None))
    ]))  # fmt: skip
    done = script("killed_run.py", plan, env=runs.env, timeout=500)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 9, 0], done.stderr[-3000:]
    one, other = (
        {
            file.name: file.read_bytes()
            for file in latest(runs.folder / run).rglob("*")
            if file.suffix in (".safetensors", ".distcp")
        }
        for run in names
    )
    assert one == other and len(one) >= 2


@pytest.mark.slow
@of_gemma3
def test_nothing_is_compiled_after_the_warm_up(runs):  # type: ignore[no-untyped-def]
    """40 packed steps, then 64 prompts: a prefill for each length, one program to go on, and one,
    of no model, that makes the empty cache: else the first prefill would be another program than
    the next of its length."""
    more = ["--max-steps", "40", "--ckpt-every", "20", *LORA]
    told = runs.train("long", ["--hw", "tpu"], *more)
    log = (runs.folder / "long" / "log.txt").read_text()
    assert log.count("compiling for a new batch shape") == 1
    assert (told["graphs"]["train"], told["compilations_after_warmup"]) == (1, 0)
    write_dialogues(runs.folder / "data", 640, 0)
    made, _ = runs.predict("long", ["--hw", "tpu"])
    assert made["rows"] == 64
    assert made["compilations"] == PREFILL_LENGTHS + 1 + 1
