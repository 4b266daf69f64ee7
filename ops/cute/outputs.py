"""What a merge writes for a row: global ids, this rank's KV rows, their count, and who is saturated."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, const_expr

from .primitives import WARP, Divisor, warp_or, warp_sum
from .rank_words import RankWords


@dataclass(frozen=True)
class Outputs:
    """Where the rows of a call are written, as the kernels are given it; None for what was not asked for.

    Attributes:
        ids: int32 ``[T, K]``.
        block_table: int32 ``[requests, blocks]``, and with it the rest.
        req_id: int32 ``[T]``.
        rows: int32 ``[T, K]``.
        valid: int32 ``[T]``.
        block_size: positions a block.
        block_stride: KV rows from one block to the next.
    """

    ids: cute.Tensor | None
    block_table: cute.Tensor | None
    req_id: cute.Tensor | None
    rows: cute.Tensor | None
    valid: cute.Tensor | None
    block_size: Divisor
    block_stride: Int32

    def request(self, row: Int32) -> Int32 | None:
        """The request of ``row``: read it long before :meth:`MergeSink.put` needs it."""
        return None if self.req_id is None else self.req_id[row]


@dataclass(frozen=True)
class MergeSink:
    """Writes the outputs of a row; a sink for :class:`.block_select.BlockSelect`.

    Attributes:
        source: the candidates.
        rank: this rank.
        row: of the call.
        request: the row's, or None.
        out: what is written.
        counts: registers; winners of the ranks below this one, in the high half those up to this one; then
            ranks (bits) that have a candidate which was not selected.
        kv_rows: registers, KV rows of the candidates at hand; their lookups wait for memory all together.
    """

    source: RankWords
    rank: Int32
    row: Int32
    request: Int32 | None
    out: Outputs
    counts: cute.Tensor
    kv_rows: cute.Tensor

    @classmethod
    def of_row(cls, source: RankWords, rank: Int32, row: Int32, request: Int32 | None, out: Outputs) -> MergeSink:
        counts = cute.make_rmem_tensor(2, Uint32)
        counts[0] = Uint32(0)
        counts[1] = Uint32(0)
        kv_rows = cute.make_rmem_tensor(source.items, Int32)
        kv_rows.fill(0)  # else they would seem to outlive the row, and occupy registers
        return cls(source, rank, row, request, out, counts, kv_rows)

    @property
    def _early(self) -> bool:
        """Whether KV rows are looked up while winners are counted, which needs all candidates in registers."""
        return self.source.held

    @cute.jit
    def observe(self, group: Int32, i: cutlass.Constexpr[int], kept: Boolean, position: Uint32) -> None:
        counts, source = self.counts, self.source
        if const_expr(self._early):
            self._look_up(i, kept & self._is_own(group, i), position)
        if const_expr(self.out.rows is not None):
            # At most K = 4096 winners: the two counts never meet in their word.
            below = Uint32(1) if kept & source.is_before(self.rank, group, i) else Uint32(0)
            upto = Uint32(1 << 16) if kept & source.is_before(self.rank + 1, group, i) else Uint32(0)
            counts[0] = counts[0] + below + upto
        if const_expr(self._asks):
            rank = source.rank_of(group, i)
            there = rank < self.source.shape.world_size
            counts[1] = counts[1] | (Uint32(0) if kept | ~there else Uint32(1) << Uint32(rank))

    def _is_own(self, group: Int32, i: int) -> Boolean:
        source, rank = self.source, self.rank
        return source.is_before(rank + 1, group, i) & ~source.is_before(rank, group, i)

    @property
    def _asks(self) -> bool:
        """Whether :meth:`saturated` will be asked for."""
        return self.source.shape.rescues and self.source.saturated is None

    @cute.jit
    def publish(self, partials: cute.Tensor, warp: Int32, lane: Int32) -> None:
        counts = self.counts
        if const_expr(self.out.rows is not None):
            counts[0] = Uint32(warp_sum(Int32(counts[0])))
            if lane == 0:
                partials[warp] = counts[0]
        if const_expr(self._asks):
            counts[1] = warp_or(counts[1])
            if lane == 0:
                partials[WARP + warp] = counts[1]

    @cute.jit
    def collect(self, partials: cute.Tensor, warps: cutlass.Constexpr[int], lane: Int32) -> None:
        counts = self.counts
        there = lane < warps
        if const_expr(self.out.rows is not None):
            counts[0] = Uint32(warp_sum(Int32(partials[lane] if there else Uint32(0))))
        if const_expr(self._asks):
            counts[1] = warp_or(partials[WARP + lane] if there else Uint32(0))

    def saturated(self) -> Uint32:
        """Ranks all of whose N candidates were selected; to be asked in round 1, with N < K, after ``collect``."""
        return ~self.counts[1] & ((1 << self.source.shape.world_size) - 1)

    @cute.jit
    def put(
        self, kept: Boolean, place: Int32, group: Int32, i: cutlass.Constexpr[int], ord: Uint32, position: Uint32
    ) -> None:
        out, kept = self.out, kept & (place < self.source.shape.topk)  # more would come of indices that repeat
        if const_expr(out.ids is not None):
            ids = out.ids[self.row, None]
            if kept:
                ids[place] = Int32(position)
        if const_expr(out.rows is not None):
            rows, own = out.rows[self.row, None], kept & self._is_own(group, i)
            if const_expr(not self._early):
                self._look_up(i, own, position)
            if own:
                rows[place - self._below()] = self.kv_rows[i]

    @cute.jit
    def _look_up(self, i: cutlass.Constexpr[int], wanted: Boolean, position: Uint32) -> None:
        """The KV row of a position of this rank, into the registers."""
        out, kv_rows = self.out, self.kv_rows
        if const_expr(out.rows is not None):
            if wanted:
                interleave, block_size = self.source.interleave, out.block_size
                stretch = interleave.divide(Int32(position))
                inside = Int32(position) - stretch * interleave.divisor
                j = stretch // self.source.shape.world_size * interleave.divisor + inside
                block = block_size.divide(j)
                first = out.block_table[self.request, block] * out.block_stride
                kv_rows[i] = first + (j - block * block_size.divisor)

    def _below(self) -> Int32:
        return Int32(self.counts[0] & 0xFFFF)

    @cute.jit
    def pad(self, total: Int32) -> None:
        """-1 for the places that are left, and the count of this rank's rows."""
        tid, _, _ = cute.arch.thread_idx()
        shape, ids, rows, valid = self.source.shape, self.out.ids, self.out.rows, self.out.valid
        if const_expr(ids is not None):
            for place in cutlass.range(total + tid, shape.topk, shape.threads, unroll=1):
                ids[self.row, place] = Int32(-1)
        if const_expr(rows is not None):
            own = Int32(self.counts[0] >> 16) - self._below()
            for place in cutlass.range(own + tid, shape.topk, shape.threads, unroll=1):
                rows[self.row, place] = Int32(-1)
            if tid == 0:
                valid[self.row] = own
