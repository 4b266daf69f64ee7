"""Reads from a cubin (ELF) what its kernel uses: registers and stack, which is where spilled registers go."""

from __future__ import annotations

import struct
from dataclasses import dataclass

#: Attributes in ``.nv.info``, each followed by a symbol's index and a number.
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F


@dataclass(frozen=True)
class Usage:
    """Of the one kernel: bytes of local memory a thread, and registers a thread."""

    frame_bytes: int
    registers: int


def usage(cubin: bytes) -> Usage:
    assert cubin[:4] == b"\x7fELF", "not a cubin"
    sections_at = struct.unpack_from("<Q", cubin, 40)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections_at + i * entry_size) for i in range(count)]
    names_at = headers[names_index][4]
    found = {}
    for name, _, _, _, offset, size in headers:
        start = names_at + name
        if cubin[start : cubin.index(b"\0", start)] == b".nv.info":
            found = _attributes(cubin[offset : offset + size])
    return Usage(found[_FRAME_SIZE], found[_REGISTERS])


def _attributes(info: bytes) -> dict[int, int]:
    """The largest number of each attribute that has one."""
    numbers: dict[int, int] = {}
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind == 4:  # data follows, ``size`` bytes
            if size == 8:
                numbers[attribute] = max(numbers.get(attribute, 0), struct.unpack_from("<II", info, at)[1])
            at += size
    return numbers
