"""Importing a Python file of the user's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tpukit.errors import ConfigError, TpukitError
from tpukit.train.mistakes.raised import cause_line, task_failure

USER_MODULE = "tpukit_user_"
"""What the names of such modules begin with."""
_importing: set[Path] = set()


def import_user_file(path: Path, option: str) -> ModuleType:
    """The module of a file that an option names. Raises ConfigError where it cannot be imported."""
    refuse_while_importing()
    if not path.is_file():
        raise ConfigError(f"{option}: there is no file {path}.", "Check the path before the colon.")
    module_name = f"{USER_MODULE}{option.strip('-')}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # DataLoader workers find a class again by its module's name.
    sys.modules[module_name] = module
    _importing.add(path)
    try:
        spec.loader.exec_module(module)
    except TpukitError:
        raise
    except Exception as error:
        failure = task_failure(error)
        cause = failure.message if failure else cause_line(error)
        raise ConfigError(
            f"{option}: {path} cannot be imported: {cause}",
            f"`python {path}` shows the whole traceback.",
        ) from error
    finally:
        _importing.discard(path)
    return module


def refuse_while_importing() -> None:
    """Raises ConfigError where a script that uses tpukit is imported for what it defines."""
    for path in _importing:
        raise ConfigError(
            f"{path} runs tpukit while it is imported.",
            'Put what it runs under `if __name__ == "__main__":`.',
        )
