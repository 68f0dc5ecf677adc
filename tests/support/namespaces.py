"""Two nodes on one machine: network namespaces joined by a virtual link."""

import os
import signal
import subprocess

from wire import Wire


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class TwoNamespaces:
    """The namespaces, with the addresses 10.77.0.1 and 10.77.0.2."""

    def __init__(self) -> None:
        self.names = [f"tk{os.getpid()}{letter}" for letter in "ab"]
        self.links = [f"v{os.getpid()}{letter}" for letter in "ab"]
        for name in self.names:
            ip("netns", "add", name)
        self.connect()
        for number, (name, link) in enumerate(zip(self.names, self.links, strict=True), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")

    def connect(self) -> None:
        ip("link", "add", self.links[0], "netns", self.names[0], "type", "veth",
           "peer", "name", self.links[1], "netns", self.names[1])  # fmt: skip

    def inside(self, node: int) -> list[str]:
        """What runs a command in a namespace."""
        return ["ip", "netns", "exec", self.names[node]]

    def kill(self, node: int) -> None:
        """All processes of a node at once."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.names[node]], capture_output=True, text=True, check=True
        ).stdout.split()
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)

    def link(self, state: str) -> None:
        ip("-n", self.names[0], "link", "set", self.links[0], state)

    def close(self) -> None:
        for node in (0, 1):
            self.kill(node)
            ip("netns", "del", self.names[node])


class WiredNamespaces(TwoNamespaces):
    """Joined by a wire of the test's, which delays, loses and holds packets."""

    def connect(self) -> None:
        self.wire = Wire(list(zip(self.names, self.links, strict=True)))

    def close(self) -> None:
        self.wire.close()
        super().close()
