"""Host memory and time of a sharded run's start, save and resume, over ranks of this machine.

    python benchmarks/sharded_checkpoints.py [--ranks 4 8] [--millions 300 | --llama 8]

Layers of two matrices, or a model of Llama-3.1-8B's layers, heads and vocabulary whose widths are
divided, with weights to start from. Adam, gloo ranks on the CPU, whose host is their device:
`share` is what a rank keeps of weights, gradients and moments. For each phase and rank the peak of
the resident memory above what the process held before it. `stall` is the time for which a step
waits for a save, `written` that until the checkpoint is there, and what a save that does not return
early would cost. The resumed ranks are new processes.
"""

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from recorded import RESULTS, write_result

RESULT = RESULTS / "sharded_checkpoints.json"
LLAMA_RESULT = RESULTS / "sharded_checkpoints_llama.json"
WIDTH, WIDER = 1024, 4096
BLOCK_BYTES = (2 * WIDTH * WIDER + WIDTH + WIDER) * 4
PHASES = ("start", "step", "next step", "save", "next save", "resume")


def task(millions: int):
    """A task whose model has about so many million parameters, in blocks of 8.4 million."""
    import numpy as np
    import torch
    from torch import nn

    from tpukit.train.task import Datasets, Task, stack_samples

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wider, self.back = nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, WIDTH)

        def forward(self, x):
            return x + self.back(torch.relu(self.wider(x)))

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            count = round(millions * 1e6 / (2 * WIDTH * WIDER))
            self.blocks = nn.ModuleList(Block() for _ in range(count))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    class Rows:
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return {"x": np.full(WIDTH, index / 64, np.float32)}

    class Wide(Task):
        name = "wide"

        def build_model(self, ops):
            return Blocks()

        def datasets(self):
            return Datasets(Rows(), None)

        def loss(self, model, batch):
            return {"loss": (model(batch["x"]).float() - batch["x"]).square().mean(1)}

        def probe_batches(self, settings):
            rows = settings.micro_rows
            return [stack_samples([Rows()[0]] * rows, rows)]

    return Wide()


def write_llama(folder: Path, divisor: int) -> None:
    """Weights of Llama-3.1-8B's form with widths divided, a tokenizer of words, dialogues."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(1000))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder / "llama")
    config = LlamaConfig(
        hidden_size=4096 // divisor, intermediate_size=14336 // divisor, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128 // divisor, vocab_size=128256,
        max_position_embeddings=8192, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    words = ["-m", "tpukit", "data", "dialogues", "--out", str(folder / "data"), "--n", "100"]
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)


def llama(folder: Path):
    """The task that goes on from these weights."""
    from tpukit.registry.classes import load_task

    settings = {"init": str(folder / "llama"), "block_size": 64}
    return load_task("llm", settings, str(folder / "data"))


def memory(name: str) -> int:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


@contextmanager
def watched(backend, seen: dict[str, dict[str, float]], name: str) -> Iterator[dict[str, float]]:
    """Around a phase: its seconds, and memory above what the process held before it."""
    backend.all_gather_objects(None)
    Path("/proc/self/clear_refs").write_text("5")
    before, started = memory("VmRSS"), time.monotonic()
    found = seen[name] = {}
    yield found
    found["seconds"] = time.monotonic() - started
    found |= {"peak": memory("VmHWM") - before, "left": memory("VmRSS") - before}


def rank(folder: Path, millions: int, divisor: int | None) -> None:
    """One rank: what it saw goes into a file of its own."""
    from tpukit.hardware.options import HardwareOptions
    from tpukit.hardware.select import open_backend
    from tpukit.train.checkpoint_writer import BackgroundWriter
    from tpukit.train.config import TrainConfig
    from tpukit.train.plan import TrainingRequest, plan_run
    from tpukit.train.resume import find_checkpoint
    from tpukit.train.run_folder import RunFolder
    from tpukit.train.run_state import load_learner, load_run_state

    world = int(os.environ["WORLD_SIZE"])
    backend = open_backend(HardwareOptions(hw="cpu", devices=world, shard=True))
    config = TrainConfig(global_batch_size=world, accumulate=1, max_steps=9, num_workers=0)
    own = task(millions) if divisor is None else llama(folder)
    request = TrainingRequest(own, config, RunFolder(folder / "run"))
    seen: dict[str, dict[str, float]] = {}
    phase = partial(watched, backend, seen)

    def one_step(state):
        source = plan.step_batches(backend, state.step)
        batches = source.read()
        state.learner.train_step(next(batches), 1e-4)
        batches.close()

    plan = plan_run(request, backend, resumes=False)
    load_learner(task(17), config, backend)  # imports what a start needs
    gc.collect()
    if not (resumes := (folder / "run" / "checkpoints").exists()):
        with phase("start"):
            state = load_run_state(plan, backend)
        writer = BackgroundWriter(
            request.folder.checkpoints, is_main=backend.is_main, in_shards=state.is_in_shards
        )
        for step in ("step", "next step"):
            with phase(step):
                if step == "next step":  # as the engine does it after the first one
                    writer.prepare(state.make_room())
                one_step(state)
        for save in ("save", "next save"):
            with phase(save) as found:
                started = time.monotonic()
                writer.write(state, is_best=False)
                found["stall"] = time.monotonic() - started
                writer.wait()
            state.learner.steps_done += 1
        writer.close()
        held = [*state.learner.model.parameters()]
        moments = [t for s in state.learner.optimizer.state.values() for t in s.values()]
        local = (getattr(t, "to_local", lambda t=t: t)() for t in (*held, *held, *moments))
        seen["share"] = {"bytes": sum(tensor.nbytes for tensor in local)}
        seen["parameters"] = {
            "count": sum(p.numel() for p in held), "largest": 4 * max(p.numel() for p in held)
        }  # fmt: skip
    else:
        with phase("resume"):
            state = load_run_state(plan, backend, find_checkpoint(request, backend, print))
        one_step(state)
    (folder / f"{'resumed' if resumes else 'begun'}-{backend.rank}.json").write_text(
        json.dumps(seen)
    )
    backend.close()


def launched(folder: Path, ranks: int, options: argparse.Namespace) -> None:
    """All ranks, to their end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0"}  # fmt: skip
    command = [sys.executable, __file__, "--rank", str(folder), "--millions", str(options.millions)]
    command += ["--llama", str(options.llama)] if options.llama else []
    children = [
        subprocess.Popen(
            command, env={**os.environ, **own, "RANK": str(each), "LOCAL_RANK": str(each)}
        )
        for each in range(ranks)
    ]
    statuses = [child.wait() for child in children]
    if any(statuses):
        sys.exit("A rank failed.")


def measured(ranks: int, options: argparse.Namespace) -> dict[str, object]:
    """The largest of the ranks' values, by phase."""
    with tempfile.TemporaryDirectory(prefix="sharded-checkpoints-") as path:
        folder = Path(path)
        if options.llama:
            write_llama(folder, options.llama)
        launched(folder, ranks, options)
        launched(folder, ranks, options)
        found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    begun = [each for each in found if "start" in each]
    result: dict[str, object] = {
        "share_bytes": max(each["share"]["bytes"] for each in begun),
        "parameters": begun[0]["parameters"]["count"],
        "largest_bytes": begun[0]["parameters"]["largest"],
    }
    for name in PHASES:
        values = [each[name] for each in found if name in each]
        result[name] = {key: max(value[key] for value in values) for key in values[0]}
    return result


def compared(ranks: str, found: dict) -> Iterator[str]:
    """What a rank waits and holds, beside what it did with states in one piece."""
    whole, share = 4 * found["parameters"], found["share_bytes"]
    yield f"{ranks} ranks, {found['parameters'] / 1e6:.0f} M parameters"
    for save in ("save", "next save"):
        stall, written = found[save]["stall"], found[save]["seconds"]
        yield (
            f"  a {save} stops the steps: {written:.2f} s if they wait for it, now {stall:.2f} s"
            f" ({stall / written:.0%}; aim: 10%)"
        )
    own = found["start"]["peak"]
    limit = 1.15 * (whole / int(ranks) + max(BLOCK_BYTES, found["largest_bytes"]))
    yield (
        f"  host memory of a rank at the start: {whole / 1e6:,.0f} MB in one piece, now"
        f" {own / 1e6:,.0f} MB (aim: {limit / 1e6:,.0f} MB)"
    )
    copies = 3 * share / 4  # weights and two moments; the share has gradients too
    yield (
        f"  copied for a save on a rank: {3 * whole / 1e6:,.0f} MB in one piece, now"
        f" {copies / 1e6:,.0f} MB; resumed in {found['resume']['seconds']:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--millions", type=int, default=300)
    parser.add_argument("--llama", type=int, help="the divisor of Llama-3.1-8B's widths")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.millions, options.llama)
        return
    found = {str(n): measured(n, options) for n in options.ranks}
    result = {"block_bytes": BLOCK_BYTES, "ranks": found}
    write_result(RESULT if options.llama is None else LLAMA_RESULT, result)
    print(json.dumps(result, indent=2))
    for ranks, found in result["ranks"].items():
        print("\n".join(compared(ranks, found)))


if __name__ == "__main__":
    main()
