"""The memory that ranks share, seen from a kernel: addresses of slots and lists, and the push."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from .primitives import element, store_pair
from .row_words import row_words
from .shape import PUSHED, RowShape

HALF_BYTES = 8


@dataclass(frozen=True)
class Peers:
    """The symmetric buffers of all ranks: slots ``[2, W, capacity, halves]``, then lists ``[slots, capacity, halves]``.

    A half is 8 bytes of an LL pair, a word and its epoch; 32 bits count those of the largest buffer.

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

    def slot(self, epoch: Uint32, source: Int32, row: Int32) -> Uint32:
        """Where the slot of ``source``'s words of ``row`` in the call of ``epoch`` begins, in halves."""
        which = (epoch & 1) * self.shape.world_size + Uint32(source)
        return (which * Uint32(self.capacity) + Uint32(row)) * self._slot_halves

    @property
    def slot_stride(self) -> Uint32:
        """Halves from one source's slot to the next source's."""
        return Uint32(self.capacity) * self._slot_halves

    def list(self, place: Int32, row: Int32) -> Uint32:
        """Where the rescue list ``place`` of ``row`` begins, in halves."""
        slots = Uint32(self.capacity) * (2 * self.shape.world_size * self._slot_halves)
        return slots + (Uint32(place) * Uint32(self.capacity) + Uint32(row)) * self._list_halves

    @property
    def list_stride(self) -> Uint32:
        return Uint32(self.capacity) * self._list_halves

    @property
    def _slot_halves(self) -> int:
        return row_words(self.shape.local_topk, self.shape.fp32)

    @property
    def _list_halves(self) -> int:
        return row_words(self.shape.topk, self.shape.fp32)

    @cute.jit
    def push(self, words: cute.Tensor, n: cutlass.Constexpr[int], place: Uint32, epoch: Uint32) -> None:
        """Stores the row ``words`` of ``n`` candidates at ``place`` of every rank, this one included.

        Neighbouring threads store neighbouring pairs of one rank. Ranks begin with different targets, so
        that they do not all load the same link. A thread loads a batch before it stores the first of it: no
        load may pass a store that the compiler must take to hit the same memory.
        """
        tid, _, _ = cute.arch.thread_idx()
        world_size, threads, bases = self.shape.world_size, self.shape.threads, self.bases
        pairs = const_expr(row_words(n, self.shape.fp32) // 2)
        batch = const_expr(min(PUSHED // threads, -(-world_size * pairs // threads)))
        loaded = cute.make_rmem_tensor(2 * batch, Uint32)
        targets = cute.make_rmem_tensor(batch, Int64)
        for first in cutlass.range(tid, world_size * pairs, batch * threads, unroll=1):
            for i in cutlass.range_constexpr(batch):
                # Past the end the last pair is loaded again, and not stored.
                index = cutlass.min(first + i * threads, Int32(world_size * pairs - 1))
                turn = index // pairs
                pair = index - turn * pairs
                loaded[2 * i] = Uint32(words[2 * pair])
                loaded[2 * i + 1] = Uint32(words[2 * pair + 1])
                target = (self.rank + 1 + turn) % world_size
                targets[i] = element(bases[target], place + Uint32(2 * pair), HALF_BYTES)
            for i in cutlass.range_constexpr(batch):
                if first + i * threads < world_size * pairs:
                    store_pair(targets[i], loaded[2 * i], loaded[2 * i + 1], epoch)
