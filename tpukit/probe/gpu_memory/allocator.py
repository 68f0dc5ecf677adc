"""CUDA's caching allocator as a simulation: rounding, segments, splitting, merging.

By torch's `CUDACachingAllocator.cpp` and its notes on memory management, with default settings (no
`expandable_segments`, no `roundup_power2_divisions`), one stream.
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
        if rest >= ROUNDED if small else rest > SMALL:
            other = Block(block.segment, block.offset + size, rest, small=small)
            other.before, other.after = block, block.after
            if block.after:
                block.after.before = other
            block.after, block.size = other, size
            self._put(other)
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
        self._put(block)

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
        usage = self.usage
        if self.room is not None and usage.reserved + segment > self.room:
            self._release()
            usage.retries += 1
            if usage.reserved + segment > self.room:
                raise NoRoomError
        usage.reserved += segment
        usage.most_reserved = max(usage.most_reserved, usage.reserved)
        self._segments += 1
        return Block(self._segments, 0, segment, small=size <= SMALL)

    def _release(self) -> None:
        """Gives segments without a used block back to the driver."""
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


def replay(
    sizes: Sequence[int], events: Iterable[int], room: int | None = None
) -> tuple[Usage, bool]:
    """Usage of births (`index` of `sizes`) and deaths (`~index`); whether all fitted."""
    allocator, blocks = CachingAllocator(room), dict[int, Block]()
    try:
        for event in events:
            if event >= 0:
                blocks[event] = allocator.allocate(sizes[event])
            elif (block := blocks.pop(~event, None)) is not None:
                allocator.free(block)
    except NoRoomError:
        return allocator.usage, False
    return allocator.usage, True
