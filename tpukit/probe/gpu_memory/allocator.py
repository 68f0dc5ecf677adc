"""CUDA's caching allocator as a simulation: rounding, segments, splitting, merging.

By torch 2.9's `c10/cuda/CUDACachingAllocator.cpp` (`get_free_block`, `alloc_block`, `should_split`,
`try_merge_blocks`, `release_cached_blocks`) and its note [Expandable Segments]: default settings,
or `expandable_segments`; one stream.
"""

import bisect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MIB = 2**20
ROUNDED = 512
SMALL = MIB
"""Largest block that comes from a small segment."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
LEAST_OWN_SEGMENT, SEGMENT_ROUNDED = 10 * MIB, 2 * MIB
"""Smallest block with a segment of its own, and what such segments are multiples of."""


class NoRoomError(Exception):
    """A block does not fit, even after cached segments were released."""


class Block:
    """A part of a segment: in use, or free; addresses of a growing segment may have no pages."""

    __slots__ = ("after", "before", "is_free", "is_mapped", "offset", "segment", "size", "small")

    def __init__(self, segment: int, offset: int, size: int, *, small: bool) -> None:
        self.segment, self.offset, self.size, self.small = segment, offset, size, small
        self.before: Block | None = None
        self.after: Block | None = None
        self.is_free, self.is_mapped = False, True

    @property
    def key(self) -> tuple[int, int, int]:
        """Its place among the free blocks: by size; without pages, by address."""
        if self.is_mapped:
            return self.size, self.segment, self.offset
        return self.offset, self.segment, -1

    def split(self, size: int) -> "Block":
        """Leaves `size` bytes; returns the rest."""
        rest = Block(self.segment, self.offset + size, self.size - size, small=self.small)
        rest.before, rest.after = self, self.after
        if self.after:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest


@dataclass
class Usage:
    """Bytes now and at most."""

    allocated: int = 0
    reserved: int = 0
    most_allocated: int = 0
    most_reserved: int = 0
    retries: int = 0
    """How often cached segments had to be released for another one."""


class CachingAllocator:
    """Allocates and frees as torch's does; `room` bytes can be reserved at most."""

    least_rest = SMALL + ROUNDED
    """The smallest rest of a large block that becomes a block of its own."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.usage = Usage()
        self._free = {(small, mapped): list[tuple[int, int, int]]()
                      for small in (True, False) for mapped in (True, False)}  # fmt: skip
        self._blocks: dict[tuple[int, int, int], Block] = {}
        self._segments = 0

    def allocate(self, size: int) -> Block:
        """A block of at least `size` bytes. Raises NoRoomError."""
        size = max(ROUNDED, -(-size // ROUNDED) * ROUNDED)
        block = self._take(size)
        if block is None:
            try:
                block = self._grow(size)
            except NoRoomError:
                self.usage.retries += 1
                self._release()
                block = self._grow(size)
        if block.size - size >= (ROUNDED if size <= SMALL else self.least_rest):
            self._put(block.split(size))
        usage = self.usage
        usage.allocated += block.size
        usage.most_allocated = max(usage.most_allocated, usage.allocated)
        return block

    def free(self, block: Block) -> None:
        """Takes a block back."""
        self.usage.allocated -= block.size
        self._merge(block)

    def _merge(self, block: Block) -> Block:
        """Makes a block free, with its free neighbours one."""
        for other in (block.before, block.after):
            if other is None or not other.is_free or other.is_mapped != block.is_mapped:
                continue
            self._remove(other)
            first, second = (other, block) if other is block.before else (block, other)
            first.size += second.size
            first.after = second.after
            if second.after:
                second.after.before = first
            block = first
        self._put(block)
        return block

    def _take(self, size: int) -> Block | None:
        """The smallest free block that is large enough."""
        free = self._free[size <= SMALL, True]
        place = bisect.bisect_left(free, (size, 0, 0))
        if place == len(free):
            return None
        while place + 1 < len(free) and self._extent(free[place + 1]) < self._extent(free[place]):
            place += 1
        block = self._blocks[free[place]]
        self._remove(block)
        return block

    def _extent(self, key: tuple[int, int, int]) -> int:
        """The size of a free block, with the addresses behind it that it can grow into."""
        block = self._blocks[key]
        after = block.after
        return block.size + (after.size if after and not after.is_mapped else 0)

    def _grow(self, size: int) -> Block:
        """A block of at least `size` bytes from the driver's memory. Raises NoRoomError."""
        if size <= SMALL:
            segment = SMALL_SEGMENT
        elif size < LEAST_OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // SEGMENT_ROUNDED) * SEGMENT_ROUNDED
        self._reserve(segment)
        self._segments += 1
        return Block(self._segments, 0, segment, small=size <= SMALL)

    def _reserve(self, size: int) -> None:
        usage = self.usage
        if self.room is not None and usage.reserved + size > self.room:
            raise NoRoomError
        usage.reserved += size
        usage.most_reserved = max(usage.most_reserved, usage.reserved)

    def _release(self) -> None:
        """Gives segments without a used block back to the driver."""
        for block in [*self._blocks.values()]:
            if block.before is None and block.after is None:
                self._remove(block)
                self.usage.reserved -= block.size

    def _put(self, block: Block) -> None:
        block.is_free = True
        self._blocks[block.key] = block
        bisect.insort(self._free[block.small, block.is_mapped], block.key)

    def _remove(self, block: Block) -> None:
        block.is_free = False
        free = self._free[block.small, block.is_mapped]
        del free[bisect.bisect_left(free, block.key)]
        del self._blocks[block.key]


class ExpandableAllocator(CachingAllocator):
    """With `expandable_segments`: one segment of addresses for small blocks and one for large ones.

    Pages of 2 and 20 MiB are mapped where a block needs them, at the lowest address with room: in a
    gap that a release left, else at the end. A release unmaps the whole pages of free blocks.
    """

    least_rest = ROUNDED

    def __init__(self, room: int | None = None) -> None:
        super().__init__(room)
        for small in (True, False):
            addresses = Block(small, 0, sys.maxsize, small=small)
            addresses.is_mapped = False
            self._put(addresses)

    def _grow(self, size: int) -> Block:
        gaps = [self._blocks[key] for key in self._free[size <= SMALL, False]]
        starts = (gap.before if gap.before and gap.before.is_free else gap for gap in gaps)
        block = next(start for start in starts if _free_from(start) >= size)
        while not block.is_mapped or block.size < size:
            gap, present = (block.after, block.size) if block.is_mapped else (block, 0)
            assert gap is not None
            block = self._map(gap, min(gap.size, size - present))
        self._remove(block)
        return block

    def _map(self, gap: Block, size: int) -> Block:
        """Gives the start of a gap pages for `size` bytes, and joins it with its neighbours."""
        page = SMALL_SEGMENT if gap.small else LARGE_SEGMENT
        mapped = -(-size // page) * page
        self._reserve(mapped)
        self._remove(gap)
        if mapped < gap.size:
            rest = gap.split(mapped)
            rest.is_mapped = False
            self._put(rest)
        gap.is_mapped = True
        return self._merge(gap)

    def _release(self) -> None:
        for block in [block for block in self._blocks.values() if block.is_mapped]:
            page = SMALL_SEGMENT if block.small else LARGE_SEGMENT
            end = block.offset + block.size
            first, last = -(-block.offset // page) * page, end // page * page
            if first >= last:
                continue
            self._remove(block)
            if last < end:
                self._put(block.split(last - block.offset))
            pages = block
            if block.offset < first:
                pages = block.split(first - block.offset)
                self._put(block)
            pages.is_mapped = False
            self.usage.reserved -= pages.size
            self._merge(pages)


def _free_from(block: Block | None) -> int:
    """Bytes of free blocks, mapped or not, from this one on."""
    size = 0
    while block and block.is_free:
        size, block = size + block.size, block.after
    return size


def replay(
    sizes: Sequence[int],
    events: Iterable[int],
    room: int | None = None,
    *,
    expandable: bool = False,
) -> tuple[Usage, bool]:
    """Usage of births (`index` of `sizes`) and deaths (`~index`); whether all fitted.

    expandable: with `expandable_segments`.
    """
    allocator = (ExpandableAllocator if expandable else CachingAllocator)(room)
    blocks = dict[int, Block]()
    try:
        for event in events:
            if event >= 0:
                blocks[event] = allocator.allocate(sizes[event])
            elif (block := blocks.pop(~event, None)) is not None:
                allocator.free(block)
    except NoRoomError:
        return allocator.usage, False
    return allocator.usage, True
