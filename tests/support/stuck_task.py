"""A run that waits outside of Python from its third step on, as one that waits for a device."""

import ctypes
import os
from pathlib import Path

from tiny_task import Tiny


class Stuck(Tiny):
    """Of several ranks the second waits, and the first for it."""

    passes = 0

    def loss(self, model, batch):
        self.passes += 1
        if self.passes == 3 and os.environ.get("RANK", "1") == "1":
            Path(os.environ["STUCK_FILE"]).touch()
            lock = ctypes.create_string_buffer(64)
            for _ in range(2):
                ctypes.CDLL(None).pthread_mutex_lock(lock)
        return super().loss(model, batch)
