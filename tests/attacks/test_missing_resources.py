"""What is missing: a disk's room, file handles, home, compiler, a temporary folder, a steady clock.

A run ends in an error of tpukit's or whole; the same command then ends it in the same bytes.
"""

import random
import resource
import shutil
import subprocess

import pytest
from attacked import TRAIN, check, content, finish, start, succeed, told_in, wait, whole
from runs import SUPPORT

pytestmark = pytest.mark.slow
NOWHERE = "/proc/none"


@pytest.fixture(params=range(2))
def rng(request):
    return random.Random(request.param)


@pytest.fixture
def command(tmp_path):
    """A run; at the end the same command has made it whole."""
    run = tmp_path / "run"
    yield [*TRAIN, str(run)]
    succeed([*TRAIN, str(run)])
    assert content(run) == whole(tuple(TRAIN))[0], "other content"


@pytest.mark.parametrize(
    ("limit", "values"), [("RLIMIT_FSIZE", (1, 60_000)), ("RLIMIT_NOFILE", (8, 40))]
)
def test_short_files_and_few_of_them(limit, values, rng, command, tmp_path):
    limits = {getattr(resource, limit): rng.randrange(*values)}
    check(wait(start(command, tmp_path, limits=limits)), told_in(tmp_path))


def test_no_home_and_no_cache(command):
    names = ("HOME", "XDG_CACHE_HOME", "TPUKIT_CACHE_DIR")
    finish(command, dict.fromkeys(names, NOWHERE))


def test_no_temporary_folder(command):
    finish(command, {"TMPDIR": NOWHERE})


@pytest.mark.parametrize("compiled", [False, True])
def test_no_compiler(compiled, command, tmp_path):
    options = ["--compile", "--results-dir", str(tmp_path / "compiled")] if compiled else []
    finish([*command, *options], {"PATH": "/nowhere"})


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_a_clock_that_jumps(rng, command, tmp_path):
    """The clock of the day jumps to and fro; the monotonic one does not."""
    library = tmp_path / "jumping_clock.so"
    source = SUPPORT / "jumping_clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    succeed(command, {"LD_PRELOAD": str(library), "CLOCK_JUMPS": str(rng.randrange(10**6))})
