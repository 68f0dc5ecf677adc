"""CUDA's caching allocator as a simulation: rounding, segments, splitting, merging.

By torch's `CUDACachingAllocator.cpp` and its notes on memory management: default settings, or
`expandable_segments`; no `roundup_power2_divisions`, one stream.
"""

import bisect
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
    """A part of a segment."""

    __slots__ = ("after", "before", "is_free", "offset", "segment", "size", "small")

    def __init__(self, segment: int, offset: int, size: int, *, small: bool) -> None:
        self.segment, self.offset, self.size, self.small = segment, offset, size, small
        self.before: Block | None = None
        self.after: Block | None = None
        self.is_free = False

    @property
    def key(self) -> tuple[int, int, int]:
        return self.size, self.segment, self.offset


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

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.usage = Usage()
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        self._blocks: dict[tuple[int, int, int], Block] = {}
        self._segments = 0

    def allocate(self, size: int) -> Block:
        """A block of at least `size` bytes. Raises NoRoomError."""
        size = max(ROUNDED, -(-size // ROUNDED) * ROUNDED)
        block = self._take(size) or self._grow(size)
        small, rest = size <= SMALL, block.size - size
        if rest >= self._least_rest(small=small):
            other = Block(block.segment, block.offset + size, rest, small=small)
            other.before, other.after = block, block.after
            if block.after:
                block.after.before = other
            block.after, block.size = other, size
            self._put(other)
        self._place_last(block.after or block)
        usage = self.usage
        usage.allocated += block.size
        usage.most_allocated = max(usage.most_allocated, usage.allocated)
        return block

    def free(self, block: Block) -> None:
        """Takes a block back, and merges it with free neighbours."""
        self.usage.allocated -= block.size
        for other in (block.before, block.after):
            if other is None or not other.is_free:
                continue
            self._remove(other)
            first, second = (other, block) if other is block.before else (block, other)
            first.size += second.size
            first.after = second.after
            if second.after:
                second.after.before = first
            block = first
        self._place_last(block)
        self._put(block)

    def _least_rest(self, *, small: bool) -> int:
        """The smallest rest of a block that becomes a block of its own."""
        return ROUNDED if small else SMALL + ROUNDED

    def _place_last(self, block: Block) -> None:
        """Called with a block that may be the last one of its segment."""

    def _take(self, size: int) -> Block | None:
        """The smallest free block that is large enough."""
        small = size <= SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, (size, 0, 0))
        if place == len(free):
            return None
        block = self._blocks[free[place]]
        self._remove(block)
        return block

    def _grow(self, size: int) -> Block:
        if size <= SMALL:
            segment = SMALL_SEGMENT
        elif size < LEAST_OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // SEGMENT_ROUNDED) * SEGMENT_ROUNDED
        if self._lacks_room(segment):
            self._release()
        self._reserve(segment)
        self._segments += 1
        return Block(self._segments, 0, segment, small=size <= SMALL)

    def _lacks_room(self, size: int) -> bool:
        return self.room is not None and self.usage.reserved + size > self.room

    def _reserve(self, size: int) -> None:
        if self._lacks_room(size):
            raise NoRoomError
        usage = self.usage
        usage.reserved += size
        usage.most_reserved = max(usage.most_reserved, usage.reserved)

    def _release(self) -> None:
        """Gives segments without a used block back to the driver."""
        self.usage.retries += 1
        for free in self._free.values():
            for block in [self._blocks[key] for key in free]:
                if block.before is None and block.after is None:
                    self._remove(block)
                    self.usage.reserved -= block.size

    def _put(self, block: Block) -> None:
        block.is_free = True
        self._blocks[block.key] = block
        bisect.insort(self._free[block.small], block.key)

    def _remove(self, block: Block) -> None:
        block.is_free = False
        free = self._free[block.small]
        del free[bisect.bisect_left(free, block.key)]
        del self._blocks[block.key]


class ExpandableAllocator(CachingAllocator):
    """With `expandable_segments`: one segment for small and one for large blocks, which grow by
    pages at their end. Pages that were released inside of a segment are not mapped again."""

    def __init__(self, room: int | None = None) -> None:
        super().__init__(room)
        self._last: dict[bool, Block | None] = {True: None, False: None}
        self._end = {True: 0, False: 0}
        """End of a segment's pages, in bytes."""

    def _least_rest(self, *, small: bool) -> int:
        return ROUNDED

    def _place_last(self, block: Block) -> None:
        if block.offset + block.size == self._end[block.small]:
            self._last[block.small] = block

    def _take(self, size: int) -> Block | None:
        """As without; the block at the end, which can grow, only where there is no other."""
        block, last = super()._take(size), self._last[size <= SMALL]
        if block is None or block is not last:
            return block
        other = super()._take(size)
        if other is None:
            return block
        self._put(block)
        return other

    def _grow(self, size: int) -> Block:
        small = size <= SMALL
        if self._lacks_room(self._missing(size)):
            self._release()
        missing, last = self._missing(size), self._last[small]
        self._reserve(missing)
        start, self._end[small] = self._end[small], self._end[small] + missing
        if last is None or not last.is_free:
            block = Block(small, start, missing, small=small)
            if last is not None:
                block.before, last.after = last, block
            return block
        self._remove(last)
        last.size += missing
        return last

    def _missing(self, size: int) -> int:
        """Bytes of the pages to add for a block, of which a free block at the end is a part."""
        small, last = size <= SMALL, self._last[size <= SMALL]
        page = SMALL_SEGMENT if small else LARGE_SEGMENT
        present = last.size if last is not None and last.is_free else 0
        return -(-(size - present) // page) * page

    def _release(self) -> None:
        """Gives whole pages of free blocks back to the driver."""
        self.usage.retries += 1
        for small, free in self._free.items():
            page = SMALL_SEGMENT if small else LARGE_SEGMENT
            for block in [self._blocks[key] for key in free]:
                end = block.offset + block.size
                first, last = -(-block.offset // page) * page, end // page * page
                if first < last:
                    self._remove(block)
                    self.usage.reserved -= last - first
                    self._cut(block, first, last)

    def _cut(self, block: Block, first: int, last: int) -> None:
        """Takes `first` to `last` out of a free block: what is beside them stays free."""
        small, end, before, after = (
            block.small,
            block.offset + block.size,
            block.before,
            block.after,
        )
        pieces = [(block.offset, first, before, None), (last, end, None, after)]
        if end == self._end[small]:
            self._end[small], self._last[small] = first, before
        for start, stop, left, right in pieces:
            piece = None
            if start < stop:
                piece = Block(block.segment, start, stop - start, small=small)
                piece.before, piece.after = left, right
                self._put(piece)
                self._place_last(piece)
            if left:
                left.after = piece
            if right:
                right.before = piece


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
