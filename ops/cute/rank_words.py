"""The source of a merge: the words that W ranks sent for one row, in slots, lists or a gathered tensor."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from .peers import Peers
from .primitives import WARP, Divisor, load_half, load_pair, load_word, load_words
from .row_words import row_words
from .shape import RowShape
from .wait import Watch, wait_tagged

#: Candidates a thread reads at once when it does not keep them: their latencies overlap. Round 2 tells words
#: from lists and keeps what round 1 needs, so that more than 2 would spill.
STREAMED = 4
STREAMED_IN_ROUND_2 = 2
#: Candidates a thread waits for at once, of those that it keeps; limited by registers, too.
WAITED = 4


@dataclass(frozen=True)
class RankWords:
    """Candidates of all ranks for one row, ``width`` places a rank, those of a rank in the order of its words.

    A rank whose bit is set in ``saturated`` is read from its list of K candidates, any other from its N words.

    Attributes:
        shape: of the merge.
        width: places a rank: N in round 1, K in round 2.
        tagged: whether words lie in LL slots, else in a gathered tensor (lists are always tagged).
        held: whether they stay in registers, which :meth:`fetch` fills.
        words, stride: address of rank 0's words of this row, and bytes to the next rank's.
        lists, list_stride: the same for the lists, by list; unused when ``width`` is N.
        saturated: ranks that sent a list.
        interleave: positions of a stretch.
    """

    shape: RowShape
    width: int
    tagged: bool
    held: bool
    words: Int64
    stride: Int64
    lists: Int64
    list_stride: Int64
    saturated: Uint32
    interleave: Divisor

    @classmethod
    def slots(cls, peers: Peers, epoch: Uint32, row: Int32, interleave: Divisor) -> RankWords:
        """The words that the ranks push into this rank's slots in the call of ``epoch``."""
        shape, base = peers.shape, peers.bases[peers.rank]
        words = base + peers.slot(epoch, Int32(0), row)
        zero = Int64(0)
        return cls(
            shape, shape.local_topk, True, shape.held, words, peers.slot_stride, zero, zero, Uint32(0), interleave
        )

    @classmethod
    def gathered(cls, shape: RowShape, gathered: cute.Tensor, row: Int32, interleave: Divisor) -> RankWords:
        """The words in ``gathered [W, T, words]``."""
        words, stride = gathered[0, row, None].iterator.toint(), Int64(gathered.stride[0]) * 4
        zero = Int64(0)
        return cls(shape, shape.local_topk, False, shape.held, words, stride, zero, zero, Uint32(0), interleave)

    @property
    def items(self) -> int:
        if self.held:
            return self._all
        return min(STREAMED if self.width == self.shape.local_topk else STREAMED_IN_ROUND_2, self._all)

    @property
    def groups(self) -> int:
        return 1 if self.held else -(-self._all // self.items)

    @property
    def _all(self) -> int:
        return -(-self.shape.world_size * self.width // self.shape.threads)

    def candidate(self, group: Int32, i: int) -> Int32:
        """Candidate ``i`` of this thread in ``group``; see :class:`.candidates.Source`."""
        tid, _, _ = cute.arch.thread_idx()
        return ((tid // WARP * self.groups + group) * self.items + i) * WARP + tid % WARP

    def rank_of(self, group: Int32, i: int) -> Int32:
        """The rank that sent it; W or more past the last candidate."""
        return self.candidate(group, i) // self.width

    def load(self, group: Int32, ords: cute.Tensor, positions: cute.Tensor) -> None:
        if const_expr(not self.held):
            self._read(group, ords, positions)

    @cute.jit
    def fetch(self, ords: cute.Tensor, positions: cute.Tensor) -> None:
        """Reads what is held, without waiting."""
        if const_expr(self.held):
            self._read(Int32(0), ords, positions)

    @cute.jit
    def _read(self, group: Int32, ords: cute.Tensor, positions: cute.Tensor) -> None:
        shape = self.shape
        for i in cutlass.range_constexpr(self.items):
            c = self.candidate(group, i)
            rank = c // self.width
            k = c - rank * self.width
            base = self.words + Int64(rank) * self.stride
            n = Int32(shape.local_topk)
            listed = Boolean(False)
            if const_expr(self.width != shape.local_topk):
                if self.is_saturated(rank):
                    base = self.lists + Int64(self.list_of(rank)) * self.list_stride
                    n = Int32(shape.topk)
                    listed = Boolean(True)
            ords[i] = Uint32(0)
            positions[i] = Uint32(0)
            if (c < shape.world_size * self.width) & (k < n):
                if const_expr(self.tagged):
                    ords[i], positions[i] = self._load(base, k, n, True)
                elif listed:
                    ords[i], positions[i] = self._load(base, k, n, True)
                else:
                    ords[i], positions[i] = self._load(base, k, n, False)
        for i in cutlass.range_constexpr(self.items):
            self._globalise(group, i, ords, positions)

    @cute.jit
    def _load(self, base: Int64, k: Int32, n: Int32, tagged: cutlass.Constexpr[bool]):
        """Word and, as they lie, the bits of the position: ``(ord, ~idx)``, or ``(word, word of high bits)``."""
        if const_expr(self.shape.fp32):
            if const_expr(tagged):
                first, _, second, _ = load_pair(base + Int64(k) * 16)
            else:
                first, second = load_words(base + Int64(k) * 8)
        else:
            if const_expr(tagged):
                first, _ = load_half(base + Int64(k) * 8)
                second, _ = load_half(base + Int64(n + k // 32) * 8)
            else:
                first = load_word(base + Int64(k) * 4)
                second = load_word(base + Int64(n + k // 32) * 4)
        return first, second

    @cute.jit
    def _globalise(self, group: Int32, i: cutlass.Constexpr[int], ords: cute.Tensor, positions: cute.Tensor) -> None:
        """Turns what :meth:`_load` gave into ord and global position."""
        shape = self.shape
        c = self.candidate(group, i)
        rank = c // self.width
        k = c - rank * self.width
        if const_expr(shape.fp32):
            ord, index = ords[i], Int32(~positions[i])
        else:
            word = ords[i]
            high = (positions[i] >> Uint32(k % 32)) & 1
            ord, index = word >> 16, Int32((high << 16) | (~word & Uint32(0xFFFF)))
        stretch = self.interleave.divide(index)
        position = index + (stretch * (shape.world_size - 1) + rank) * self.interleave.divisor
        ords[i] = ord
        positions[i] = Uint32(position) if ord != 0 else Uint32(0)

    def is_saturated(self, rank: Int32) -> Boolean:
        return ((self.saturated >> Uint32(rank)) & 1) != 0

    def list_of(self, rank: Int32) -> Int32:
        """Saturated ranks take the lists of a row in rank order."""
        return Int32(cute.arch.popc(self.saturated & ((Uint32(1) << Uint32(rank)) - 1)))

    @cute.jit
    def wait(self, ords: cute.Tensor, positions: cute.Tensor, epoch: Uint32, row: Int32, watch: Watch) -> None:
        """Waits for the words of round 1 and, when they are held, leaves them in the registers."""
        if const_expr(self.held):
            self._wait_held(ords, positions, epoch, row, watch)
        else:
            for rank in cutlass.range(self.shape.world_size, unroll=1):
                address = self.words + Int64(rank) * self.stride
                n = self.shape.local_topk
                wait_row(address, n, self.shape, epoch, row, Int32(rank), 1, watch)
            cute.arch.sync_threads()  # each thread reads what others waited for

    @cute.jit
    def _wait_held(self, ords: cute.Tensor, positions: cute.Tensor, epoch: Uint32, row: Int32, watch: Watch) -> None:
        last = self.shape.world_size * self.width - 1
        raw = cute.make_rmem_tensor(2 * WAITED, Uint32)
        for first in cutlass.range_constexpr(0, self.items, WAITED):
            addresses, ranks = [], []
            for i in cutlass.range_constexpr(first, min(first + WAITED, self.items)):
                # Past the end the last candidate is waited for again: that costs less than a branch.
                c = cutlass.min(self.candidate(Int32(0), i), Int32(last))
                rank = c // self.width
                k = c - rank * self.width
                base = self.words + Int64(rank) * self.stride
                if const_expr(self.shape.fp32):
                    addresses += [base + Int64(k) * 16]
                    ranks += [rank]
                else:
                    addresses += [base + Int64(k) * 8, base + Int64(self.width + k // 32) * 8]
                    ranks += [rank, rank]
            wait_tagged(addresses, ranks, raw, self.shape.fp32, epoch, row, 1, watch)
            for i in cutlass.range_constexpr(first, min(first + WAITED, self.items)):
                there = self.candidate(Int32(0), i) <= last
                ords[i] = raw[2 * (i - first)] if there else Uint32(0)
                positions[i] = raw[2 * (i - first) + 1]
                self._globalise(Int32(0), i, ords, positions)

    @cute.jit
    def wait_lists(self, tags: cute.Tensor, row: Int32, watch: Watch) -> None:
        """Waits for the lists of the saturated ranks; ``tags[slot]`` is the epoch before this use."""
        for rank in cutlass.range(self.shape.world_size, unroll=1):
            if self.is_saturated(rank):
                slot = self.list_of(rank)
                address = self.lists + Int64(slot) * self.list_stride
                epoch = Uint32(tags[slot, row]) + 1
                wait_row(address, self.shape.topk, self.shape, epoch, row, Int32(rank), 2, watch)
        cute.arch.sync_threads()  # each thread reads what others waited for


@cute.jit
def wait_row(
    address: Int64,
    n: cutlass.Constexpr[int],
    shape: RowShape,
    epoch: Uint32,
    row: Int32,
    rank: Int32,
    round: cutlass.Constexpr[int],
    watch: Watch,
) -> None:
    """The block waits for every LL pair of a row of ``n`` candidates, and leaves the words where they are."""
    tid, _, _ = cute.arch.thread_idx()
    pairs = const_expr(-(-row_words(n, shape.fp32) // 2))
    raw = cute.make_rmem_tensor(2 * STREAMED, Uint32)
    for first in cutlass.range(tid, pairs, STREAMED * shape.threads, unroll=1):
        addresses = [
            address + Int64(cutlass.min(first + u * shape.threads, Int32(pairs - 1))) * 16 for u in range(STREAMED)
        ]
        wait_tagged(addresses, [rank] * STREAMED, raw, True, epoch, row, round, watch)
