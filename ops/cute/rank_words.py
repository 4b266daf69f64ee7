"""The source of a merge: the words that W ranks sent for one row, in slots, lists or a gathered tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from .candidates import candidate
from .peers import Peers
from .primitives import Divisor, element, load_half, load_word, load_words
from .row_words import row_words
from .shape import IN_FLIGHT, IN_FLIGHT_IN_ROUND_2, RowShape
from .wait import Watch, nothing_yet, wait_tagged

#: Bytes of a word in an LL half, and in a gathered tensor.
TAGGED, PLAIN = 8, 4


@dataclass(frozen=True)
class RankWords:
    """Candidates of all ranks for one row, rank by rank, those of a rank in the order of its words.

    A rank whose bit is set in ``saturated`` is read from its list of K candidates, any other from its N
    words. Places in memory are counted in words (of :data:`TAGGED` or :data:`PLAIN` bytes): 32 bits of
    them reach far enough and are half the registers of an address.

    Attributes:
        shape: of the merge.
        held: whether candidates stay in registers, which :meth:`fetch` or :meth:`wait` fills.
        word_bytes: ``TAGGED`` where words lie in LL slots, ``PLAIN`` in a gathered tensor.
        memory, words, stride: where the words of rank 0 are, and words to the next rank's.
        peers: the ranks' memory; None where all words were gathered.
        own: address of this rank's own words, which have no tags; None where all words were gathered.
        own_tagged: whether they are in its slot, with tags, instead; only where candidates are held.
        lists, saturated: where the lists of the row are, and the ranks that sent one; None in round 1.
        interleave: positions of a stretch.
    """

    shape: RowShape
    held: bool
    word_bytes: int
    memory: Int64
    words: Uint32
    stride: Uint32
    interleave: Divisor
    peers: Peers | None = None
    own: Int64 | None = None
    own_tagged: Boolean | bool = False
    lists: Uint32 | None = None
    saturated: Uint32 | None = None

    @classmethod
    def slots(
        cls, peers: Peers, epoch: Uint32, row: Int32, interleave: Divisor, own: Int64, own_tagged: Boolean | bool
    ) -> RankWords:
        """The words pushed into this rank's slots in the call of ``epoch``, and its own: there, too, or at ``own``."""
        words = peers.slot(epoch, Int32(0), row)
        return cls(
            peers.shape, peers.shape.held, TAGGED, peers.bases[peers.rank], words, peers.slot_stride, interleave,
            peers, own, own_tagged,
        )  # fmt: skip

    @classmethod
    def gathered(cls, shape: RowShape, gathered: cute.Tensor, row: Int32, interleave: Divisor) -> RankWords:
        """The words in ``gathered [W, T, words]``."""
        memory = gathered[0, row, None].iterator.toint()
        return cls(shape, shape.held, PLAIN, memory, Uint32(0), Uint32(gathered.stride[0]), interleave)

    def with_lists(self, peers: Peers, row: Int32, saturated: Uint32) -> RankWords:
        """The candidates of round 2; they can be held when one rank is saturated and the shape says so."""
        lists = peers.list(Int32(0), row)
        return replace(self, held=False, peers=peers, lists=lists, saturated=saturated)

    @property
    def items(self) -> int:
        if self.saturated is not None:
            return self.shape.items_rescued if self.held else IN_FLIGHT_IN_ROUND_2
        return self.shape.items if self.held else IN_FLIGHT

    @property
    def groups(self) -> int | Int32:
        if self.held:
            return 1
        if self.saturated is not None:
            return cute.ceil_div(self._start(Int32(self.shape.world_size)), self.items * self.shape.threads)
        return -(-self.shape.items // self.items)

    def _start(self, rank: Int32) -> Int32:
        """The first candidate of ``rank``."""
        if self.saturated is None:
            return rank * self.shape.local_topk
        lists = cute.arch.popc(self.saturated & ((Uint32(1) << Uint32(rank)) - 1))
        return rank * self.shape.local_topk + Int32(lists) * (self.shape.topk - self.shape.local_topk)

    def _candidate(self, group: Int32, i: int) -> Int32:
        return candidate(self.items, i, group, self.groups)

    def rank_of(self, group: Int32, i: int) -> Int32:
        """The rank that sent a candidate of round 1; W or more past the last."""
        return self._candidate(group, i) // self.shape.local_topk

    def is_before(self, rank: Int32, group: Int32, i: int) -> Boolean:
        """Whether a rank below ``rank`` sent it."""
        return self._candidate(group, i) < self._start(rank)

    def load(self, group: Int32, ords: cute.Tensor, positions: cute.Tensor) -> None:
        if not self.held:
            self._read(group, ords, positions)

    def fetch(self, ords: cute.Tensor, positions: cute.Tensor) -> None:
        """Reads what is held, without waiting."""
        if self.held:
            self._read(Int32(0), ords, positions)

    def _read(self, group: Int32, ords: cute.Tensor, positions: cute.Tensor) -> None:
        read = self._read_words if self.saturated is None else self._read_words_and_lists
        read(group, ords, positions)

    @cute.jit
    def _read_words(self, group: Int32, ords: cute.Tensor, positions: cute.Tensor) -> None:
        n = const_expr(self.shape.local_topk)
        for i in cutlass.range_constexpr(self.items):
            c = self._candidate(group, i)
            rank = c // n
            ords[i] = Uint32(0)
            positions[i] = Uint32(0)
            if rank < self.shape.world_size:
                ords[i], positions[i] = self._load_words(rank, c - rank * n)
        for i in cutlass.range_constexpr(self.items):
            c = self._candidate(group, i)
            rank = c // n
            self._unpack(i, rank, c - rank * n, ords, positions)

    @cute.jit
    def _read_words_and_lists(self, group: Int32, ords: cute.Tensor, positions: cute.Tensor) -> None:
        shape, peers = self.shape, self.peers
        ranks = cute.make_rmem_tensor(self.items, Int32)
        places = cute.make_rmem_tensor(self.items, Int32)
        end = self._start(Int32(shape.world_size))
        for i in cutlass.range_constexpr(self.items):
            c = self._candidate(group, i)
            rank = Int32(0)
            for step in cutlass.range_constexpr(3, -1, -1):  # W is at most 16
                if const_expr((1 << step) < shape.world_size):
                    higher = rank + (1 << step)
                    if (higher < shape.world_size) & (c >= self._start(higher)):
                        rank = higher
            k = c - self._start(rank)
            ranks[i] = rank
            places[i] = k
            ords[i] = Uint32(0)
            positions[i] = Uint32(0)
            if c < end:
                if self.is_saturated(rank):
                    row = self.lists + Uint32(self.list_of(rank)) * peers.list_stride
                    ords[i], positions[i] = self._load(peers.bases[peers.rank], row, k, shape.topk, TAGGED)
                else:
                    ords[i], positions[i] = self._load_words(rank, k)
        for i in cutlass.range_constexpr(self.items):
            self._unpack(i, ranks[i], places[i], ords, positions)

    @cute.jit
    def _load_words(self, rank: Int32, k: Int32):
        """Candidate ``k`` of the N words of ``rank``; see :meth:`_load`."""
        n, row = self.shape.local_topk, self.words + Uint32(rank) * self.stride
        if const_expr(self.own is None):
            first, second = self._load(self.memory, row, k, n, self.word_bytes)
        else:
            first, second = Uint32(0), Uint32(0)
            if rank == self.peers.rank:
                first, second = self._load(self.own, Uint32(0), k, n, PLAIN)
            else:
                first, second = self._load(self.memory, row, k, n, self.word_bytes)
        return first, second

    @cute.jit
    def _load(
        self, memory: Int64, row: Uint32, k: Int32, n: cutlass.Constexpr[int], word_bytes: cutlass.Constexpr[int]
    ):
        """Word and, as they lie, the bits of the position: ``(ord, ~idx)``, or ``(word, word of high bits)``."""
        if const_expr(self.shape.fp32):
            if const_expr(word_bytes == TAGGED):
                first = load_half(element(memory, row + Uint32(2 * k), word_bytes))
                second = load_half(element(memory, row + Uint32(2 * k + 1), word_bytes))
            else:
                first, second = load_words(element(memory, row + Uint32(2 * k), word_bytes))
        else:
            high = row + Uint32(n + k // 32)
            if const_expr(word_bytes == TAGGED):
                first = load_half(element(memory, row + Uint32(k), word_bytes))
                second = load_half(element(memory, high, word_bytes))
            else:
                first = load_word(element(memory, row + Uint32(k), word_bytes))
                second = load_word(element(memory, high, word_bytes))
        return first, second

    def _load_own(self, k: Int32) -> tuple[Uint32, Uint32]:
        """Candidate ``k`` of this rank, for :meth:`wait`; see :meth:`_load`.

        Two loads: one would bring the words into neighbouring registers, and a poll has them two apart.
        """
        if not self.shape.fp32:
            return self._load(self.own, Uint32(0), k, self.shape.local_topk, PLAIN)
        return load_word(element(self.own, Uint32(2 * k), PLAIN)), load_word(
            element(self.own, Uint32(2 * k + 1), PLAIN)
        )

    @cute.jit
    def _unpack(
        self, i: cutlass.Constexpr[int], rank: Int32, k: Int32, ords: cute.Tensor, positions: cute.Tensor
    ) -> None:
        """Turns what :meth:`_load` gave for place ``k`` of ``rank`` into ord and global position."""
        if const_expr(self.shape.fp32):
            ord, index = ords[i], Int32(~positions[i])
        else:
            word = ords[i]
            high = (positions[i] >> Uint32(k % 32)) & 1
            ord, index = word >> 16, Int32((high << 16) | (~word & Uint32(0xFFFF)))
        stretch = self.interleave.divide(index)
        position = index + (stretch * (self.shape.world_size - 1) + rank) * self.interleave.divisor
        ords[i] = ord
        positions[i] = Uint32(position)

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
            n = const_expr(self.shape.local_topk)
            for rank in cutlass.range(self.shape.world_size, unroll=1):
                if rank != self.peers.rank:
                    first = self.words + Uint32(rank) * self.stride
                    wait_row(self.memory, first, n, self.shape, epoch, row, Int32(rank), 1, watch)
            cute.arch.sync_threads()  # each thread reads what others waited for

    @cute.jit
    def _wait_held(self, ords: cute.Tensor, positions: cute.Tensor, epoch: Uint32, row: Int32, watch: Watch) -> None:
        n = const_expr(self.shape.local_topk)
        last = self.shape.world_size * n - 1
        halves = cute.make_rmem_tensor(4 * self.items, Uint32)
        nothing_yet(halves, epoch)
        places, ranks = [], []
        for i in cutlass.range_constexpr(self.items):
            # Past the end the last candidate is waited for again: that costs less than a branch.
            c = cutlass.min(self._candidate(Int32(0), i), Int32(last))
            rank = c // n
            k = c - rank * n
            if (rank == self.peers.rank) & ~Boolean(self.own_tagged):
                halves[4 * i], halves[4 * i + 2] = self._load_own(k)
                halves[4 * i + 1] = epoch
                halves[4 * i + 3] = epoch
            sent = self.words + Uint32(rank) * self.stride
            if const_expr(self.shape.fp32):
                places += [sent + Uint32(2 * k)]
                ranks += [rank]
            else:
                places += [sent + Uint32(k), sent + Uint32(n + k // 32)]
                ranks += [rank, rank]
        wait_tagged(self.memory, places, ranks, halves, self.shape.fp32, epoch, row, 1, watch)
        for i in cutlass.range_constexpr(self.items):
            c = self._candidate(Int32(0), i)
            ords[i] = halves[4 * i] if c <= last else Uint32(0)
            positions[i] = halves[4 * i + 2]
            self._unpack(i, c // n, c - c // n * n, ords, positions)

    @cute.jit
    def wait_lists(self, tags: cute.Tensor, row: Int32, watch: Watch) -> None:
        """Waits for the lists of the saturated ranks; ``tags[slot]`` is the epoch before this use."""
        peers, shape = self.peers, self.shape
        for rank in cutlass.range(shape.world_size, unroll=1):
            if self.is_saturated(rank):
                slot = self.list_of(rank)
                first = self.lists + Uint32(slot) * peers.list_stride
                epoch = Uint32(tags[slot, row]) + 1
                wait_row(peers.bases[peers.rank], first, shape.topk, shape, epoch, row, Int32(rank), 2, watch)
        cute.arch.sync_threads()  # each thread reads what others waited for


@cute.jit
def wait_row(
    memory: Int64,
    first: Uint32,
    n: cutlass.Constexpr[int],
    shape: RowShape,
    epoch: Uint32,
    row: Int32,
    rank: Int32,
    round: cutlass.Constexpr[int],
    watch: Watch,
) -> None:
    """The block waits for every LL pair of the ``n`` candidates from ``first`` on, and leaves them there."""
    tid, _, _ = cute.arch.thread_idx()
    pairs = const_expr(row_words(n, shape.fp32) // 2)
    at_once = const_expr(min(IN_FLIGHT, -(-pairs // shape.threads)))
    halves = cute.make_rmem_tensor(4 * at_once, Uint32)
    for start in cutlass.range(tid, pairs, at_once * shape.threads, unroll=1):
        own = [cutlass.min(start + u * shape.threads, Int32(pairs - 1)) for u in range(at_once)]
        places = [first + Uint32(2 * pair) for pair in own]
        nothing_yet(halves, epoch)
        wait_tagged(memory, places, [rank] * at_once, halves, True, epoch, row, round, watch)
