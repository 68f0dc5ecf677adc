"""Two nodes under torchrun, with two ranks on each, in network namespaces of one machine."""

import subprocess
import sys
import time
from pathlib import Path

from namespaces import TwoNamespaces, WiredNamespaces
from runs import TINY, environment

TRAIN = ["train", "--task", TINY, "--hw", "cpu", "--ckpt-every", "10"]
FOREVER = ["--max-steps", "1000000"]
HOSTS = ["node-a", "node-b"]


class TwoNodes(TwoNamespaces):
    """The namespaces, and torchrun in them, under a host name of their own."""

    def start(self, node: int, *arguments: object, **variables: str) -> subprocess.Popen[str]:
        """torchrun on a node, as a user starts it."""
        torchrun = ["torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
                    "--nproc-per-node", "2", "--master-addr", "10.77.0.1", "--master-port", "29500",
                    "-m", "--", "tpukit"]  # fmt: skip
        return subprocess.Popen(
            [*self.inside(node), "unshare", "--uts", "sh", "-c",
             f'hostname {HOSTS[node]}; exec "$@"', "sh",
             sys.executable, "-m", *torchrun, *map(str, arguments)],
            env=environment({"GLOO_SOCKET_IFNAME": self.links[node], **variables}),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def both(self, *arguments: object, other: tuple[object, ...] = ()) -> list[tuple[int, str]]:
        """The same command on both; `other`: what the second one is given in addition."""
        started = [self.start(0, *arguments), self.start(1, *arguments, *other)]
        return [ended(process) for process in started]


def ended(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str]:
    told = process.communicate(timeout=seconds)[1]
    return process.returncode, told


class TwoWiredNodes(TwoNodes, WiredNamespaces):
    """Joined by a link of the test's own."""


def wait_for_checkpoint(run: Path, after: str = "") -> str:
    pointer = run / "checkpoints" / "latest"
    for _ in range(1200):
        if pointer.exists() and pointer.read_text() != after:
            return pointer.read_text()
        time.sleep(0.1)
    raise AssertionError("no checkpoint within two minutes")
