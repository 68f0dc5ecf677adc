"""Nodes that give no sign of life are named."""

import pytest
import torch.distributed as dist
from runs import wait_until

from tpukit.hardware.launch import failures as heartbeat
from tpukit.hardware.launch.failures import Heartbeat


@pytest.fixture
def node(monkeypatch):
    """The heartbeat of a node, all over one store."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(heartbeat, "SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "SECONDS_TO_ASK", 1.0)
    made = []

    def make(number, nodes=3):
        monkeypatch.setenv("GROUP_RANK", str(number))
        monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
        monkeypatch.setenv("MASTER_ADDR", "host-of-the-store")
        monkeypatch.setattr("platform.node", lambda: f"host-{number}")
        made.append(Heartbeat(store))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_nodes_without_a_sign_of_life_are_named(node):
    first, second = node(0), node(1)
    second.start()
    wait_until(lambda: first.store.check(["tpukit/alive-1"]), seconds=4)
    assert first.silent_nodes() == ["number 2"], "it has never given one"
    second.stop()
    assert "host-1" in first.silent_nodes()


def test_a_store_that_does_not_answer_is_on_the_first_node(node):
    lost = node(1)

    class Silent:
        def check(self, keys):
            raise dist.DistNetworkError("Broken pipe")

    lost.store = Silent()
    assert lost.silent_nodes() == ["host-of-the-store"]


def test_one_node_has_no_others(node):
    assert node(0, nodes=1).silent_nodes() == []
