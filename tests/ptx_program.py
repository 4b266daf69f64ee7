"""A PTX kernel taken apart, and the memory it may touch: what ``ptx_interpreter`` runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch

Vector = np.ndarray
#: The one piece of inline assembly with a register of its own, ``primitives.high_product``.
_HIGH_PRODUCT = re.compile(
    r"\{ \.reg \.u64 p; mul\.wide\.u32 p, (\S+), (\S+); shr\.u64 p, p, (\S+); cvt\.u32\.u64 (\S+), p; \}"
)


class Memory:
    """The tensors that kernels may touch, at their own addresses."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.numel()}
        self._starts = np.array(sorted(storages), dtype=np.int64)
        self._bytes = [torch.tensor([], dtype=torch.uint8).set_(storages[start]).numpy() for start in self._starts]
        self._ends = self._starts + [len(b) for b in self._bytes]

    def _parts(self, addresses: Vector, size: int) -> Iterator[tuple[Vector, Vector, Vector]]:
        """``(view of a tensor, index into it, which of the addresses)`` for each tensor that is touched."""
        region = np.searchsorted(self._starts, addresses, side="right") - 1
        bad = (region < 0) | (addresses + size > self._ends[region]) | (addresses % size != 0)
        if bad.any():
            raise IndexError(f"{size} bytes at {addresses[bad][0]:#x} are not in a tensor, or not aligned")
        for r in np.unique(region):
            which = region == r
            yield self._bytes[r], (addresses[which] - self._starts[r]), which

    def load(self, addresses: Vector, dtype: type, count: int) -> list[Vector]:
        size = np.dtype(dtype).itemsize
        out = [np.empty(len(addresses), dtype) for _ in range(count)]
        for memory, offset, which in self._parts(addresses, size * count):
            for i in range(count):
                out[i][which] = memory.view(dtype)[offset // size + i]
        return out

    def store(self, addresses: Vector, values: list[Vector]) -> None:
        size = values[0].itemsize
        for memory, offset, which in self._parts(addresses, size * len(values)):
            for i, value in enumerate(values):
                memory.view(value.dtype)[offset // size + i] = value[which]


class Program:
    """The one kernel of a PTX module."""

    def __init__(self, ptx: str) -> None:
        match = re.search(r"\.visible \.entry \w+\((.*?)\)\n(.*?)\{\n(.*)\n\}", ptx, re.S)
        parameters, attributes, body = match.groups()
        self.threads = int(re.search(r"\.reqntid (\d+)", attributes)[1])
        self.parameters: list[tuple[str, int]] = []  # name, bytes
        for declared in re.findall(r"\.param (?:\.align \d+ )?\.(\w+) (\w+)(?:\[(\d+)\])?", parameters):
            kind, name, size = declared
            self.parameters.append((name, int(size) if size else int(kind[1:]) // 8))
        self.code: list[tuple[tuple[bool, str] | None, str, list]] = []
        labels = {}
        for line in body.split("\n"):
            line = line.split("//")[0].strip()
            if line.endswith(":"):
                labels[line[:-1]] = len(self.code)
            elif line and line not in "{}" and not line.startswith("."):
                self.code.append(self._parse(line))
        for _, op, arguments in self.code:
            if op.startswith("bra"):
                arguments[0] = labels[arguments[0]]

    @staticmethod
    def _parse(line: str) -> tuple[tuple[bool, str] | None, str, list]:
        if high := _HIGH_PRODUCT.match(line):
            a, b, shift, result = high.groups()
            return None, "high_product", [result, a, b, shift]
        predicate = None
        line = line.rstrip(";").strip()
        if line.startswith("@"):
            guard, line = line.split(None, 1)
            predicate = (guard[1] == "!", guard.lstrip("@!"))
        op, _, rest = line.partition(" ") if "\t" not in line else line.partition("\t")
        arguments = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+", rest)
        return predicate, op.strip(), arguments
