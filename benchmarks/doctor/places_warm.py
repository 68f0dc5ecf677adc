"""Runs scripts in forks of a process that has imported the large libraries: seconds, not minutes.

Reads a line of JSON a script (script, log, environment) and answers with its exit code. Standard
library alone: it runs in the environment of the scripts.
"""

import contextlib
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

LARGE = ("numpy", "torch", "torch_xla", "transformers", "peft", "timm", "accelerate", "jax")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in LARGE:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    from transformers import GPT2LMHeadModel, Trainer  # noqa: F401 - lazy parts

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            run(**request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def run(script: str, log: str, environment: dict[str, str]) -> None:
    """Runs a script as the main program of this fork, which then ends."""
    os.chdir(Path(script).parent)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ.update(environment)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"], sys.argv, sys.path[0] = main, [script], str(Path(script).parent)
    hook = Path(environment["PYTHONPATH"].split(os.pathsep)[0], "sitecustomize.py")
    if "TPUKIT_RECORD" in environment:
        names = {"__file__": str(hook), "__name__": "hook"}
        exec(compile(hook.read_text(), str(hook), "exec"), names)
    code = 0
    try:
        exec(compile(Path(script).read_text(), script, "exec"), main.__dict__)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else bool(error.code)
    except BaseException as error:
        code, trace = 1, error.__traceback__
        sys.excepthook(type(error), error, trace.tb_next if trace else None)
    with contextlib.suppress(Exception):
        import threading

        threading._shutdown()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        raise
