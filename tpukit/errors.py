"""The errors tpukit raises on purpose.

TpukitError                 message, hint, id; exit code 1
├── UsageError              wrong usage or bad input; exit code 2
│   ├── ConfigError         an option or a config file
│   ├── DataError           a data set, a file in it, a field of it
│   ├── CheckpointError     a run folder or a checkpoint that cannot be used
│   └── HardwareError       hardware that is missing or lacks what was requested
├── JobError                the job itself failed
│   ├── TaskFailedError     a task's own code raised an exception
│   ├── NonFiniteLossError  the loss, a gradient or the state became NaN or infinite
│   └── OutOfMemoryError    the memory of the device, or the limit on it, is too small
└── InterruptedRunError     stopped by a signal, its checkpoint written; exit code 130 or 143

Library code raises; `tpukit.cli` alone prints and exits.
"""

from pathlib import Path


class TpukitError(Exception):
    """What went wrong and where (`message`), and what to do about it (`hint`).

    `id` is the stable name that `--json` and the knowledge files use.
    """

    exit_code = 1
    default_id = "error"

    def __init__(self, message: str, hint: str | None = None, *, id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.id = id or self.default_id

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class UsageError(TpukitError):
    """Wrong usage or bad input."""

    exit_code = 2
    default_id = "usage"


class ConfigError(UsageError):
    """An option, a preset or a config file that cannot be used."""

    default_id = "config"


class DataError(UsageError):
    """A data set, a file in it or a field of it that cannot be used."""

    default_id = "data"


class CheckpointError(UsageError):
    """A run folder or a checkpoint that cannot be used."""

    default_id = "checkpoint"


class HardwareError(UsageError):
    """Hardware that is missing, or lacks what was requested."""

    default_id = "hardware"


class JobError(TpukitError):
    """The job itself failed."""

    default_id = "job"


class TaskFailedError(JobError):
    """A task's own code raised an exception; a note holds its traceback.

    `traceback_file` is the run's log that has it too.
    """

    default_id = "task-failed"
    traceback_file: Path | None = None


class NonFiniteLossError(JobError):
    """The loss, a gradient or the state became NaN or infinite."""

    default_id = "non-finite-loss"


class OutOfMemoryError(JobError):
    """The memory of the device, or the limit on it, is too small."""

    default_id = "out-of-memory"


class InterruptedRunError(TpukitError):
    """Stopped by a signal; its checkpoint is written."""

    default_id = "interrupted"

    def __init__(self, message: str, hint: str | None = None, *, signal_number: int) -> None:
        super().__init__(message, hint)
        self.exit_code = 128 + signal_number

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return str(self).splitlines()
