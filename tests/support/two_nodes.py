"""Two nodes under torchrun, with two ranks on each, in network namespaces of one machine."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from namespaces import TwoNamespaces, WiredNamespaces
from runs import TINY, environment, wait_until

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

    def training(self, run: Path, *arguments: object) -> list[subprocess.Popen[str]]:
        """The same command on both, whose run has a checkpoint when this returns."""
        started = [self.start(node, *arguments, "--results-dir", run) for node in (0, 1)]
        wait_for_checkpoint(run)
        return started


@contextmanager
def joined(kind: type[TwoNodes]) -> Iterator[TwoNodes]:
    try:
        pair = kind()
    except (OSError, AssertionError, subprocess.CalledProcessError):
        pytest.skip("network namespaces or TUN devices are not permitted here")
    yield pair
    pair.close()


def ended(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str]:
    told = process.communicate(timeout=seconds)[1]
    return process.returncode, told


class TwoWiredNodes(TwoNodes, WiredNamespaces):
    """Joined by a link of the test's own."""


def wait_for_checkpoint(run: Path, after: str = "") -> str:
    pointer = run / "checkpoints" / "latest"
    wait_until(lambda: pointer.exists() and pointer.read_text() != after)
    return pointer.read_text()
