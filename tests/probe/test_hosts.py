"""`doctor --hosts`: two namespaces with an ssh server each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import TwoNamespaces
from runs import ROOT, environment, failure, tpukit

from tpukit.probe.hosts.agreement import compare_clocks

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
OLD_TIMM = "Metadata-Version: 2.1\nName: timm\nVersion: 0.0.1\n"
SERVER = """\
Port 2222
ListenAddress 10.77.0.{number}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
SetEnv PYTHONPATH={path}
"""
CLIENT = """\
Host other
  HostName 10.77.0.2
Host *
  Port 2222
  IdentityFile {folder}/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


class TwoHosts(TwoNamespaces):
    """Namespaces with an ssh server each; the second may be another machine by its variables."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", folder / "key"], check=True)
        (folder / "config").write_text(CLIENT.format(folder=folder))
        self.serve(0)

    def serve(self, node, path=ROOT):
        file = self.folder / f"sshd-{node}"
        file.write_text(SERVER.format(number=node + 1, folder=self.folder, path=path))
        Path("/run/sshd").mkdir(exist_ok=True)
        subprocess.run([*self.inside(node), SSHD, "-f", file], check=True)

    def doctor(self, *arguments):
        ssh = f"ssh -F {self.folder / 'config'} -o BatchMode=yes -o ConnectTimeout=5"
        done = subprocess.run(
            [*self.inside(0), sys.executable, "-m", "tpukit", "doctor", *map(str, arguments),
             "--json"],
            env=environment({"TPUKIT_SSH": ssh}), capture_output=True, text=True, check=False,
            timeout=120,
        )  # fmt: skip
        found = json.loads(done.stdout)
        assert done.returncode == (0 if found["ok"] else 1), done.stderr
        return {check["id"].removeprefix("host-"): check for check in found["checks"]}


@pytest.fixture
def hosts(tmp_path):
    if SSHD is None or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs an ssh server, ip, and root")
    try:
        pair = TwoHosts(tmp_path)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("network namespaces are not permitted here")
    yield pair
    pair.close()


def statuses(checks):
    return {name: check["status"] for name, check in checks.items()}


BOTH = ["--hosts", "10.77.0.1,root@10.77.0.2"]


def test_hosts_that_are_alike(hosts, tmp_path):
    hosts.serve(1)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one.npy").write_bytes(b"12345")
    checks = hosts.doctor(*BOTH, "--data-path", tmp_path / "data")
    assert set(statuses(checks).values()) == {"pass"}
    assert "1 files" in checks["data"]["message"] and "29500" in checks["ports"]["message"]


def test_what_differs_is_named_with_its_host(hosts, tmp_path):
    (tmp_path / "timm-0.0.1.dist-info").mkdir()
    (tmp_path / "timm-0.0.1.dist-info" / "METADATA").write_text(OLD_TIMM)
    hosts.serve(1, f"{tmp_path}:{ROOT}")
    taken = subprocess.Popen(
        [*hosts.inside(1), sys.executable, "-c",
         "import socket, time; s = socket.create_server((\'\', 4000)); print(1, flush=True);"
         " time.sleep(100)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    taken.stdout.readline()
    # Each namespace has its own routes, and so its own file.
    checks = hosts.doctor(*BOTH, "--data-path", "/proc/self/net/fib_trie", "--master-port", 4000)
    assert statuses(checks) == {
        "hosts": "pass", "versions": "fail", "data": "fail", "clocks": "pass", "ports": "fail",
    }  # fmt: skip
    assert "root@10.77.0.2 has timm 0.0.1 (10.77.0.1: 1." in checks["versions"]["message"]
    assert "root@10.77.0.2 has 1 files" in checks["data"]["message"]
    assert "root@10.77.0.2 cannot listen on port 4000" in checks["ports"]["message"]


def test_a_name_that_the_others_do_not_know(hosts):
    """`other` is known to this host's ssh alone."""
    hosts.serve(1)
    checks = hosts.doctor("--hosts", "10.77.0.1,other", "--data-path", "/nowhere")
    assert "10.77.0.1 to other:29500" in checks["ports"]["message"]
    assert "other: there is no /nowhere" in checks["data"]["message"]


def test_a_host_that_does_not_answer(hosts):
    checks = hosts.doctor(*BOTH)
    assert "root@10.77.0.2: ssh: connect to host" in checks["hosts"]["message"]
    assert statuses(checks) == {"hosts": "fail"}


def test_a_shell_that_greets_is_named(tmp_path):
    """What `.bashrc` prints stands before the agent's answers."""
    (tmp_path / "ssh").write_text("echo Welcome to $1; cat > /dev/null\n")
    done = tpukit(
        "doctor", "--hosts", "a,b", "--json", env={"TPUKIT_SSH": f"sh {tmp_path / 'ssh'}"}
    )
    [check] = json.loads(done.stdout)["checks"]
    assert done.returncode == 1 and "a: its shell prints 'Welcome to a'" in check["message"]


def test_clocks_that_differ():
    verdict = compare_clocks({"a": 0.1, "b": 90.0, "c": -0.2})
    assert verdict.status == "warn" and verdict.message == "b is 90 s ahead of a"
    assert compare_clocks({"a": 0.1, "b": 2.0}).status == "pass"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--hosts", "a"], "two or more"),
        (["--hosts", "a,a"], "two or more"),
        (["--hosts", "a,-oProxyCommand=x"], "is not a host"),
        (["--hosts", "a,"], "is not a host"),
        (["--hosts", "a,b", "--quick"], "cannot be combined"),
        (["--data-path", "x"], "are of --hosts"),
    ],
)
def test_wrong_input(arguments, expected):
    assert expected in failure(tpukit("doctor", *arguments))
