"""A run's newest state, loaded by these ranks and saved again: python copied_run.py RUN OUT [N].

N: with `--shard`, of that number of ranks; else in one process. RANK in OUT is the rank. The first
rank is late to empty the folder, in which no other may have begun.
"""

import os
import sys
import time
from pathlib import Path

from tiny_task import Container

from tpukit.hardware.modules import local
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend
from tpukit.io.files import partial_of, replacing_folder
from tpukit.train import checkpoint_writer
from tpukit.train.checkpoint_writer import BackgroundWriter
from tpukit.train.config import TrainConfig
from tpukit.train.plan import TrainingRequest, plan_run
from tpukit.train.resume import find_checkpoint
from tpukit.train.run_folder import RunFolder
from tpukit.train.run_state import load_run_state


def late(folder):
    time.sleep(0.3)
    assert not partial_of(folder).exists(), "another rank writes into a folder that is emptied"
    return replacing_folder(folder)


checkpoint_writer.replacing_folder = late
run, out, *ranks = sys.argv[1:]
devices = int(ranks[0]) if ranks else None
backend = open_backend(HardwareOptions(hw="cpu", devices=devices, shard=bool(ranks)))
config = TrainConfig(
    global_batch_size=16, max_steps=20, lr=1e-3, ema_decay=0.9, ema_every=3,
    ema_warmup=6, weight_decay=0.01,
)  # fmt: skip
request = TrainingRequest(Container(width=8195), config, RunFolder(Path(run)))
checkpoint = find_checkpoint(request, backend, print)
plan = plan_run(request, backend, resumes=True)
writer = BackgroundWriter(
    Path(out.replace("RANK", os.environ.get("RANK", ""))) / "checkpoints", is_main=backend.is_main
)
state = load_run_state(plan, backend, checkpoint)
rooms = []
if state.is_in_shards:  # as the engine does it after the first step
    fill = state.make_room()
    writer.prepare(lambda: rooms.extend(fill()))
writer.write(state, is_best=False)
writer.close()
found = state.state_dict()
kept = {local(t).data_ptr() for name in ("model", "optimizer", "ema") for t in found[name].values()}
assert kept.issuperset(room.data_ptr() for room in rooms), "a save took other memory"
backend.close()
