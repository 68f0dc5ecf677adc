"""Each sentence of SECURITY.md."""

import base64
import hashlib
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from runs import ROOT, TINY, environment, failure, result, started, tpukit, wait_until

from tpukit.errors import TpukitError, UsageError
from tpukit.hardware.host import Host
from tpukit.hardware.launch.holders import process_name
from tpukit.hardware.launch.launcher import torchrun_command
from tpukit.io.folders import VARIABLE, cache_folder
from tpukit.io.secrets import without_secrets
from tpukit.tasks.eit.data.dataset import find_normalisation
from tpukit.tasks.eit.data.samples import read_sample
from tpukit.tasks.eit.model.published import read_published

TRAIN = ["train", "--task", TINY, "--hw", "cpu", "--ckpt-every", "2", "--num-workers", "0"]
SECRET = "do-not-show-7f3a9c"


# -- opens -------------------------------------------------------------------------------------
@contextmanager
def training(folder, *options):
    """A run that trains on, from its first checkpoint."""
    words = [*TRAIN, "--max-steps", 1000000, "--set", "pause=0.1", "--results-dir", folder]
    with started(*words, *options) as process:
        wait_until((folder / "checkpoints" / "latest").exists, process)
        yield psutil.Process(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def listening(process):
    """Addresses that a process and its children listen on."""
    family = [process, *process.children(recursive=True)]
    connections = [c for member in family for c in member.net_connections()]
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [[], ["--master-port", "29761"]],
    ids=["free", "given"],
)
def test_ranks_of_one_host_listen_on_loopback_alone(tmp_path, options):
    with training(tmp_path / "run", "--devices", "2", *options) as process:
        assert listening(process) == {"127.0.0.1"}


def test_a_single_process_listens_nowhere(tmp_path):
    with training(tmp_path / "run") as process:
        assert listening(process) == set()


def test_only_a_users_own_torchrun_may_listen_on_the_network():
    """What tpukit starts itself is of one host: no option of it names another."""
    for port in (None, 29500):
        command = torchrun_command(["tpukit"], 2, port)
        assert "--local-addr=127.0.0.1" in command
        assert not [word for word in command if word.startswith(("--nnodes", "--rdzv"))]


# -- writes ------------------------------------------------------------------------------------
def test_training_writes_to_its_folders_alone(tmp_path):
    places = {name: tmp_path / name for name in ("run", "cache", "tmp", "home", "cwd")}
    for folder in places.values():
        folder.mkdir()
    variables = {VARIABLE: str(places["cache"]), "TMPDIR": str(places["tmp"]),
                 "HOME": str(places["home"]), "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    command = [sys.executable, "-m", "tpukit", *TRAIN, "--max-steps", "2", "--results-dir",
               str(places["run"])]  # fmt: skip
    repository = str(ROOT)
    subprocess.run(command, env=environment({**variables, "PYTHONPATH": repository}),
                   cwd=places["cwd"], check=True, stderr=subprocess.DEVNULL)  # fmt: skip
    assert (places["run"] / "config.toml").exists()
    left = {name: [p for p in folder.rglob("*") if p.is_file()] for name, folder in places.items()}
    assert not left["home"] and not left["cwd"] and not left["tmp"]


# -- loads -------------------------------------------------------------------------------------
class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return (open, (str(Path(tempfile.gettempdir()) / "trapped"), "w"))


def test_a_malicious_pickle_is_refused_everywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    torch.save({"model": Trap(), "model_args": Trap()}, tmp_path / "best.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Trap()))
    for name in ("mean.pth", "std.pth"):
        torch.save(Trap(), tmp_path / name)
    np.savez(tmp_path / "sample.npz", ys=np.array([Trap()], object), xs=np.zeros((128, 128)))
    (tmp_path / "pickled.npz").write_bytes(pickle.dumps(Trap()))
    reads = [(read_published, tmp_path / f) for f in ("best.pt", "plain.pt")]
    reads += [(find_normalisation, [tmp_path])]
    reads += [(read_sample, tmp_path / f) for f in ("sample.npz", "pickled.npz")]
    for read, argument in reads:
        with pytest.raises(TpukitError):
            read(argument)
    assert not (tmp_path / "trapped").exists()


def test_a_task_file_is_code(tmp_path):
    (tmp_path / "task.py").write_text("raise SystemError('this line was executed')")
    told = failure(tpukit("train", "--task", tmp_path / "task.py:T", "--hw", "cpu", cwd=tmp_path))
    assert "this line was executed" in told


# -- prints ------------------------------------------------------------------------------------
def test_variables_stay_secret(tmp_path):
    secrets = dict.fromkeys(("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY"), SECRET)
    trained = tpukit(*TRAIN, "--max-steps", 2, "--results-dir", tmp_path / "run", "--json",
                     env=secrets)  # fmt: skip
    result(trained)
    looked = tpukit("doctor", "--report", "--verbose", "--hw", "cpu", env=secrets, cwd=tmp_path)
    printed = "".join([trained.stdout, trained.stderr, looked.stdout, looked.stderr])
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "CPU" in printed and kept
    assert SECRET not in printed and SECRET.encode() not in kept


def test_tokens_are_hidden(tmp_path):
    hidden = [
        f"pip install --index-url https://me:{SECRET}@host/simple",
        f"https://{SECRET}@host/x.git",
        f"https://host/x?token={SECRET}&b=1",
        "hf_" + SECRET.replace("-", ""),
        f"hf_{SECRET.replace('-', ''):x<34}_old",
        f"password={SECRET}",
        f"https://me:pass@{SECRET}@host/simple",
        f"login(token='{SECRET}')",
        f'{{"username": "me", "key": "{SECRET}"}}',
        f"Authorization: Bearer {SECRET}",
        f"AWS_SECRET_ACCESS_KEY: {SECRET}, password = '{SECRET}'",
        f"jupyter --token {SECRET}",
        f"mount -o user=me,passwd={SECRET.replace('-', '')}",
        f"//host/:_authToken npm_{SECRET.replace('-', '')}4{'A' * 30}",
        f"docker login -p dckr_pat_{SECRET.replace('-', '')}{'B' * 30}",
        f"Cookie: eyJhbGciOiJ.{SECRET}.x",
        f"https://host/blob?se=2026&sig={SECRET}",
    ]
    for text in map(without_secrets, hidden):
        assert "7f3a9c" not in text and "[left out]" in text
    for plain in (
        "https://host/a@b, 3 tokens = 5",
        "hf_sentiment_analysis/hf_training/a.py",
        "class Qwen2_5OmniThinkerForConditionalGeneration, sha256-0123456789abcdef0123456789abcdef",
        "eos_token = '</s>', token: 151643, key: layers.10.weight, tokens: a1",
    ):
        assert without_secrets(plain) == plain
    lines = [f"CUDA out of memory. Tried to allocate 2.00 GiB {text}" for text in hidden]
    text = "\n".join([*lines, *(f"RuntimeError: {text}" for text in hidden)])
    log = tmp_path / "log.txt"
    log.write_text(text)
    for arguments in (["--explain", log], ["--explain", log, "--json"], ["--explain", hidden[0]]):
        done = tpukit("doctor", *arguments, cwd=tmp_path)
        assert "7f3a9c" not in done.stdout + done.stderr


def test_a_report_loads_nothing_and_runs_its_own_script_alone(tmp_path):
    run = tmp_path / "<script>alert(1)<script>"
    result(tpukit(*TRAIN, "--max-steps", 2, "--results-dir", run, "--json"))
    page = (run / "report.html").read_text()
    sums = [base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
            for name in ("style", "script")
            for source in re.findall(rf"<{name}>(.*?)</{name}>", page, re.DOTALL)]  # fmt: skip
    allowed = "img-src data:; style-src 'sha256-{}'; script-src 'sha256-{}'".format(*sums)
    assert f"content=\"default-src 'none'; {allowed}\"" in page
    assert "alert(1)" in page and "<script>alert" not in page


def test_arguments_of_other_processes_are_not_shown():
    host = Host()
    code = "import time; print(flush=True); time.sleep(60)"
    python = [sys.executable, "-c", code, SECRET]
    shown = []
    for command in (python, [python[0], "-u", *python[1:]]):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.readline()
        shown.append(process_name(host, process.pid))
        process.kill()
        process.wait()
    assert shown == [sys.executable, sys.executable]


# -- keeps -------------------------------------------------------------------------------------
def test_a_cache_that_others_may_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(UsageError, match="can be written by other users") as caught:
        cache_folder()
    assert VARIABLE in caught.value.hint
    (tmp_path / "cache").chmod(0o755)
    assert cache_folder() == tmp_path / "cache"
    if os.geteuid() == 0:
        os.chown(tmp_path / "cache", 65534, 65534)
        with pytest.raises(UsageError):
            cache_folder()


def test_the_cache_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "new"))
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
