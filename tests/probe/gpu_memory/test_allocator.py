"""The caching allocator's simulation against torch's documented rules."""

import pytest

from tpukit.probe.gpu_memory.allocator import replay

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 3, 12 * MIB, 12 * MIB),
    ],
)
def test_one_block_is_rounded_and_comes_from_a_segment_of_its_class(size, allocated, reserved):
    usage, fits = replay([size], [0])
    assert fits
    assert (usage.most_allocated, usage.most_reserved) == (allocated, reserved)


def test_blocks_share_a_segment_and_are_reused_when_they_are_freed():
    # Four of 5 MiB in a 20 MiB segment; after the first is freed a fifth takes its place.
    usage, _ = replay([5 * MIB] * 5, [0, 1, 2, 3, ~0, 4])
    assert usage.most_reserved == 20 * MIB
    assert usage.allocated == 20 * MIB


def test_free_neighbours_merge_and_others_are_fragments():
    pieces = [5 * MIB] * 4 + [9 * MIB]
    merged, _ = replay(pieces, [0, 1, 2, 3, ~1, ~2, 4])
    assert merged.most_reserved == 20 * MIB
    apart, _ = replay(pieces, [0, 1, 2, 3, ~0, ~2, 4])
    assert apart.most_reserved == 40 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken():
    # A rest of a large block stays with it where it is no more than 1 MiB.
    usage, _ = replay([40 * MIB, 30 * MIB, 30 * MIB - MIB // 2, 40 * MIB], [0, 1, ~0, ~1, 2, 3])
    assert usage.most_reserved == 70 * MIB
    assert usage.allocated == 70 * MIB


def test_cached_segments_are_released_before_memory_runs_out():
    sizes = [40 * MIB, 60 * MIB, 50 * MIB]
    usage, fits = replay(sizes, [0, ~0, 1], room=64 * MIB)
    assert fits
    assert (usage.retries, usage.reserved) == (1, 60 * MIB)
    assert not replay(sizes, [0, 1], room=64 * MIB)[1]
