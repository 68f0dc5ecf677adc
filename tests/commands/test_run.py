"""`tpukit run`: other programs on their own terminal, their log, and why they fail or hang."""

import json
import os
import pty
import re
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from kernels import error_of, execute, notebook_of, printed
from runs import environment, wait_until

from tpukit.io import relay
from tpukit.io.relay import OutputLog

FAILING = """
import torch_of_yesterday
"""
TWO_RANKS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(2)
dist.all_reduce(x)
if dist.get_rank() == 1:
    weight = torch.zeros(3, 4) @ torch.zeros(5, 2)
dist.all_reduce(x)
"""
STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ")


def start(*arguments, env=None, **options):
    words = [sys.executable, "-m", "tpukit", "run", *map(str, arguments)]
    return subprocess.Popen(words, text=True, env=environment(env), **options)


def run(*arguments, **options):
    options = {"stdin": -3, "stdout": -1, "stderr": -1, **options}
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_a_failure_is_explained_and_its_output_kept(tmp_path):
    script, log, hook = tmp_path / "train.py", tmp_path / "out.log", tmp_path / "hook.json"
    script.write_text("print('begun')" + FAILING)
    code, out, err = run(
        "--log", log, "--notify", f"cat > {hook}", "--", sys.executable, script, "--json", "-h"
    )
    assert code == 1 and out == "begun\n"
    assert "ended with exit code 1" in err and str(log) in err
    assert "First cause (line 5, module-not-found" in err and f"{script}, line 2" in err
    lines = log.read_text().splitlines()
    assert len(lines) == 5 and all(map(STAMP.match, lines))
    told = json.loads(hook.read_text())
    assert (told["event"], told["exit_code"], told["log"]) == ("failed", 1, str(log))
    assert told["explanations"][0]["id"] == "module-not-found"


def test_the_program_has_its_own_environment_and_a_success_says_nothing(tmp_path):
    names = ("PYTHONWARNINGS", "TMPDIR", "TORCH_DEVICE_BACKEND_AUTOLOAD", "NO_COLOR")
    code, out, err = run(
        "--log", tmp_path / "log", sys.executable, "-c",
        f"import os; print([os.environ.get(name) for name in {names}])",
        env={"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    given = environment({"TMPDIR": str(tmp_path)})
    assert (code, out, err) == (0, f"{[given.get(name) for name in names]}\n", "")


def test_values_around_an_exception_are_read_and_the_platforms_module_still_runs(tmp_path):
    script, others = tmp_path / "train.py", tmp_path / "others"
    others.mkdir()
    (others / "sitecustomize.py").write_text(
        "import os\nif 'TPUKIT_RECORD' in os.environ: print('the platform')"
    )
    script.write_text("row = {'img': 1}\nprint(row['image'])")
    code, out, err = run(
        "--log", tmp_path / "log", "--", sys.executable, script, env={"PYTHONPATH": str(others)}
    )
    assert (code, out) == (1, "the platform\n")
    assert "`row` in train.py:2 has `img`, and no `image`." in " ".join(err.split())


def test_a_thread_that_raises_is_reported_where_the_command_succeeds(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import threading\n"
        "def load():\n    raise IndexError('no batch 3')\n"
        "threads = [threading.Thread(target=load, name='loader')]\n"
        "threads[0].start(); threads[0].join()\n"
        "for step in range(5): print('step', step)\n"
    )
    code, out, err = run("--json", "--log", tmp_path / "log", "--", sys.executable, script)
    told = json.loads(out.splitlines()[-1])
    assert code == 0 and told["ok"] and told["explanations"][0]["id"] == "index-too-high"
    assert "ended with exit code 0, but not loader" in err and "First cause" in err


def test_a_killed_command(tmp_path):
    code, out, err = run(
        "--json", "--log", tmp_path / "log", "--", "sh", "-c", "echo a; kill -9 $$"
    )
    told = json.loads(out)
    assert code == 137 and told["event"] == "killed" and told["exit_code"] == 137
    assert "was ended by SIGKILL" in err and "host-oom-killed" in err and err.startswith("a\n")


def test_a_hanging_command_is_reported_and_takes_signals(tmp_path):
    hook = tmp_path / "hook"
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('ended by ' + str(_[0])))\n"
        "print('Epoch 1', flush=True)\ntime.sleep(100)"
    )
    process = start(
        "--silence", "1s", "--log", tmp_path / "log", "--notify",
        f"cat > {hook}.new; mv {hook}.new {hook}", "--",
        sys.executable, "-c", script, stdin=-3, stdout=-1, stderr=-1,
    )  # fmt: skip
    wait_until(hook.exists, process)
    told = json.loads(hook.read_text())
    assert told["event"] == "silent" and told["exit_code"] is None
    assert told["explanations"][0]["id"] == "silent-and-waiting"
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "ended by 15\n" in err
    assert err.count("First cause") == 1  # a stop that was asked for needs no cause
    assert "Epoch 1" in (tmp_path / "log").read_text()


def test_on_a_terminal_the_command_has_it(tmp_path):
    """Size, input and a key's signal, which comes once."""
    script = (
        "import os, signal, time\n"
        "count = []\n"
        "signal.signal(signal.SIGINT, lambda *_: count.append(1))\n"
        "print(os.get_terminal_size().columns, os.isatty(0), os.isatty(2), flush=True)\n"
        "print('got', input(), flush=True)\n"
        "time.sleep(0.5)\nprint('interrupts', len(count))"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS="", LINES="")
        del os.environ["COLUMNS"], os.environ["LINES"]
        import fcntl
        import struct
        import termios

        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 123, 0, 0))
        words = ["tpukit", "run", "--log", str(tmp_path / "log"), sys.executable, "-c", script]
        os.execv(sys.executable, [sys.executable, "-m", *words])
    shown = b""

    def read_until(word):
        nonlocal shown
        while word not in shown:
            shown += os.read(terminal, 4096)

    read_until(b"True\r\n")
    os.write(terminal, b"a line\n")
    read_until(b"got a line\r\n")
    os.write(terminal, b"\x03")
    read_until(b"interrupts 1\r\n")
    assert shown.startswith(b"123 True True\r\n")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


@pytest.mark.slow
def test_output_that_nobody_reads_ends_the_command(tmp_path):
    process = start("--log", tmp_path / "log", "--", "yes", stdin=-3, stdout=-1, stderr=-1)
    assert process.stdout.readline() == "y\n"
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    process.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [(["--", "nothing"], "Error: nothing: cannot be run (No such file or directory)."),
     (["--", "./"], "Error: ./: cannot be run (Permission denied)."),
     (["--silence", "soon", "ls"], "Error: invalid duration 'soon'."),
     ([], "Error: Missing argument 'COMMAND...'.")],
)  # fmt: skip
def test_wrong_usage(arguments, line):
    code, _, err = run(*arguments)
    assert code == 2 and line in err and "Traceback" not in err


def test_a_log_that_cannot_be_written_ends_alone(tmp_path):
    """As on a full disk: here by the limit on a file's size, of which the system says EFBIG."""
    script = "for i in $(seq 400); do echo line $i; done; sleep 1; echo end; exit 3"
    code, out, err = run(
        "--log", tmp_path / "log", "--", "sh", "-c", script,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )  # fmt: skip
    assert code == 3 and out.endswith("line 400\nend\n")
    assert "log is incomplete: File too large." in err and "ended with exit code 3" in err
    assert len((tmp_path / "log").read_bytes()) == 4096


def test_logs_in_the_cache_are_the_users_own(tmp_path):
    """Of an earlier version's folder too: output may hold secrets."""
    (tmp_path / "runs").mkdir(0o755)
    code, *_ = run("--", "true", env={"TPUKIT_CACHE_DIR": str(tmp_path)})
    assert code == 0 and any((tmp_path / "runs").iterdir())
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o700


def test_a_log_keeps_the_end_and_no_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "MOST_BYTES", 4000)
    log = OutputLog(tmp_path / "log")
    for step in range(200):
        log.add(1, f"\r{step} %".encode())
        log.add(2, f"line {step}\nnext ".encode())
    log.add(1, b"\rall\r\n")
    log.close()
    lines = [STAMP.sub("", line) for line in (tmp_path / "log").read_text().splitlines()]
    assert 2000 < (tmp_path / "log").stat().st_size < 6100 and len(list(tmp_path.iterdir())) == 1
    assert lines[-3:] == ["next line 199", "all", "next "] and not any("%" in x for x in lines)


@pytest.mark.slow
def test_two_ranks_of_which_one_fails(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(TWO_RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    code, _, err = run("--log", tmp_path / "log", "--", *torchrun, script)
    first = err[err.index("First cause") :]
    assert code == 1 and "linear-input-size" in first.splitlines()[0]
    assert f"{script}, line 7 (rank 1)" in first and "Consequence" in first


def test_in_a_notebook(tmp_path):
    (tmp_path / "fail.py").write_text("print('Error: of its own')\nprint('after')" + FAILING)
    done = execute(
        notebook_of("%load_ext tpukit", "%tpukit run --log run.log -- python fail.py"), tmp_path,
        {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    cell = done["cells"][1]
    text = printed(cell)
    assert text.startswith("Error: of its own\nafter\n") and "First cause (line 6" in text
    assert error_of(cell) == ["The command ended with exit code 1."]
