"""A task whose checkpoints take a moment to write; a file `saving` is there meanwhile."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tiny_task import Tiny

from tpukit.train import checkpoint


class SlowSaving(Tiny):
    """Tiny, but each file of a checkpoint takes a second."""

    name = "slow-saving"

    def build_model(self, ops):
        write = checkpoint.save_file

        def slow(tensors, path):
            marker = Path("saving")
            marker.touch()
            time.sleep(1.0)
            write(tensors, path)
            marker.unlink()

        checkpoint.save_file = slow
        return super().build_model(ops)
