"""Two nodes whose link delays, loses or holds packets, and a node that stands still."""

import os
import signal
import subprocess
import time

import pytest
from runs import parameters, relative_difference, result, tpukit
from two_nodes import FOREVER, TRAIN, TwoWiredNodes, ended, joined

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SOME = [*TRAIN, "--max-steps", "60", "--set", "pause=0.1"]
IMPATIENT = [*FOREVER, "--collective-timeout", "20s"]


@pytest.fixture
def nodes():
    with joined(TwoWiredNodes) as pair:
        yield pair


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The parameters of a single process."""
    run = tmp_path_factory.mktemp("whole") / "run"
    result(tpukit(*SOME, "--set", "pause=0", "--results-dir", run, "--json"))
    return parameters(run)


def processes(nodes):
    pids = subprocess.check_output(["ip", "netns", "pids", nodes.names[1]], text=True)
    return [int(pid) for pid in pids.split()]


def test_a_bad_link_changes_nothing(nodes, tmp_path, whole):
    nodes.wire.delay, nodes.wire.loss = 0.01, 0.02
    ends = nodes.both(*SOME, "--set", "pause=0", "--results-dir", tmp_path / "run")
    assert [code for code, _ in ends] == [0, 0], ends
    assert relative_difference(parameters(tmp_path / "run"), whole) < 1e-4
    assert nodes.wire.carried > 500 and nodes.wire.lost


@pytest.mark.parametrize("what", ["link", "node"])
def test_a_stall_of_thirty_seconds_is_waited_for(nodes, tmp_path, whole, what):
    started = nodes.training(tmp_path / "run", *SOME)
    stall(nodes, what)
    time.sleep(30)
    assert [process.poll() for process in started] == [None, None]
    if what == "link":
        nodes.wire.held = False
    else:
        signal_all(nodes, signal.SIGCONT)
    assert [ended(process)[0] for process in started] == [0, 0]
    assert relative_difference(parameters(tmp_path / "run"), whole) < 1e-4


def test_a_link_that_stalls_for_good_names_the_peer_on_both(nodes, tmp_path):
    started = nodes.training(tmp_path / "run", *TRAIN, *IMPATIENT)
    stall(nodes, "link")
    ends = [ended(process, 120) for process in started]
    for (code, told), peer in zip(ends, ["node-b", "10.77.0.1"], strict=True):
        assert code != 0 and "the connection to another rank was lost" in told
        assert f"no sign of life from node {peer}" in told


def test_a_node_that_stands_still_for_good_is_named(nodes, tmp_path):
    started = nodes.training(tmp_path / "run", *TRAIN, *IMPATIENT)
    stall(nodes, "node")
    code, told = ended(started[0], 120)
    assert code != 0 and "no sign of life from node node-b" in told


def stall(nodes, what):
    if what == "link":
        nodes.wire.held = True
    else:
        signal_all(nodes, signal.SIGSTOP)


def signal_all(nodes, number):
    for pid in processes(nodes):
        os.kill(pid, number)
