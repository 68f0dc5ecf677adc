"""A run folder in a bucket: what is there after faults, and what a run finds again."""

import json
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from fake_backend import FakeBackend
from forked import environment
from runs import TINY, killed_sessions, latest, same_bytes, tpukit
from s3_server import SECRET
from tiny_task import Tiny

from tpukit.commands.options.training import task_defaults
from tpukit.errors import TpukitError, UsageError
from tpukit.io import remote
from tpukit.io.remote import Remote, RemoteError
from tpukit.train import remote_run
from tpukit.train.config import resolve
from tpukit.train.plan import TrainingRequest
from tpukit.train.run import train_run
from tpukit.train.run_folder import RunFolder, open_run, run_folder

TENSORS = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")
STEPS, ANEW = 6, "step-00000006"


@pytest.fixture
def s3(s3):
    """The address of a run, and the faults of its server."""
    folder, faults = s3
    return f"{folder}/run", faults


def silent(message):
    pass


def request_of(place, **config):
    settings = {"max_steps": STEPS, "global_batch_size": 16, "log_every": 2, "ckpt_every": 2,
                "num_workers": 0, **config}  # fmt: skip
    # As the command line has it.
    return TrainingRequest(Tiny(), resolve(settings, task_defaults(Tiny())), run_folder(place))


def elsewhere(monkeypatch, tmp_path, name):
    """Another machine: nothing of the run is there."""
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / name))
    remote_run._STORES.clear()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The tensors of a run that nothing disturbed, in a folder."""
    folder = RunFolder(tmp_path_factory.mktemp("whole") / "run")
    train_run(replace(request_of("x"), folder=folder), FakeBackend(), silent)
    return [(folder.checkpoints / ANEW / name).read_bytes() for name in TENSORS]


def tensors_at(address):
    there = Remote(address)
    assert there.read("checkpoints/latest") == f"{ANEW}\n".encode()
    return [there.read(f"checkpoints/{ANEW}/{name}") for name in TENSORS]


def test_a_run_is_found_again_on_another_machine(s3, whole, monkeypatch, tmp_path):
    address, _ = s3
    result = train_run(request_of(address), FakeBackend(), silent)
    assert result.run == address and tensors_at(address) == whole
    names = {name.partition("/")[0] for name in Remote(address).find()}
    assert names >= {"config.toml", "metrics.jsonl", "log.txt", "report.html", "logs"}
    assert not any(name.startswith(".") for name in names)
    elsewhere(monkeypatch, tmp_path, "other")
    run = open_run(address, silent)
    assert run.checkpoint.path.name == "step-00000006" and run.address == address
    elsewhere(monkeypatch, tmp_path, "third")
    again = train_run(request_of(address), FakeBackend(), silent)
    assert again.finished and again.resumed_from == STEPS


@pytest.mark.slow
def test_only_the_last_and_the_best_checkpoint_stay(s3):
    address, _ = s3
    train_run(request_of(address, ckpt_every=1), FakeBackend(), silent)
    names = {name.split("/")[1] for name in Remote(address).find("checkpoints")}
    assert {n for n in names if n.startswith("step-")} == {"step-00000005", ANEW}


def test_a_damaged_checkpoint_there_is_skipped(s3, whole, monkeypatch, tmp_path):
    address, _ = s3
    train_run(request_of(address), FakeBackend(), silent)
    Remote(address).write(f"checkpoints/{ANEW}/model.safetensors", b"\0" * 100)
    elsewhere(monkeypatch, tmp_path, "other")
    lines = []
    result = train_run(request_of(address), FakeBackend(), lines.append)
    assert result.resumed_from == 4 and tensors_at(address) == whole
    assert any("Skipping checkpoint step-00000006" in line for line in lines)


@pytest.mark.parametrize("how", [pytest.param("fail", marks=pytest.mark.slow), "lost"])
def test_requests_that_fail_change_nothing(s3, whole, how):
    address, faults = s3
    faults.arm(how, at=range(3, 200, 7))
    train_run(request_of(address), FakeBackend(), silent)
    assert faults.met > 5
    faults.arm()
    assert tensors_at(address) == whole


def test_a_server_that_is_gone_ends_the_run_with_an_error(s3, whole, monkeypatch):
    """In two lines; the same command goes on once it is there again."""
    monkeypatch.setattr(remote, "DEADLINE_SECONDS", 1.0)
    address, faults = s3
    faults.arm("fail", at=range(30, 10_000))
    with pytest.raises(RemoteError) as caught:
        train_run(request_of(address), FakeBackend(), silent)
    assert len(str(caught.value).splitlines()) == 2 and SECRET not in str(caught.value)
    faults.arm()
    result = train_run(request_of(address), FakeBackend(), silent)
    assert result.resumed_from == 2 and tensors_at(address) == whole


def test_a_run_that_was_replaced_ends_at_its_next_checkpoint(s3):
    """Where its file says that another run has taken over."""
    address, _ = s3
    lease, other = remote_run.Lease(Remote(address), silent), {"owner": "x", "host": "h"}
    with lease:
        lease.require()
        Remote(address).write(remote_run.LEASE, json.dumps(other).encode())
        with pytest.raises(UsageError, match="Another run is writing to"):
            lease.require()
    assert Remote(address).read(remote_run.LEASE)  # it is the other one's


def test_a_run_in_any_of_fsspecs_stores(whole, monkeypatch, tmp_path):
    """Of a store without coroutines too."""
    elsewhere(monkeypatch, tmp_path, "cache")
    address = f"memory://{tmp_path.name}/run"
    train_run(request_of(address, max_steps=2), FakeBackend(), silent)
    elsewhere(monkeypatch, tmp_path, "other")
    assert train_run(request_of(address), FakeBackend(), silent).resumed_from == 2
    assert tensors_at(address) == whole


def test_a_second_run_in_the_same_place_is_refused(s3, monkeypatch, tmp_path):
    """On another host, as long as the first one gives a sign; a run that ended is followed."""
    monkeypatch.setattr(remote_run, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(remote_run, "BEAT_SECONDS", 0.2)
    address, _ = s3
    there = Remote(address)
    with remote_run.Lease(there, silent):
        elsewhere(monkeypatch, tmp_path, "other")
        monkeypatch.setattr(remote_run.platform, "node", lambda: "elsewhere")
        with pytest.raises(UsageError, match="Another run is writing to"):
            train_run(request_of(address), FakeBackend(), silent)
    there.write(remote_run.LEASE, json.dumps({"owner": "x", "host": "h", "process": 1}).encode())
    assert train_run(request_of(address), FakeBackend(), silent).finished


@pytest.mark.slow
def test_an_old_run_is_set_aside(s3, whole):
    address, _ = s3
    train_run(request_of(address, max_steps=2), FakeBackend(), silent)
    train_run(request_of(address, resume=False), FakeBackend(), silent)
    assert tensors_at(address) == whole
    assert open_run(f"{address}.old-1", silent).checkpoint.state.step == 2


@pytest.mark.slow
def test_weights_are_exported_to_an_address(s3):
    address, _ = s3
    train_run(request_of(address, max_steps=2), FakeBackend(), silent)
    exported = tpukit("test", "--run", address, "--task", TINY, "--export", f"{address}-weights")
    assert exported.returncode == 0, exported.stderr
    assert Remote(f"{address}-weights").find()["model.safetensors"].size


@pytest.mark.slow
def test_weights_and_checkpoints_are_taken_from_an_address(s3, tmp_path):
    address, _ = s3
    train_run(request_of(address, max_steps=2), FakeBackend(), silent)
    resumed = train_run(request_of(tmp_path / "a", resume_from=address), FakeBackend(), silent)
    assert resumed.resumed_from == 2 and resumed.steps == STEPS
    begun = train_run(request_of(tmp_path / "b", init_from=address), FakeBackend(), silent)
    assert begun.resumed_from is None


# -- command lines -------------------------------------------------------------------------------
def arguments(address):
    return ["train", "--task", TINY, "--hw", "cpu", "--max-steps", str(STEPS), "--ckpt-every", "2",
            "--log-every", "2", "--num-workers", "0", "--results-dir", address]  # fmt: skip


def test_the_commands_take_addresses(s3, whole, monkeypatch, tmp_path):
    address, _ = s3
    done = tpukit(*arguments(address), "--json")
    assert json.loads(done.stdout)["run"] == address, done.stderr
    assert tensors_at(address) == whole
    elsewhere(monkeypatch, tmp_path, "other")
    tested = tpukit("test", "--run", address, "--json")
    assert json.loads(tested.stdout)["samples"] == 10, tested.stderr
    assert b"worst" in Remote(address).read("tests.json")
    assert tensors_at(address) == whole  # a test writes no checkpoint


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_request_goes_on(s3, whole):
    """While the state file of the second checkpoint is written."""
    address, faults = s3
    faults.arm("kill-within", at=[1], of="checkpoints/step-00000004/state.json")
    assert tpukit(*arguments(address)).returncode == -signal.SIGKILL
    assert faults.met == 1
    faults.arm()
    done = tpukit(*arguments(address), "--json")
    assert json.loads(done.stdout)["resumed_from"] == 2, done.stderr
    assert tensors_at(address) == whole


# -- faults of each request ----------------------------------------------------------------------
LEAST_REQUESTS = 70
"""What the run makes at least; the tests meet all of them in steps."""


def requests_of(address, faults):
    """The number of requests that the run makes where nothing happens."""
    faults.arm()
    train_run(request_of(f"{address}-counted"), FakeBackend(), silent)
    assert len(faults.requests) >= LEAST_REQUESTS
    return len(faults.requests)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill-before", "kill-within", "kill-after"])
def test_kills_at_any_request(s3, whole, how, monkeypatch, tmp_path):
    """Each run is killed at a later request, and goes on on another machine each second time."""
    address, faults = s3
    kills = 0
    for number in range(1, requests_of(address, faults) + 1, 3):
        place = f"{address}-{number}"
        faults.arm(how, at=[number])
        code = tpukit(*arguments(place)).returncode
        assert code == (-signal.SIGKILL if faults.met else 0)
        kills += faults.met
        faults.arm()
        if number % 2:
            elsewhere(monkeypatch, tmp_path, f"machine-{number}")
        done = tpukit(*arguments(place))
        assert done.returncode == 0, (number, done.stderr)
        assert tensors_at(place) == whole, number
    assert kills >= LEAST_REQUESTS // 3


@pytest.mark.slow
@pytest.mark.parametrize(("how", "first", "step"), [
    ("fail", 1, 2), ("fail", 2, 2), ("lost", 1, 2), ("lost", 2, 2), ("late", 1, 2), ("hang", 1, 6),
])  # fmt: skip
def test_faults_of_any_request(s3, whole, how, first, step):
    """Two hundred in all; each run ends with all its checkpoints, or with an error in a
    minute."""
    address, faults = s3
    met = 0
    for number in range(first, requests_of(address, faults) + 1, step):
        place = f"{address}-{number}"
        faults.arm(how, at=[number])
        began = time.monotonic()
        try:
            train_run(request_of(place), FakeBackend(), silent)
        except TpukitError as error:
            assert time.monotonic() - began < 60 and SECRET not in str(error)
            faults.arm()
            train_run(request_of(place), FakeBackend(), silent)
        else:
            met += faults.met
        faults.arm()
        assert tensors_at(place) == whole, number
    assert met >= LEAST_REQUESTS // step - 1


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "step"), [(2, 8), (4, 14)])
def test_kills_of_several_ranks(s3, ranks, step, tmp_path):
    """The process that was sending is killed, and the others end with it."""
    address, faults = s3
    several = ["--devices", ranks]
    local = tmp_path / "whole"
    assert tpukit(*arguments(local), *several, ranks=ranks).returncode == 0
    whole = [(local / "checkpoints" / ANEW / name).read_bytes() for name in TENSORS]
    for number in range(5, LEAST_REQUESTS, step):
        place = f"{address}-{number}"
        faults.arm("kill-within", at=[number])
        code = tpukit(*arguments(place), *several, ranks=ranks).returncode
        assert bool(code) == bool(faults.met)
        faults.arm()
        done = tpukit(*arguments(place), *several, ranks=ranks)
        assert done.returncode == 0, (number, done.stderr)
        assert tensors_at(place) == whole, number


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "seed", "count"), [
    (2, 0, 25), (2, 1, 25), (4, 2, 17), (4, 3, 17), (4, 4, 16),
])  # fmt: skip
def test_kills_of_sharded_runs_at_any_moment(s3, ranks, seed, count, monkeypatch, tmp_path):
    """A hundred in all, of any rank, within the first four steps of a session."""
    address, _ = s3
    draws = random.Random(seed)
    kills = [f"moment:{draws.randrange(1000)}:{draws.randrange(ranks)}" for _ in range(count)]

    def argv(place):
        return [
            "train", "--task", TINY.replace(":Tiny", ":Container"), "--hw", "cpu", "--shard",
            "--devices", ranks, "--results-dir", place, "--max-steps", 4 * len(kills) + 2,
            "--num-workers", "0", "--ckpt-every", "2", "--set", "dropout=0.2",
            "--set", "width=8195", "--log-every", "3",
        ]  # fmt: skip

    whole = tmp_path / "whole"
    assert killed_sessions(tmp_path, [(argv(whole), None)]) == [0]
    *statuses, last = killed_sessions(tmp_path, [(argv(address), at) for at in (*kills, None)])
    assert (last, statuses.count(signal.SIGKILL)) == (0, len(kills)), statuses
    elsewhere(monkeypatch, tmp_path, "other")
    found = run_folder(address)
    found.store.pull()
    assert latest(found.path).name == latest(whole).name and same_bytes(found.path, whole)


class Hosts:
    """Two torchruns with folders of their own: they share the bucket alone."""

    def __init__(self, tmp_path):
        self.tmp_path = tmp_path

    def session(self, steps, place):
        """How both ended: code and standard error."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [w if w != str(STEPS) else str(steps) for w in arguments(place)]
        hosts = [
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank",
                 str(rank), "--nproc-per-node", "1", "--master-addr", "127.0.0.1",
                 "--master-port", str(port), "-m", "tpukit", *map(str, words), "--shard",
                 "--set", "schedule=constant"],
                env={**environment(), "TPUKIT_CACHE_DIR": str(self.tmp_path / f"host-{rank}")},
                stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        said = [host.communicate(timeout=300)[1] for host in hosts]
        return [(host.returncode, text) for host, text in zip(hosts, said, strict=True)]

    def run(self, steps, place):
        for code, said in self.session(steps, place):
            assert code == 0, said[-3000:]


def weights_of(place):
    checkpoint = open_run(place, silent).checkpoint
    assert checkpoint.state.step == STEPS
    return checkpoint.tensors("model")


def same(found, expected):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.slow
def test_hosts_that_share_nothing_but_the_bucket_save_shards(s3, monkeypatch, tmp_path):
    """Each sends its shards, and both resume from all."""
    address, _ = s3
    hosts = Hosts(tmp_path)
    hosts.run(4, address)
    hosts.run(STEPS, address)
    hosts.run(STEPS, tmp_path / "whole")
    names = Remote(address).find(f"checkpoints/{ANEW}")
    assert sum(name.endswith(".distcp") for name in names) == 2
    assert not any(path.suffix == ".distcp" for path in (tmp_path / "host-1").rglob(".step-*/*"))
    elsewhere(monkeypatch, tmp_path, "other")
    assert same(weights_of(address), weights_of(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["__0_0.distcp", "__1_0.distcp"])
def test_faults_of_shards_of_either_host(s3, monkeypatch, tmp_path, shard):
    """The host that sends the second checkpoint's shard is killed, then its request is lost and
    the next one hangs."""
    address, faults = s3
    hosts = Hosts(tmp_path)
    hosts.run(STEPS, tmp_path / "whole")
    faults.arm("kill-within", at=[1], of=f"step-00000004/{shard}")
    ended = hosts.session(STEPS, address)
    assert faults.met == 1 and all(code for code, _ in ended), ended
    faults.arm("lost", at=[1], of=f"step-00000004/{shard}")
    hosts.run(4, address)
    assert faults.met == 1
    faults.arm("hang", at=[1], of=f"{ANEW}/{shard}")
    hosts.run(STEPS, address)
    assert faults.met == 1
    faults.arm()
    elsewhere(monkeypatch, tmp_path, "other")
    assert same(weights_of(address), weights_of(tmp_path / "whole"))
