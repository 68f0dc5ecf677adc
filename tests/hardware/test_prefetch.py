"""Batches made ahead, by DataLoader workers and by a thread."""

import threading

import pytest
from fake_backend import FakeBackend

from tpukit.hardware.prefetch import loader_workers, prefetch, workers_of_devices, workers_of_rank


def prefetching():
    return [t for t in threading.enumerate() if t.name == "prefetch"]


def test_all_in_order_and_no_thread_left():
    assert list(prefetch(range(100), lambda item: item * 2)) == list(range(0, 200, 2))
    assert prefetching() == []


@pytest.mark.parametrize("where", ["loader", "transfer"])
def test_errors_come_out_where_the_batch_would(where):
    def loader():
        yield 1
        if where == "loader":
            raise OSError("file removed")
        yield 2

    def transfer(item):
        if where == "transfer" and item == 2:
            raise OSError("file removed")
        return item

    batches = prefetch(loader(), transfer)
    assert next(batches) == 1
    with pytest.raises(OSError, match="file removed"):
        next(batches)
    assert prefetching() == []


def test_closing_ends_the_thread():
    batches = prefetch(iter(int, 1), lambda item: item)
    next(batches)
    batches.close()
    assert prefetching() == []


def test_no_more_than_asked_for_is_made_ahead():
    made = []
    batches = prefetch(iter(int, 1), lambda item: made.append(item) or item, depth=2)
    next(batches)
    threading.Event().wait(0.5)
    assert len(made) <= 1 + 2 + 1
    batches.close()


def test_the_loader_starts_in_the_calling_thread():
    """Worker processes live as long as the thread that started them."""
    threads = []

    class Loader:
        def __iter__(self):
            threads.append(threading.current_thread())
            return iter([1])

    assert list(prefetch(Loader(), lambda item: item)) == [1]
    assert threads == [threading.main_thread()]


@pytest.mark.parametrize(
    ("cores", "eight_chips", "two_gpus"), [(96, 32, 16), (24, 22, 12), (4, 2, 2), (1, 0, 2)]
)
def test_loader_workers_by_cores_and_devices(monkeypatch, cores, eight_chips, two_gpus):
    monkeypatch.setattr("tpukit.hardware.prefetch.allowed_cores", lambda: cores)
    assert workers_of_devices(8) == eight_chips
    assert workers_of_rank(2) == two_gpus


def test_requested_loader_workers_are_shared_by_the_ranks():
    backend = FakeBackend()
    backend.world_size = 2
    assert [loader_workers(backend, n) for n in (0, 3)] == [0, 2]


def test_a_cpu_makes_its_batches_in_a_thread():
    assert loader_workers(FakeBackend()) == 0
