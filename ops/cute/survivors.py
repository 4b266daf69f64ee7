"""The candidates of a long row that can still be among its best, kept in shared memory: a source of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from .candidates import candidate
from .primitives import WARP, SmemAllocator, ballot, lower_lanes, shared_words, warp_sum
from .row_words import LogitsSource

#: Candidates there is room for: of 131072 normal scores the first pass leaves about 3000.
ROOM = 6 * 1024


@dataclass(frozen=True)
class Survivors:
    """What :meth:`gathered` found, by ascending position; :meth:`fetch` brings it into the registers of a block.

    Attributes:
        threads: of the block, 1024: a warp a lane, for its sums.
        list: shared, an ord and a position each.
        count: how many there are.
    """

    threads: int
    list: cute.Tensor
    count: Int32 | int = 0

    @classmethod
    def allocate(cls, smem: SmemAllocator, threads: int) -> Survivors:
        assert threads == WARP * WARP
        return cls(threads, shared_words(smem, 2 * ROOM))

    items = property(lambda self: ROOM // self.threads)
    groups = 1

    def load(self, group: Int32, ords: cute.Tensor, positions: cute.Tensor) -> None:
        pass  # in registers since fetch()

    @cute.jit
    def fetch(self, ords: cute.Tensor, positions: cute.Tensor) -> None:
        survivors = self.list
        for i in cutlass.range_constexpr(self.items):
            c = candidate(self.items, i)
            ords[i] = Uint32(0)
            positions[i] = Uint32(0)
            if c < self.count:
                ords[i] = survivors[2 * c]
                positions[i] = survivors[2 * c + 1]

    def gathered(self, source: LogitsSource, partials: cute.Tensor) -> Survivors:
        """With the candidates of ``source`` from its floor on, of which there must be at most :data:`ROOM`."""
        return replace(self, count=self._gather(source, partials))

    @cute.jit
    def _gather(self, source: LogitsSource, partials: cute.Tensor) -> Int32:
        """How many they are. Has barriers, one after the last was stored.

        The block goes over the row in stretches, so that it does not matter where in the row they are.
        """
        tid, _, _ = cute.arch.thread_idx()
        lane, warp, survivors = tid % WARP, tid // WARP, self.list
        ords = cute.make_rmem_tensor(source.items, Uint32)
        below = lower_lanes()
        stretch = source.items * self.threads
        place = Int32(0)
        for group in cutlass.range(cute.ceil_div(source.end, stretch), unroll=1):
            first = group * stretch + warp * source.items * WARP + lane
            source.read(first, ords)
            votes = [ballot(ords[i] != 0) for i in range(source.items)]
            mine = sum((Int32(cute.arch.popc(vote)) for vote in votes), Int32(0))
            sums = group % 2 * WARP  # by turns, as one barrier parts neither their reads from the next writes
            if lane == 0:
                partials[sums + warp] = Uint32(mine)
            cute.arch.sync_threads()
            of_lane = Int32(partials[sums + lane])
            at = place + warp_sum(of_lane if lane < warp else Int32(0))
            place = place + warp_sum(of_lane)
            for i in cutlass.range_constexpr(source.items):
                if ords[i] != 0:
                    own = at + Int32(cute.arch.popc(votes[i] & below))
                    survivors[2 * own] = ords[i]
                    survivors[2 * own + 1] = Uint32(first + i * WARP)
                at = at + Int32(cute.arch.popc(votes[i]))
        cute.arch.sync_threads()
        return place
