"""What holds for every test."""

import os
import signal
import tempfile
import time
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest
from forked import SHARED, begun, start_server
from s3_server import BUCKET, Faults, s3_server

MARKS_THAT_NEED = {
    "xla": "torch_xla", "plan": "torch_xla", "torch_tpu": "torch_tpu", "jax": "jax",
}  # fmt: skip
# Each of the test processes computes on a core of its own: read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # as the command line does

# The same examples in each run; a loaded machine is no failure.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

MOST_SHOWN = 6000
"""Characters of what a test printed."""
LEFT_OUT = "left out: no time"
GRACE_SECONDS = 1200
"""What tests that have begun may still take after the time that `--until` gives."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="the K-th of N parts of the tests, from 0")
    parser.addoption("--until", type=float, metavar="SECONDS",
                     help="begin no test after this time since 1970")  # fmt: skip


def pytest_xdist_auto_num_workers() -> int:
    """One test process more than cores: many tests wait for a process, a signal or a file."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Children must be interruptible, also where this process was started in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", 0) and not hasattr(config, "workerinput"):
        share_servers(config)


def pytest_collection_finish() -> None:
    begun()


def share_servers(config: pytest.Config) -> None:
    """Test processes fork from the same two servers, which have imported torch and torch_xla."""
    folder = tempfile.TemporaryDirectory()
    os.environ[SHARED] = folder.name
    config.add_cleanup(folder.cleanup)
    for stack in filter(find_spec, ("torch", "torch_xla")):
        config.add_cleanup(start_server(stack, folder.name).kill)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of one part; skips those of torch_xla and libtpu where it is missing."""
    if config.option.part:
        part, parts = map(int, config.option.part.split("/"))
        others = [i for i in items if zlib.crc32(i.nodeid.encode()) % parts != part]
        items[:] = [i for i in items if zlib.crc32(i.nodeid.encode()) % parts == part]
        config.hook.pytest_deselected(items=others)
    for mark, module in MARKS_THAT_NEED.items():
        if find_spec(module) is None:
            skip = pytest.mark.skip(reason=f"needs {module}")
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begins no test after the given time; the second try of one that failed is not left out.

    One whose two tries may take more than `GRACE_SECONDS` must begin as much earlier.
    """
    until = item.config.option.until
    limit = item.get_closest_marker("timeout")
    seconds = limit.args[0] if limit else float(item.config.getini("timeout"))
    latest = time.time() + max(0, 2 * seconds - GRACE_SECONDS)
    if until and latest > until and getattr(item, "execution_count", 1) == 1:
        pytest.skip(LEFT_OUT)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Names, at the very end, the tests that were left out or passed on their second try alone, and
    shows why their first one failed."""
    yield
    skipped = terminalreporter.getreports("skipped")
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"first try of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
        for title, text in report.sections:
            terminalreporter.write_line(f"{title}:\n{text[-MOST_SHOWN:]}")
    tried, passed = (
        {report.nodeid for report in terminalreporter.getreports(outcome)}
        for outcome in ("rerun", "passed")
    )
    for what, names in {
        LEFT_OUT: [report.nodeid for report in skipped if LEFT_OUT in str(report.longrepr)],
        "passed on the second try": sorted(tried & passed),
    }.items():
        if names:
            terminalreporter.section(f"{len(names)} tests {what}")
            terminalreporter.write_line("\n".join(names))


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """A test leaves the environment as it found it."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def s3_of_module() -> Iterator[tuple[dict[str, str], Faults]]:
    with s3_server() as served:
        yield served


@pytest.fixture
def s3(
    s3_of_module: tuple[dict[str, str], Faults], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[str, Faults]]:
    """A folder of a bucket, and the faults of its server; copies lie in a folder of the test."""
    variables, faults = s3_of_module
    for name, value in {**variables, "TPUKIT_CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    faults.arm()
    yield f"s3://{BUCKET}/{tmp_path.name}", faults
    faults.arm()
