"""The memory that ranks share, seen from a kernel: addresses of slots and lists, and the push."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from .primitives import element, store_pair, store_words
from .row_words import row_words
from .shape import IN_FLIGHT, RowShape

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
    def push(
        self, words: cute.Tensor, n: cutlass.Constexpr[int], place: Uint32, epoch: Uint32, to_self: bool = False
    ) -> None:
        """Stores the row ``words`` of ``n`` candidates at ``place`` of every other rank, and of this one if asked to.

        Neighbouring threads store neighbouring pairs of one rank. A thread loads a batch before it stores the
        first of it: no load may pass a store that the compiler must take to hit the same memory.
        """
        tid, _, _ = cute.arch.thread_idx()
        threads = self.shape.threads
        pairs = const_expr(row_words(n, self.shape.fp32) // 2)
        batch = const_expr(min(IN_FLIGHT, -(-pairs // threads)))
        loaded = cute.make_rmem_tensor(2 * batch, Uint32)
        for first in cutlass.range(tid, pairs, batch * threads, unroll=1):
            for i in cutlass.range_constexpr(batch):
                # Past the end the last pair is loaded again, and not stored.
                pair = cutlass.min(first + i * threads, Int32(pairs - 1))
                loaded[2 * i] = Uint32(words[2 * pair])
                loaded[2 * i + 1] = Uint32(words[2 * pair + 1])
            self.store(first, threads, pairs, loaded, place, epoch, to_self)

    @cute.jit
    def store(
        self,
        first: Int32,
        step: cutlass.Constexpr[int],
        pairs: cutlass.Constexpr[int],
        loaded: cute.Tensor,
        place: Uint32,
        epoch: Uint32,
        to_self: cutlass.Constexpr[bool],
    ) -> None:
        """Stores the words ``loaded`` as the pairs ``first``, ``first + step``, ... of a row of ``pairs`` pairs.

        Ranks begin with different targets, so that they do not all load the same link.
        """
        targets = const_expr(self.shape.world_size if to_self else self.shape.world_size - 1)
        if const_expr(targets <= 8):
            for turn in cutlass.range_constexpr(targets):
                self._store_to(Int32(turn), first, step, pairs, loaded, place, epoch)
        else:  # there are not the registers for the addresses of all targets
            for turn in cutlass.range(targets, unroll=1):
                self._store_to(turn, first, step, pairs, loaded, place, epoch)

    @cute.jit
    def _store_to(
        self,
        turn: Int32,
        first: Int32,
        step: cutlass.Constexpr[int],
        pairs: cutlass.Constexpr[int],
        loaded: cute.Tensor,
        place: Uint32,
        epoch: Uint32,
    ) -> None:
        world_size = self.shape.world_size
        target = self.rank + 1 + turn
        memory = self.bases[target - world_size if target >= world_size else target]
        for i in cutlass.range_constexpr(cute.size(loaded) // 2):
            pair = first + i * step
            if pair < pairs:
                address = element(memory, place + Uint32(2 * pair), HALF_BYTES)
                store_pair(address, loaded[2 * i], loaded[2 * i + 1], epoch)

    def own_words(self, epoch: Uint32, row: Int32) -> Int64:
        """Where this rank keeps the words that it pushed, without tags: nobody stores to its own slot."""
        return element(self.bases[self.rank], self.slot(epoch, self.rank, row), HALF_BYTES)

    @cute.jit
    def keep(self, words: cute.Tensor, n: cutlass.Constexpr[int], place: Int64) -> None:
        """Copies the row ``words`` of ``n`` candidates to ``place``; a barrier must follow before it is read."""
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range(tid, row_words(n, self.shape.fp32) // 2, self.shape.threads, unroll=1):
            store_words(place + Int64(i) * 8, words[2 * i], words[2 * i + 1])
