"""A link between two network namespaces that delays, loses and holds packets as it is told.

A kernel without netem has no such link: here each end is a TUN device, and a thread carries the
packets from one to the other.
"""

import ctypes
import fcntl
import os
import random
import select
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

SET_INTERFACE = 0x400454CA  # TUNSETIFF
PACKETS_ALONE = 0x1001  # IFF_TUN | IFF_NO_PI
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
LARGEST = 65536
"""Bytes of a packet, at most."""


class Wire(threading.Thread):
    """Carries packets between two namespaces until it is cut for good (`close`)."""

    def __init__(self, ends: list[tuple[str, str]]) -> None:
        """`ends`: a namespace and the name of the device in it, for each end."""
        super().__init__(daemon=True)
        self.delay = 0.0
        """Seconds that each packet takes."""
        self.loss = 0.0
        """Part of the packets that never arrive."""
        self.held = False
        """Whether packets wait; they go on in their order when it is over."""
        self.carried = self.lost = 0
        self.opened = threading.Event()
        self.closed = threading.Event()
        self.ends = ends
        self.start()
        assert self.opened.wait(10), "TUN devices are not permitted here"

    def close(self) -> None:
        self.closed.set()
        self.join(10)

    def run(self) -> None:
        first, second = (_device(*end) for end in self.ends)
        self.opened.set()
        other, waiting = {first: second, second: first}, deque[tuple[float, int, bytes]]()
        rng = random.Random(0)
        while not self.closed.is_set():
            for device in select.select([first, second], [], [], 0.001 if waiting else 0.05)[0]:
                packet = os.read(device, LARGEST)
                if rng.random() < self.loss:
                    self.lost += 1
                else:
                    waiting.append((time.monotonic() + self.delay, other[device], packet))
            while waiting and not self.held and waiting[0][0] <= time.monotonic():
                _, device, packet = waiting.popleft()
                with suppress(OSError):  # the other end is not up
                    os.write(device, packet)
                    self.carried += 1
        os.close(first)
        os.close(second)


def _device(namespace: str, name: str) -> int:
    """A new TUN device in a namespace; this thread stays there."""
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, SET_INTERFACE, struct.pack("16sH22x", name.encode(), PACKETS_ALONE))
    return device
