"""Sources that read this rank's own scores, and the words that come of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr

from ..layouts import packed_row_words
from .candidates import candidate
from .primitives import WARP, SmemAllocator, anew, or_shared, shared_words
from .shape import RowShape


def row_words(n: int, fp32: bool) -> int:
    return packed_row_words(n, "fp32" if fp32 else "bf16")


@cute.jit
def score_ord(bits: Uint32, fp32: cutlass.Constexpr[bool], floor: int | Uint32 = 0) -> Uint32:
    """The order-preserving integer of a score's bits: 32 bits for fp32, else the 16 of bf16.

    0 for NaN, and for what is below ``floor``: NaNs are beyond the infinities, so that one comparison tells both.
    """
    if const_expr(not fp32):
        bits = bits << 16
    ord = bits ^ (Uint32(Int32(bits) >> 31) | Uint32(0x80000000))
    least, most = Uint32(0x007FFFFF), Uint32(0xFF800000)
    if const_expr(not fp32):
        ord, least, most = ord >> 16, least >> 16, most >> 16
    least = cutlass.max(Uint32(floor), least)  # a constant that comes first would make it a signed comparison
    if ord - least > most - least:
        ord = Uint32(0)
    return ord


def score_bits(logits: cute.Tensor, fp32: bool) -> cute.Tensor:
    """The logits' bits: Uint32 for float32, Uint16 for bfloat16, same layout."""
    pointer = cute.recast_ptr(logits.iterator, dtype=cutlass.Uint32 if fp32 else cutlass.Uint16)
    return cute.make_tensor(pointer, logits.layout)


@dataclass(frozen=True)
class LogitsSource:
    """Every score of a row up to its end.

    Args:
        bits: ``[L]``, the row's bits.
        end: its valid positions.
        floor: scores below this ord are left out, at least 1.
        threads: of the block.
        most_held: scores of a row that can stay in registers; a row of more is read again in each pass.
        held: whether they do; :meth:`fetch` then fills the registers.
    """

    bits: cute.Tensor
    end: Int32
    floor: Uint32
    fp32: bool
    threads: int
    most_held: int
    held: bool = False

    @classmethod
    def of_row(
        cls, bits: cute.Tensor, row_ends: cute.Tensor, row: Int32, floor: Uint32, shape: RowShape
    ) -> LogitsSource:
        """Row ``row``, cut to the columns there are; ``local_topk_words`` is what refuses a row end."""
        end = cutlass.min(row_ends[row], bits.shape[1])
        return cls(bits[row, None], end, floor, shape.fp32, shape.threads, shape.scores_held)

    @property
    def items(self) -> int:
        if self.held:
            return self.most_held // self.threads
        # Bytes in flight that keep an SM's share of the L2 bandwidth busy: 32 KiB. More registers there are not.
        return 8192 // self.threads if self.fp32 else 16

    @property
    def groups(self) -> int | Int32:
        return 1 if self.held else cute.ceil_div(self.end, self.items * self.threads)

    def load(self, group: Int32, ords: cute.Tensor, positions: cute.Tensor) -> None:
        if not self.held:
            self.read(self._first(group), ords)
        # Else all positions would occupy registers between passes.
        first = anew(self._first(group))
        for i in range(self.items):
            positions[i] = Uint32(first + i * WARP)

    def fetch(self, ords: cute.Tensor, positions: cute.Tensor) -> None:
        """Reads what is held."""
        if self.held:
            self.read(self._first(Int32(0)), ords)

    def _first(self, group: Int32) -> Int32:
        return candidate(self.items, 0, group, self.groups)

    @cute.jit
    def read(self, first: Int32, ords: cute.Tensor) -> None:
        """The ords at ``first``, which is for lane 0 a multiple of 32, and at every 32nd position from there."""
        tid, _, _ = cute.arch.thread_idx()
        # Loads under a predicate each would wait for one another: there are 7 predicates.
        if first - tid % WARP + self.items * WARP <= self.end:
            for i in cutlass.range_constexpr(self.items):
                ords[i] = Uint32(self.bits[first + i * WARP])
        else:
            for i in cutlass.range_constexpr(self.items):
                ords[i] = Uint32(self.bits[cutlass.min(first + i * WARP, self.end - 1)])
        for i in cutlass.range_constexpr(self.items):
            ord = score_ord(ords[i], self.fp32, self.floor)
            ords[i] = ord if first + i * WARP < self.end else Uint32(0)


@dataclass(frozen=True)
class ListSource:
    """A local top-K that the caller has, in his order: vLLM's ``topk_indices``. Gathered once into registers.

    Args:
        bits: ``[L]``, the bits of the row's scores.
        indices: int32 ``[K]``, local positions, -1 for none.
        start: column of position 0; columns are clamped to the last, as vLLM does.
    """

    bits: cute.Tensor
    indices: cute.Tensor
    start: Int32
    topk: int
    fp32: bool
    threads: int

    @property
    def items(self) -> int:
        return -(-self.topk // self.threads)

    @property
    def groups(self) -> int:
        return 1

    def load(self, group: Int32, ords: cute.Tensor, positions: cute.Tensor) -> None:
        pass  # in registers since gather()

    def place(self, i: int) -> Int32:
        """Which of the K candidate ``i`` of this thread is."""
        return candidate(self.items, i)

    def gather(self, ords: cute.Tensor, positions: cute.Tensor) -> None:
        self.gather_from(self.place(0), ords, positions)

    @cute.jit
    def gather_from(self, first: Int32, ords: cute.Tensor, positions: cute.Tensor) -> None:
        """As many as there are registers: candidate ``first`` of the K, and every 32nd from there."""
        last = cute.size(self.bits) - 1
        for i in cutlass.range_constexpr(cute.size(ords)):
            k = first + i * WARP
            ords[i] = Uint32(0)
            positions[i] = Uint32(0)
            if k < self.topk:
                index = self.indices[k]
                if (index >= 0) & (last >= 0):
                    column = cutlass.min(index + self.start, last)
                    ord = score_ord(Uint32(self.bits[column]), self.fp32)
                    if ord != 0:
                        ords[i] = ord
                        positions[i] = Uint32(index)


@dataclass(frozen=True)
class WordStage:
    """A row of words in shared memory, and the sink that fills it.

    Args:
        n: candidates it has room for at most.
    """

    n: int
    fp32: bool
    threads: int
    stage: cute.Tensor

    @classmethod
    def allocate(cls, smem: SmemAllocator, n: int, fp32: bool, threads: int) -> WordStage:
        return cls(n, fp32, threads, shared_words(smem, row_words(n, fp32)))

    @property
    def words(self) -> int:
        return row_words(self.n, self.fp32)

    def limited_to(self, n: int) -> WordStage:
        """The same memory for rows of ``n`` candidates."""
        return replace(self, n=n)

    @cute.jit
    def clear(self) -> None:
        """Empties it; a barrier must follow before anything is put."""
        tid, _, _ = cute.arch.thread_idx()
        stage = self.stage
        for i in cutlass.range(tid, self.words, self.threads, unroll=1):
            stage[i] = Uint32(0)

    def observe(self, group: Int32, i: int, kept: Boolean, position: Uint32) -> None:
        pass

    def publish(self, partials: cute.Tensor, warp: Int32, lane: Int32) -> None:
        pass

    def collect(self, partials: cute.Tensor, warps: int, lane: Int32) -> None:
        pass

    @cute.jit
    def put(
        self, kept: Boolean, place: Int32, group: Int32, i: cutlass.Constexpr[int], ord: Uint32, position: Uint32
    ) -> None:
        """Candidate ``(ord, position)`` at ``place``; what is past the end comes of indices that repeat."""
        stage = self.stage
        if kept & (place < self.n):
            if const_expr(self.fp32):
                stage[2 * place] = ord
                stage[2 * place + 1] = ~position
            else:
                stage[place] = (ord << 16) | (~position & Uint32(0xFFFF))
                if (position >> 16) != 0:
                    word = Int32(stage.iterator.toint()) + 4 * (self.n + place // 32)
                    or_shared(word, Uint32(1) << Uint32(place % 32))
