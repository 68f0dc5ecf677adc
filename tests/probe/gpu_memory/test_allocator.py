"""The caching allocator's simulation against torch's documented rules."""

from random import Random

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


# -- with expandable_segments ---------------------------------------------------------------------
def grown(sizes, events, room=None):
    return replay(sizes, events, room, expandable=True)


def test_a_growing_segment_is_mapped_in_pages_and_split_to_the_byte():
    assert grown([1], [0])[0].most_reserved == 2 * MIB
    usage, _ = grown([11 * MIB + 3, 8 * MIB, MIB // 2], [0, 1, 2])
    assert usage.most_allocated == 19 * MIB + MIB // 2 + 512
    # One page of 20 MiB holds both large blocks, one of 2 MiB the small one.
    assert usage.most_reserved == 22 * MIB


def test_a_batch_that_grows_takes_the_gap_that_a_fixed_segment_leaves():
    sizes, events = [30 * MIB, 50 * MIB], [0, ~0, 1]
    assert replay(sizes, events)[0].most_reserved == 80 * MIB
    assert grown(sizes, events)[0].most_reserved == 60 * MIB


def test_the_block_at_the_end_is_left_to_grow_where_another_one_fits():
    # The gap of 40 MiB is taken for 25, although the 30 MiB at the end would do.
    sizes = [40 * MIB, 10 * MIB, 30 * MIB, 25 * MIB, 60 * MIB]
    usage, _ = grown(sizes, [0, 1, 2, ~0, ~2, 3, 4])
    assert usage.most_reserved == 120 * MIB


def test_whole_free_pages_are_unmapped_before_memory_runs_out():
    # 30 MiB are free, 20 of them a whole page between two blocks in use.
    sizes = [30 * MIB, 30 * MIB, 20 * MIB, 20 * MIB, 10 * MIB]
    usage, fits = grown(sizes, [0, 1, 2, ~1, 3, 4], room=100 * MIB)
    assert fits and usage.most_reserved == 80 * MIB
    usage, fits = grown([30 * MIB, 30 * MIB, 20 * MIB, 40 * MIB], [0, 1, 2, ~1, 3], room=100 * MIB)
    assert fits and (usage.retries, usage.reserved, usage.most_reserved) == (
        1,
        100 * MIB,
        100 * MIB,
    )
    assert not grown([30 * MIB] * 3 + [40 * MIB], [0, 1, 2, ~1, 3], room=80 * MIB)[1]


def test_a_gap_is_mapped_again_before_the_end():
    # 60 MiB after a release of the 40 that are free between two blocks; then 40 in their place, and
    # 25, for which the gap gets two pages although 20 MiB are free at the end.
    sizes = [40 * MIB, 40 * MIB, 40 * MIB, 60 * MIB, 40 * MIB, 25 * MIB]
    usage, fits = grown(sizes, [0, 1, 2, ~1, 3, ~3, 4, 5], room=170 * MIB)
    assert fits and (usage.retries, usage.reserved, usage.most_reserved) == (
        2,
        160 * MIB,
        160 * MIB,
    )


def test_no_byte_is_lost_in_a_thousand_births_and_deaths():
    random = Random(0)
    sizes = [
        random.choice((random.randint(1, 2 * MIB), random.randint(1, 90 * MIB))) for _ in range(999)
    ]
    alive, events = [], []
    for index in range(999):
        events.append(index)
        alive.append(index)
        while len(alive) > 12 or (alive and random.random() < 0.4):
            events.append(~alive.pop(random.randrange(len(alive))))
    events += [~index for index in alive]
    for room in (None, 700 * MIB):
        usage, fits = grown(sizes, events, room)
        assert fits and usage.allocated == 0
        assert usage.most_allocated <= usage.most_reserved <= replay(sizes, events)[0].most_reserved
