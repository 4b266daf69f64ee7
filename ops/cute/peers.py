"""The memory that ranks share, seen from a kernel: addresses of slots and lists, and the push."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .primitives import store_pair
from .row_words import row_words
from .shape import RowShape

PAIR_BYTES = 16


@dataclass(frozen=True)
class Peers:
    """The symmetric buffers of all ranks: slots ``[2, W, capacity, pairs]``, then lists ``[slots, capacity, pairs]``.

    Attributes:
        shape: of the merge.
        bases: int64 ``[W]``, every rank's buffer as this rank addresses it.
        rank: this rank.
        capacity: rows reserved.
    """

    shape: RowShape
    bases: cute.Tensor
    rank: Int32
    capacity: Int32

    @property
    def slot_bytes(self) -> int:
        return _pairs(self.shape.local_topk, self.shape) * PAIR_BYTES

    @property
    def list_bytes(self) -> int:
        return _pairs(self.shape.topk, self.shape) * PAIR_BYTES

    def slot(self, epoch: Uint32, source: Int32, row: Int32) -> Int64:
        """Offset of the slot of ``source``'s words of ``row`` in the call of ``epoch``."""
        index = Int64(Int32(epoch & 1) * self.shape.world_size + source) * Int64(self.capacity) + Int64(row)
        return index * self.slot_bytes

    @property
    def slot_stride(self) -> Int64:
        """Bytes from one source's slot to the next source's."""
        return Int64(self.capacity) * self.slot_bytes

    def list(self, place: Int32, row: Int32) -> Int64:
        """Offset of the rescue list ``place`` of ``row``."""
        slots = Int64(self.capacity) * (2 * self.shape.world_size * self.slot_bytes)
        return slots + (Int64(place) * Int64(self.capacity) + Int64(row)) * self.list_bytes

    @property
    def list_stride(self) -> Int64:
        return Int64(self.capacity) * self.list_bytes

    @cute.jit
    def push(self, words: cute.Tensor, n: cutlass.Constexpr[int], offset: Int64, epoch: Uint32) -> None:
        """Stores the row ``words`` of ``n`` candidates at ``offset`` of every rank, this one included.

        Neighbouring threads store neighbouring pairs of one rank. Ranks begin with different targets, so
        that they do not all load the same link.
        """
        tid, _, _ = cute.arch.thread_idx()
        pairs = _pairs(n, self.shape)
        world_size, bases = self.shape.world_size, self.bases
        for i in cutlass.range(tid, world_size * pairs, self.shape.threads):
            turn = i // pairs
            pair = i - turn * pairs
            target = (self.rank + 1 + turn) % world_size
            address = bases[target] + offset + Int64(pair) * PAIR_BYTES
            store_pair(address, Uint32(words[2 * pair]), Uint32(words[2 * pair + 1]), epoch)


def _pairs(n: int, shape: RowShape) -> int:
    return row_words(n, shape.fp32) // 2
