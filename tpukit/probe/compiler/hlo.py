"""What a compiled program needs: parsed from its HLO, or from the compiler's error message."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tpukit.hardware.launch.memory_watch import half_of_free_memory
from tpukit.io.units import parse_bytes

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$")
ARRAY = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\](?:\{([0-9,]*)(?::([^}]*))?\})?")
METADATA = re.compile(
    r'metadata=\{(?:[^}]*?op_name="([^"]*)")?(?:[^}]*?source_file="([^"]*)" source_line=(\d+))?'
)
CHANNEL = re.compile(r"channel_id=(\d+)")
OPERAND = re.compile(r"%([\w.\-]+)")

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
VIEWS = frozenset({"bitcast", "get-tuple-element", "tuple", "optimization-barrier", "while",
                   "copy-done", "all-gather-done", "all-reduce-done", "async-done",
                   "async-update", "collective-permute-done"})  # fmt: skip
"""Instructions whose result is (part of) an operand's buffer."""
NO_BUFFER = frozenset({"parameter", "constant", "iota", "partition-id", "replica-id"})
TYPE_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16,
             "f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64,
             "token": 0}  # fmt: skip


@dataclass(frozen=True)
class Allocation:
    """One buffer of a program."""

    size_bytes: int
    shape: str
    operator: str
    place: str | None
    """The line it comes from (`path:line`), where that is known."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def size_bytes(self) -> int:
        """Bytes of its result in HBM, padding included."""
        return shape_bytes(self.shape)

    @property
    def operands(self) -> list[str]:
        """Names of its operands (and of computations it calls)."""
        return OPERAND.findall(self.rest.partition(", metadata=")[0])

    def allocation(self) -> Allocation:
        """The buffer of its result."""
        match = METADATA.search(self.rest)
        operator, path, line = match.groups() if match else (None, None, None)
        place = f"{path}:{line}" if path and line else None
        shape = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", self.shape)
        return Allocation(self.size_bytes, shape, operator or self.opcode, place)


def parse(lines: Iterable[str]) -> Iterator[Instruction]:
    """The instructions in the text of a computation."""
    for line in lines:
        if match := INSTRUCTION.match(line):
            yield Instruction(*match.groups())


def collectives(program: str) -> tuple[dict[str, int], int]:
    """Number of each collective in a program, and the bytes that those of one step deliver to one
    device.

    The compiler may cut one into pieces that overlap with computation: they share its channel.
    """
    found: dict[tuple[str, str], int] = {}
    for instruction in parse(program.splitlines()):
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            channel = CHANNEL.search(instruction.rest)
            key = opcode, channel[1] if channel else instruction.name
            found[key] = max(found.get(key, 0), shape_bytes(instruction.shape, on_chip=True))
    return dict(sorted(Counter(opcode for opcode, _ in found).items())), sum(found.values())


def kernel_flops(program: str) -> float:
    """Operations of the fused attention kernels in a program, every tile of scores included.

    A matrix product takes 2 batch heads queries keys width: the forward kernel (3 inputs, 4 with a
    bias) has 2 products, the backward kernel (6 or 7) 5. Other kernels cannot be counted.
    """
    shapes: dict[str, str] = {}
    total = 0.0
    for instruction in parse(program.splitlines()):
        shapes[instruction.name] = instruction.shape
        if 'custom_call_target="tpu_custom_call"' in instruction.rest:
            total += _attention_flops(instruction, shapes)
    return total


def _attention_flops(call: Instruction, shapes: dict[str, str]) -> float:
    names = [name for name in call.operands if name in shapes]
    products = {3: 2, 4: 2, 6: 5, 7: 5}.get(len(names))
    if products is None:
        return 0.0
    query, key = (_dims(shapes[name]) for name in names[:2])
    if len(query) < 4 or len(key) < 4:
        return 0.0
    return 2.0 * products * math.prod(query) * key[-1]


def _dims(shape: str) -> list[int]:
    match = ARRAY.search(shape)
    return [int(n) for n in match[2].split(",") if n] if match else []


def largest_buffers(program: str, count: int = 8) -> list[Allocation]:
    """The largest temporaries alive at the peak of memory usage.

    Computed from the schedule: each buffer lives from its instruction to its last reader. The
    compiler's own assignment also shares and splits buffers, so this shows where the memory goes,
    not how much there is.
    """
    body = list(parse(_entry(program)))
    buffers, last_use = _lifetimes(body)
    live: dict[str, int] = {}
    used = most = 0
    at_peak: list[str] = []
    ends: dict[int, list[str]] = {}
    for name, index in last_use.items():
        ends.setdefault(index, []).append(name)
    for index, instruction in enumerate(body):
        if instruction.name in buffers:
            live[instruction.name] = instruction.size_bytes
            used += instruction.size_bytes
        if used > most:
            most, at_peak = used, list(live)
        for name in ends.get(index, []):
            used -= live.pop(name, 0)
    by_name = {instruction.name: instruction for instruction in body}
    found = [by_name[name].allocation() for name in at_peak]
    return sorted(found, key=lambda a: a.size_bytes, reverse=True)[:count]


def _lifetimes(body: list[Instruction]) -> tuple[set[str], dict[str, int]]:
    """Names that have a buffer of their own, and the index of each one's last reader."""
    owners: dict[str, tuple[str, ...]] = {}
    last_use: dict[str, int] = {}
    buffers: set[str] = set()
    for index, instruction in enumerate(body):
        read = [owner for name in instruction.operands for owner in owners.get(name, ())]
        for owner in read:
            last_use[owner] = index
        if instruction.opcode in VIEWS:
            owners[instruction.name] = tuple(dict.fromkeys(read))
        elif instruction.opcode in NO_BUFFER:
            owners[instruction.name] = ()
        else:
            owners[instruction.name] = (instruction.name,)
            buffers.add(instruction.name)
            last_use[instruction.name] = index
    return buffers, last_use


def _entry(program: str) -> list[str]:
    """The lines of the entry computation."""
    lines = program.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("ENTRY")), len(lines))
    end = next((i for i in range(start, len(lines)) if lines[i] == "}"), len(lines))
    return lines[start + 1 : end]


def shape_bytes(shape: str, on_chip: bool = False) -> int:
    """Bytes in HBM of an array or tuple shape in HLO text, padded to whole tiles.

    A buffer in another memory space (`S(1)`: on-chip) takes none, unless these are counted too.
    """
    total = 0
    for dtype, dims, order, tiling in ARRAY.findall(shape):
        if dtype not in TYPE_BITS or ("S(" in tiling and not on_chip):
            continue
        sizes = [int(n) for n in dims.split(",") if n]
        minor = [int(n) for n in order.split(",") if n]
        total += math.ceil(_padded_elements(sizes, minor, tiling) * TYPE_BITS[dtype] / 8)
    return total


def _padded_elements(sizes: list[int], minor_to_major: list[int], tiling: str) -> int:
    tile = re.match(r"T\(([0-9,]+)\)", tiling)
    if tile and minor_to_major:
        extents = [int(n) for n in tile[1].split(",")][::-1]
        for axis, extent in zip(minor_to_major, extents, strict=False):
            sizes[axis] = math.ceil(sizes[axis] / extent) * extent
    return math.prod(sizes)


# -- out-of-memory messages ----------------------------------------------------------------------

USED_OF = re.compile(r"Used ([0-9.]+[KMGT]?) of ([0-9.]+[KMGT]?) hbm")
ONE_BUFFER = re.compile(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)")
ONE_SHAPE = re.compile(r"shape = '(\w+\[([0-9,]+)\])")
MADE = re.compile(r"tensor<([0-9]+(?:x[0-9]+)*)x\w+>")
EXCEEDS = re.compile(r"\(([0-9.]+[KMGT]?)\) exceeds available HBM \(([0-9.]+[KMGT]?)\)")
LISTED_ALLOCATION = re.compile(
    r"Size: (?P<size>[0-9.]+[KMGT]?)\s*\n"
    r"(?:\s*Operator: (?:op_name=\"(?P<operator>[^\"]*)\")?"
    r"(?:\s*source_file=\"(?P<path>[^\"]*)\" source_line=(?P<line>\d+))?[^\n]*\n)?"
    r"\s*Shape: (?P<shape>[^\n]*)"
)


def requested_and_limit(text: str) -> tuple[int | None, int | None]:
    """Bytes requested and available, from an out-of-memory message of a TPU or its compiler."""
    for pattern in (USED_OF, EXCEEDS):
        if match := pattern.search(text):
            return parse_hbm_size(match[1]), parse_hbm_size(match[2])
    if match := ONE_BUFFER.search(text):
        # One buffer alone; everything together is more.
        return int(match[1]), int(match[2])
    return None, None


def listed_allocations(text: str) -> list[Allocation]:
    """The largest allocations that an out-of-memory message lists."""
    found = []
    for match in LISTED_ALLOCATION.finditer(text):
        place = f"{match['path']}:{match['line']}" if match["path"] else None
        shape = re.sub(r"\{[^}]*\}", "", match["shape"]).strip()
        operator = match["operator"] or "?"
        found.append(Allocation(parse_hbm_size(match["size"]), shape, operator, place))
    return found


def refused_buffer(text: str, operations: Iterable[tuple[str, str | None]]) -> list[Allocation]:
    """The one buffer that is larger than the memory, which the compiler names by its shape alone.

    operations: as `located_operations` has them; the first that makes as large an array counts.
    """
    size, shape = ONE_BUFFER.search(text), ONE_SHAPE.search(text)
    if size is None or shape is None:
        return []
    elements = math.prod(map(int, shape[2].split(",")))
    for operation, place in operations:
        made = MADE.findall(operation)
        if place and made and math.prod(map(int, made[-1].split("x"))) == elements:
            operator, _, where = place.partition(", at ")
            return [Allocation(int(size[1]), shape[1], operator, where)]
    return []


def parse_hbm_size(text: str) -> int:
    """Bytes in libtpu's `16.42G`, `692.56M`, `180.59M`, `0B`."""
    return parse_bytes(re.sub(r"([KMGT])i?B?$", r"\1iB", text.strip()))


# -- all of it -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ProgramCosts:
    """What one program needs on one device, as JSON can hold it. Sizes in bytes."""

    total: int = 0
    """All memory needed at once: arguments, outputs (aliased ones once), temporaries, code."""
    temporaries: int = 0
    code: int = 0
    flops: float = 0.0
    """Operations of one run on one device, those of fused attention added by formula."""
    kernel_flops: float = 0.0
    """The part of `flops` in fused attention."""
    bytes_accessed: float = 0.0
    collectives: Mapping[str, int] = field(default_factory=dict)
    collective_bytes: int = 0
    largest: Sequence[Mapping[str, Any]] = ()
    """The largest allocations; see `Allocation`."""
    unread: bool = False
    """Whether the program's text took too much of this machine's memory: the operations, the
    collectives and the allocations are unknown."""
    refusal: str | None = None
    """The compiler's message where the program does not fit."""


def scheduled_hlo(executable: Any) -> str:
    """The text of a compiled program.

    Raises:
        MemoryError: it takes more than half of this machine's free memory (libtpu 0.0.21.1 takes
            over 20 GiB for the program of EIT's published size).
    """
    with half_of_free_memory():
        return "\n".join(module.to_string() for module in executable.hlo_modules())


def costs_of(executable: Any, kernel_share: float = 1.0) -> ProgramCosts:
    """Memory, operations and collectives of a compiled program.

    kernel_share: see `Program`.
    """
    memory = executable.get_compiled_memory_stats()
    costs = executable.cost_analysis()
    costs = costs[0] if isinstance(costs, Sequence) else costs
    found = ProgramCosts(
        total=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        flops=float(costs.get("flops", 0.0)),
        bytes_accessed=float(costs.get("bytes accessed", 0.0)),
    )
    try:
        text = scheduled_hlo(executable)
    except MemoryError:
        return replace(found, unread=True)
    in_kernels = kernel_flops(text) * kernel_share
    counts, size = collectives(text)
    return replace(
        found,
        flops=found.flops + in_kernels,
        kernel_flops=in_kernels,
        collectives=counts,
        collective_bytes=size,
        largest=[asdict(allocation) for allocation in largest_buffers(text)],
    )
