"""What the ranks of a run send each other: collectives and bytes of a start, a step and a save.

Rank 0 of 2 to 512 ranks runs the engine with torch's fake process group: it makes every call and
nothing is sent. Each collective is counted with the bytes that this rank hands over and gets; of
the fake ranks' plans for a sharded checkpoint each is rank 0's. A resume is a start with a
checkpoint there.

    python benchmarks/rank_messages.py [--ranks 2 8 64 512]
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpukit import Datasets, Task
from tpukit.hardware.collectives import GlooCollectives
from tpukit.hardware.eager import distributed
from tpukit.hardware.eager.backend import EagerBackend
from tpukit.hardware.eager.devices import CpuDevice
from tpukit.hardware.eager.distributed import DDP, FSDP, SingleProcess
from tpukit.hardware.eager.grad_scaling import PlainUpdate
from tpukit.train.config import TrainConfig
from tpukit.train.engine import Engine
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder

STEPS, WIDTH, LAYERS = 8, 1024, 2
PHASES = ("start", "step", "save", "resume")


class Rows:
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"x": np.full(WIDTH, index, np.float32)}


class Layers(Task):
    """Two linear layers."""

    name = "layers"

    def build_model(self, ops: Any) -> nn.Module:
        parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        return nn.Sequential(*parts)

    def datasets(self) -> Datasets:
        return Datasets(Rows(), None)

    def loss(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": model(batch["x"]).square().mean(1)}


class Counts(TorchDispatchMode):
    """Collectives by phase; those of other threads come by `add`."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "start"
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "barrier" not in func.__name__:
            self.add([args, kwargs])
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and "_base_" in func.__name__:
            for tensor in tree_leaves(args[0]):  # else memory as it was
                tensor.zero_()
        return result

    def add(self, values: Any, phase: str = "") -> None:
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        self.calls[phase or self.phase] += 1
        self.bytes[phase or self.phase] += sum(t.nbytes for t in tensors)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


def counted(counts: Counts, owner: Any, name: str, phase: str) -> None:
    """Lets calls of owner.name be a phase."""
    original = getattr(owner, name)

    def call(*args: Any, **more: Any) -> Any:
        with counts.during(phase):
            return original(*args, **more)

    setattr(owner, name, call)


def fake_objects(counts: Counts, world: int) -> None:
    """Objects that ranks exchange: each fake rank's is this one's. Counted here, as the writer's
    thread is outside of the dispatch mode."""
    import pickle

    from torch.distributed.checkpoint import default_planner

    def count(value: Any, copies: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            counts.calls["save"] += 2  # the sizes, then the objects
            counts.bytes["save"] += copies * (len(pickle.dumps(value)) + 8)

    def gather(obj: Any, object_gather_list: list[Any] | None = None, **_: Any) -> None:
        count(obj, world)
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * world

    def gather_all(object_list: list[Any], obj: Any, **_: Any) -> None:
        count(obj, world)
        object_list[:] = [obj] * world

    def scatter(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        **_: Any,
    ) -> None:
        given = scatter_object_input_list or [None]
        count(given, 1)
        scatter_object_output_list[0] = given[0]

    def broadcast(object_list: list[Any], **_: Any) -> None:
        count(object_list, 1)

    fakes: dict[str, Callable[..., Any]] = {
        "gather_object": gather, "all_gather_object": gather_all,
        "scatter_object_list": scatter, "broadcast_object_list": broadcast,
    }  # fmt: skip
    for name, fake in fakes.items():
        setattr(dist, name, fake)
        setattr(distributed_c10d, name, fake)
    # Every rank's part is rank 0's.
    default_planner._validate_global_plan = lambda *_: True
    default_planner.dedup_save_plans = lambda plans, *_: [plans[0], *map(shards_of, plans[1:])]


def shards_of(plan: SavePlan) -> SavePlan:
    items = [item for item in plan.items if item.type == WriteItemType.SHARD]
    return dataclasses.replace(plan, items=items)


def summed(state, bucket):  # type: ignore[no-untyped-def]
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def measure(world: int, kind: str) -> dict[str, dict[str, float]]:
    """Calls and bytes by phase of one rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    new_group = dist.new_group
    dist.new_group = lambda *_, **__: new_group(backend="fake")
    distributed.sum_gradients = summed  # the fake group's future holds nothing
    counts = Counts()
    fake_objects(counts, world)
    counted(counts, Engine, "train_step", "step")
    counted(counts, Engine, "_stops", "step")
    counted(counts, Engine, "save", "save")

    def place(model: nn.Module) -> nn.Module:
        return model

    parallelism: SingleProcess = DDP(place)
    if kind == "fsdp":
        parallelism = FSDP(dist.init_device_mesh("cpu", (world,)), None, half=None)
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part, steps in (("start", STEPS), ("resume", STEPS + 1)):
            counts.calls.clear()
            counts.bytes.clear()
            backend = EagerBackend(
                "cpu", CpuDevice(), "fp32", GlooCollectives(world), parallelism, PlainUpdate(),
                compiles=False,
            )  # fmt: skip
            config = TrainConfig(
                max_steps=steps, global_batch_size=world, log_every=10**6, ckpt_every=steps,
                num_workers=0, schedule="constant",
            )  # fmt: skip
            request = TrainingRequest(Layers(), config, RunFolder(Path(folder) / "run"))
            with counts:
                train_run(request, backend, lambda _: None)
            if part == "resume":
                found = "start"
                result[part] = {"calls": counts.calls[found], "bytes": counts.bytes[found]}
                continue
            for phase, times in (("start", 1), ("step", STEPS), ("save", 1)):
                result[phase] = {
                    "calls": counts.calls[phase] / times, "bytes": counts.bytes[phase] / times
                }  # fmt: skip
    return result


def table(rows: Sequence[tuple[str, int, dict[str, dict[str, float]]]]) -> str:
    lines = [
        "| ranks hold | ranks | " + " | ".join(f"{phase}: collectives, bytes" for phase in PHASES)
        + " |",
        "|---|---|" + "---|" * len(PHASES),
    ]  # fmt: skip
    for kind, world, found in rows:
        cells = (f"{found[p]['calls']:.1f}, {found[p]['bytes']:,.0f}" for p in PHASES)
        lines.append(f"| {kind} | {world} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 512])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.ranks[0], arguments.one)))
        return
    names = {"ddp": "all weights", "fsdp": "shards"}
    rows = []
    for kind, name in names.items():
        for world in arguments.ranks:
            command = [sys.executable, __file__, "--one", kind, "--ranks", str(world)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            rows.append((name, world, json.loads(done.stdout.splitlines()[-1])))
    print(table(rows))


if __name__ == "__main__":
    main()
