"""A TPU that is not there, for torch_tpu to record programs on: nothing is executed.

torch_tpu asks the runtime (libtpu) for a device before it records anything, through PJRT's C
interface: a table of functions, each of which takes one struct of words. Within `shown` the table
answers for one device without memory; what describes the device comes from libtpu, which knows its
topologies without a TPU. Places and structs are those of PJRT's public header, `pjrt_c_api.h`, at
interface 0.72: only what was added later has other ones.
"""

import ctypes
import functools
import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

EXTENSIONS, VERSION, MINOR = 1, 4, 72
"""Places of the table's words, and the minor version that is answered for."""
TPU_TOPOLOGY = 16
"""Type of the extension that counts a topology's chips and cores: torch_tpu asks before it records
a kernel of Pallas."""
CREATE_TOPOLOGY, DESCRIBE_DEVICES = 87, 91
INITIALIZE, WHEN_READY, CREATE_CLIENT = 8, 14, 15
SEND, DESTROY, ELEMENT_TYPE, DIMENSIONS, READ = 27, 63, 64, 65, 75
SIZES = (0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 2, 8, 16)
"""Bytes of an element, by its type's number."""
Words = Any
"""A struct as an array of 64-bit words: its size, its extensions, an object, then the answer."""
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64))
WHEN_READY_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class AbsentTpu:
    """Answers in the place of libtpu's functions for clients, devices, buffers and events."""

    def __init__(self, topology: str) -> None:
        library = ctypes.CDLL(importlib.import_module("libtpu").get_library_path(), os.RTLD_NOW)
        library.GetPjrtApi.restype = ctypes.c_void_p
        self._table = ctypes.cast(library.GetPjrtApi(), ctypes.POINTER(ctypes.c_uint64))
        self._kept: list[Any] = [library]
        """What the runtime has pointers to."""
        self._call(INITIALIZE)
        name = self._text(topology)
        described = self._call(CREATE_TOPOLOGY, *name, 0, 0, 0)[6]
        first = self._call(DESCRIBE_DEVICES, described, 0, 0)[3]
        device_description = ctypes.cast(first, ctypes.POINTER(ctypes.c_uint64))[0]
        client, self._event = self._words(0), self._words(0)
        self._buffers: dict[int, tuple[Any, ...]] = {}
        """Type, address and number of the dimensions, values, and what keeps the address."""
        for place, words in self._constants(described, device_description).items():
            self._answer(place, functools.partial(_fill, words=words))
        self._answer(CREATE_CLIENT, functools.partial(_fill, words=[client], at=8))
        self._answer(SEND, self._send)
        self._answer(READ, self._read)
        self._answer(DESTROY, lambda asked: _fill(asked, self._buffers.pop(asked[2])[:0]))
        self._answer(ELEMENT_TYPE, lambda asked: _fill(asked, self._buffers[asked[2]][:1]))
        self._answer(DIMENSIONS, lambda asked: _fill(asked, self._buffers[asked[2]][1:3]))
        self._answer(WHEN_READY, lambda asked: WHEN_READY_FUNCTION(asked[3])(None, asked[4]))
        self._extension = self._copy_of_extension(TPU_TOPOLOGY)

    def _constants(self, topology: int, device_description: int) -> dict[int, tuple[int, ...]]:
        """The answers that never change, by the function's place."""
        device, memory = self._words(0), self._words(0)
        devices, memories = (self._words(device), 1), (self._words(memory), 1)
        return {
            # Events: destroy, is ready, error, await.
            10: (),
            11: (1,),
            12: (),
            13: (),
            # The client: destroy, platform, process, version, devices, memories, topology.
            16: (),
            17: self._text("tpu"),
            18: (0,),
            19: self._text("no device"),
            20: devices,
            21: devices,
            24: memories,
            100: (topology,),
            # The device: description, is addressable, hardware, memories, default memory.
            34: (device_description,),
            35: (1,),
            36: (0,),
            37: memories,
            38: (memory,),
            # Its memory: number, kind, texts, devices, kind's number.
            40: (0,),
            41: self._text("device"),
            42: self._text("HBM"),
            43: self._text("HBM"),
            44: devices,
            102: (0,),
            # Buffers: dynamic dimensions, layout, size, device, memory, is deleted, is on a CPU,
            # ready event. The one that is asked for its layout is the random generator's state.
            67: (0, 0),
            68: (0, 0, 0, 0, self._words(0), 1, 0, 0, 0, 0),
            69: (16,),
            70: (device,),
            71: (memory,),
            73: (0,),
            76: (0,),
            77: (self._event,),
        }

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within the context libtpu has this device, and the older interface."""
        before = self._table[EXTENSIONS], self._table[VERSION]
        self._table[EXTENSIONS] = self._extension
        self._table[VERSION] = before[1] % 2**32 + (MINOR << 32)
        try:
            yield
        finally:
            self._table[EXTENSIONS], self._table[VERSION] = before

    def _send(self, asked: Words) -> None:
        """Keeps what is sent, a constant of the model say: recording reads it."""
        kind, count = asked[4] % 2**32, asked[6]
        shape = (ctypes.c_uint64 * max(1, count))(*_words_at(asked[5])[:count])
        size = math.prod(shape[:count]) * SIZES[kind]
        buffer = ctypes.addressof(shape)
        self._buffers[buffer] = kind, buffer, count, ctypes.string_at(asked[3], size), shape
        _fill(asked, [self._event, buffer], at=13)

    def _read(self, asked: Words) -> None:
        values = self._buffers[asked[2]][3]
        if asked[4]:
            ctypes.memmove(asked[4], values, len(values))
        _fill(asked, [len(values), self._event], at=5)

    def _copy_of_extension(self, kind: int) -> int:
        """The table's extension of this type alone; 0 where it has none."""
        place = self._table[EXTENSIONS]
        while place:
            size, found, following = _words_at(place)[:3]
            if found % 2**32 == kind:
                return self._words(size, found, 0, *_words_at(place)[3 : size // 8])
            place = following
        return 0

    def _call(self, place: int, *words: int) -> Words:
        asked = (ctypes.c_uint64 * (len(words) + 2))(8 * (len(words) + 2), 0, *words)
        if FUNCTION(self._table[place])(asked):
            raise RuntimeError(f"libtpu's function {place} failed")
        return asked

    def _answer(self, place: int, answer: Callable[[Words], None]) -> None:
        function = FUNCTION(answer)
        self._kept.append(function)
        self._table[place] = ctypes.cast(function, ctypes.c_void_p).value or 0

    def _words(self, *words: int) -> int:
        """The address of words that live on."""
        kept = (ctypes.c_uint64 * max(1, len(words)))(*words)
        self._kept.append(kept)
        return ctypes.addressof(kept)

    def _text(self, text: str) -> tuple[int, int]:
        kept = ctypes.create_string_buffer(text.encode())
        self._kept.append(kept)
        return ctypes.addressof(kept), len(text)


def _fill(asked: Words, words: Sequence[int], at: int = 3) -> None:
    for place, word in enumerate(words, at):
        asked[place] = word


def _words_at(address: int) -> Any:
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64))
