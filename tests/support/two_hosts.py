"""A sharded run's newest state on virtual devices, saved as two hosts of a slice would save it.

    python two_hosts.py RUN OUT [PORT HOST]

Each of two processes has all eight devices and keeps the parts of four, which do not adjoin.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from tiny_task import Container

from tpukit.hardware.collectives import GlooCollectives
from tpukit.hardware.options import HardwareOptions
from tpukit.hardware.select import open_backend
from tpukit.train.checkpoint_writer import BackgroundWriter
from tpukit.train.config import TrainConfig
from tpukit.train.plan import TrainingRequest, plan_run
from tpukit.train.resume import find_checkpoint
from tpukit.train.run_folder import RunFolder
from tpukit.train.run_state import load_run_state

run, out, *place = sys.argv[1:]
child = None
if not place:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = [str(free.getsockname()[1]), "0"]
    child = subprocess.Popen([sys.executable, __file__, run, out, place[0], "1"])
port, host = place[0], int(place[1])
backend = open_backend(HardwareOptions(hw="tpu", devices=8, shard=True))
config = TrainConfig(global_batch_size=16, max_steps=20, lr=1e-3, ema_decay=0.9, ema_every=3,
                     ema_warmup=6, weight_decay=0.01)  # fmt: skip
request = TrainingRequest(Container(width=64), config, RunFolder(Path(run)))
plan = plan_run(request, backend, resumes=True)
state = load_run_state(plan, backend, find_checkpoint(request, backend, print))

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
dist.init_process_group("gloo", rank=host, world_size=2)
backend.collectives = GlooCollectives(2)
mesh, every = backend.mesh, backend.mesh._parts
mesh.hosts = 2


def parts_of_this_host(tensor):
    found = sorted(every(tensor).items())
    assert len(found) == 8, "not split over all devices"
    return dict(found[host::2])


mesh._parts = parts_of_this_host
writer = BackgroundWriter(Path(out) / "checkpoints", is_main=host == 0)
writer.write(state, is_best=False)
writer.close()
if child is not None:
    assert child.wait(100) == 0
