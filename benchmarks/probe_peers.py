"""Finding the largest batch under one memory limit: tpukit, Lightning's finder, accelerate's.

    python benchmarks/probe_peers.py [--task eit|llm] [--limit 1GB] [--xla]

All search for the same model, optimizer and limit on this machine's CPU, one after another.
What each recommends is then tried: `tpukit train` on synthetic data at that batch under the same
limit, an epoch (so that every shape of batch is met) with a validation and a checkpoint. An answer
is false where that run fails, or where one a tenth larger succeeds.
Lightning's (`BatchSizeFinder`, binary search) and accelerate's (`find_executable_batch_size`)
finders train in this process' child, as their users call them. With --xla tpukit alone is asked,
for torch_xla on this CPU: the finders know no XLA.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recorded import RESULTS, table, write_result

START, ACCELERATE_START = 4, 512
SAMPLES = 2500
SETTINGS: dict[str, dict[str, Any]] = {
    "eit": {"size": "tiny"},
    "llm": {
        "model": "4x4x192", "block_size": 256, "tokenizer": "train", "vocabulary_size": 1024,
        "init": "scratch", "score_samples": 0,
    },
}  # fmt: skip
SHORTER = {"block_size": 128}
"""For XLA, which compiles each length: four, all met within an epoch. Of the eight up to 256 the
costliest is met once in several epochs, and only then a batch too large fails."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="eit", choices=sorted(SETTINGS))
    parser.add_argument("--limit", default="1GB")
    parser.add_argument("--xla", action="store_true")
    parser.add_argument("--peer", choices=["lightning", "accelerate"], help=argparse.SUPPRESS)
    return parser.parse_args()


def environment(*, xla: bool = False) -> dict[str, str]:
    virtual_tpu = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"} if xla else {"USE_TORCH_XLA": "0"}
    return {**os.environ, "OMP_NUM_THREADS": "2", **virtual_tpu}


def tpukit(*arguments: str, xla: bool = False) -> subprocess.CompletedProcess[str]:
    hardware = ["--hw", "tpu" if xla else "cpu"] if arguments[0] != "data" else []
    return subprocess.run(
        [sys.executable, "-m", "tpukit", *arguments, *hardware],
        env=environment(xla=xla), capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip


def task_options(task: str) -> list[str]:
    options = [word for n, v in SETTINGS[task].items() for word in ("--set", f"{n}={v}")]
    return [*options, "--data-path", os.environ["DATA"]]


def ours(task: str, limit: str, *, xla: bool) -> dict[str, Any]:
    started = time.monotonic()
    done = tpukit("probe-batch", "--task", task, *task_options(task), "--memory-limit", limit,
                  "--start", str(START), "--json", xla=xla)  # fmt: skip
    seconds = time.monotonic() - started
    if done.returncode:
        return {"error": done.stderr[-500:], "seconds": seconds}
    answer = json.loads(done.stdout)
    return {
        "largest": answer["largest_batch_per_device"],
        "trials": len(answer["trials"]),
        "tried": [trial["batch"] for trial in answer["trials"]],
        "seconds": seconds,
        "recommended": answer["recommended_batch_per_device"],
    }


def peer(name: str, task: str, limit: str) -> dict[str, Any]:
    """A peer's answer, from a child that may die of the limit."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "trials"
        done = subprocess.run(
            [sys.executable, __file__, "--peer", name, "--task", task, "--limit", limit],
            env={**environment(), "TRIALS": str(log)}, cwd=folder,
            capture_output=True, text=True, timeout=1800, check=False,
        )  # fmt: skip
        tried = log.read_text().split() if log.exists() else []
    seconds = time.monotonic() - started
    found = {"trials": len(tried), "tried": [int(n) for n in tried], "seconds": seconds}
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {**found, "error": f"exit code {done.returncode}: {words[:300]}"}
    return {**found, "largest": int(done.stdout.strip().splitlines()[-1])}


# -- inside a peer's child ------------------------------------------------------------------------
class Training:
    """The task's model with AdamW, limited as tpukit limits itself."""

    def __init__(self, task: str, limit: str) -> None:
        import torch

        from tpukit.hardware.options import HardwareOptions
        from tpukit.hardware.select import open_backend
        from tpukit.io.units import parse_bytes
        from tpukit.registry.classes import load_task
        from tpukit.train.task import for_probing

        self.task = for_probing(load_task(task, SETTINGS[task], os.environ["DATA"]))
        self.backend = open_backend(HardwareOptions(hw="cpu", memory_limit=parse_bytes(limit)))
        self.model = self.task.build_model(self.backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tried: list[int] = []

    def loss(self, rows: int):
        from tpukit.train.task import PlanSettings

        if rows not in self.tried:
            self.tried.append(rows)
            with Path(os.environ["TRIALS"]).open("a") as log:
                log.write(f"{rows}\n")
        (batch, *_) = self.task.probe_batches(PlanSettings(rows, rows, 1, 0))
        return self.task.loss(self.model, batch)["loss"].mean()


def accelerate_finder(training: Training) -> int:
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=ACCELERATE_START)
    def train(batch_size: int) -> int:
        for _ in range(2):
            training.loss(batch_size).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        return batch_size

    return int(train())


def lightning_finder(training: Training) -> int:
    import lightning
    import torch
    from lightning.pytorch.tuner import Tuner

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model
            self.batch_size = START

        def training_step(self, batch, index):
            return training.loss(len(batch[0]))

        def configure_optimizers(self):
            return training.optimizer

        def train_dataloader(self):
            rows = torch.utils.data.TensorDataset(torch.zeros(1 << 16))
            return torch.utils.data.DataLoader(rows, batch_size=self.batch_size)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    found = Tuner(trainer).scale_batch_size(
        Module(), mode="binsearch", init_val=START, steps_per_trial=2, max_trials=40
    )
    return int(found or 0)


# -- whether an answer is true -----------------------------------------------------------------
def runs(task: str, limit: str, rows: int, *, xla: bool) -> bool:
    """Whether a training run at this batch lives within the limit."""
    epoch = str(-(-SAMPLES // rows))
    command = ["train"] if task == "eit" else ["summarize-train"]
    with tempfile.TemporaryDirectory() as folder:
        done = tpukit(*command, *task_options(task), "--memory-limit", limit,
                      "--global-batch-size", str(rows), "--accumulate", "1", "--max-steps", epoch,
                      "--num-workers", "0", "--results-dir", f"{folder}/run", xla=xla)  # fmt: skip
    if done.returncode and not any(word in done.stderr for word in ("memory", "bad_alloc")):
        raise RuntimeError(done.stderr[-2000:])
    return done.returncode == 0


def make_data(task: str, folder: str) -> None:
    kind = "eit" if task == "eit" else "dialogues"
    tpukit("data", kind, "--out", folder, "--n", str(SAMPLES)).check_returncode()


def main() -> None:
    arguments = parse()
    if arguments.xla and arguments.task == "llm":
        SETTINGS["llm"] |= SHORTER
    if arguments.peer:
        finders = {"lightning": lightning_finder, "accelerate": accelerate_finder}
        print(finders[arguments.peer](Training(arguments.task, arguments.limit)))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DATA"] = folder
        make_data(arguments.task, folder)
        report(arguments)


def report(arguments: argparse.Namespace) -> None:
    task, limit, xla = arguments.task, arguments.limit, arguments.xla
    # Samples are packed and tokens cached for all of them alike.
    runs(task, limit, 32, xla=xla)
    answers = {"tpukit": ours(task, limit, xla=xla)}
    for name in () if xla else ("lightning", "accelerate"):
        answers[name] = peer(name, task, limit)
    for answer in answers.values():
        if largest := answer.get("largest"):
            answer["runs"] = runs(task, limit, largest, xla=xla)
            answer["runs_a_tenth_above"] = runs(task, limit, -(-largest * 11 // 10), xla=xla)
            answer["true"] = answer["runs"] and not answer["runs_a_tenth_above"]
    result = {
        "question": "largest batch under a memory limit: trials and seconds",
        "task": task,
        "settings": SETTINGS[task],
        "hardware": "torch_xla on the CPU" if xla else "CPU, eager",
        "limit": limit,
        "cores": os.cpu_count(),
        "answers": answers,
    }
    path = RESULTS / f"probe_peers_{task}{'_xla' * xla}.json"
    write_result(path, result)
    names = ("largest", "trials", "seconds", "runs", "runs_a_tenth_above", "error")
    print(table([{"finder": finder, **{name: answer.get(name, "") for name in names}}
                 for finder, answer in answers.items()]))  # fmt: skip


if __name__ == "__main__":
    main()
