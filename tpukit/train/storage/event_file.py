"""TensorBoard's event file, written with TensorBoard's own messages but without its writer.

Its writer, and torch's around it, import TensorFlow where that is installed: seconds, hundreds of
megabytes, and a library that may open the TPU.
"""

from __future__ import annotations

import os
import platform
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VERSION = "brain.Event:2"


class EventFile:
    """A new file in `folder`; what earlier files hold from step `first_step` on is superseded."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        name = f"events.out.tfevents.{time.time():.6f}.{platform.node()}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._write(file_version=VERSION)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(step=first_step, session_log=start)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of a step, and flushes them."""
        value = self._summary.Value
        parts = [value(tag=tag, simple_value=number) for tag, number in values.items()]
        self._write(step=step, summary=self._summary(value=parts))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        """One record: length, sum of the length, data, sum of the data (the TFRecord format)."""
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        data = self._event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        self._file.write(length + sums[0] + data + sums[1])
