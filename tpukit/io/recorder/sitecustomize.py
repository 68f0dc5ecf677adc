"""Imported by each Python program that finds this folder on PYTHONPATH; then the platform's own.

It imports nothing until an exception is uncaught, and changes nothing else in the program.
"""

import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - no import at start-up


def _import_the_platforms() -> None:
    """Imports the module of this name that the folder hides, if there is one."""
    sys.path[:] = [folder for folder in sys.path if folder != _FOLDER]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401 - by the path another one
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


def _record_uncaught(file: str) -> None:
    """Chains the hooks for uncaught exceptions of the program and of its threads."""
    import threading

    shown, shown_of_threads = sys.excepthook, threading.excepthook

    def record(error: object, thread: str) -> None:
        try:
            import runpy

            names = runpy.run_path(os.path.join(_FOLDER, "record.py"))  # noqa: PTH118
            names["append_record"](file, error, thread)
        except BaseException:
            pass  # the program's own report must follow

    def hook(kind, error, trace):  # type: ignore[no-untyped-def]
        record(error, "")
        shown(kind, error, trace)

    def hook_of_threads(failed):  # type: ignore[no-untyped-def]
        if failed.exc_value is not None and failed.exc_type is not SystemExit:
            record(failed.exc_value, getattr(failed.thread, "name", "") or "thread")
        shown_of_threads(failed)

    sys.excepthook, threading.excepthook = hook, hook_of_threads


if os.environ.get("TPUKIT_RECORD"):
    _record_uncaught(os.environ["TPUKIT_RECORD"])
_import_the_platforms()
