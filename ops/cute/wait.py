"""The one wait that every poll goes through, and what happens when its time is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from .primitives import (
    claim_sys,
    element,
    fence_sys,
    global_timer,
    late_tags,
    load_sys,
    poll_half,
    poll_pair,
    sleep,
    store_sys,
    trap,
)
from .record import CLAIMED, COMPLETE, EPOCH, ROUND, ROW, SOURCE

#: A poll looks at the global timer once in this many turns: a read costs about a microsecond, a turn less,
#: and the limit is seconds.
POLLS_PER_LOOK = 1024
#: A wait of round 2 sleeps this long between turns, so that it leaves the memory system to the ranks that push.
ROUND_2_SLEEP_NS = 100
#: Turns that a thread whose wait expired gives the first such thread to finish its record (about 0.1 s).
RECORD_TURNS = 1 << 17


@dataclass(frozen=True)
class Watch:
    """What a wait needs to give up: the failure record's address and the time limit."""

    record: Int64
    timeout_ns: Int64

    @cute.jit
    def fail(self, row: Int32, source: Int32, epoch: Uint32, round: cutlass.Constexpr[int]) -> None:
        """Records what was waited for and stops the context. The first thread of the GPU to fail is recorded.

        The others wait until it has written its record, as their trap would end it half-way.
        """
        record = self.record
        if claim_sys(record + 4 * CLAIMED) == 0:
            store_sys(record + 4 * ROW, row)
            store_sys(record + 4 * SOURCE, source)
            store_sys(record + 4 * EPOCH, Int32(epoch))
            store_sys(record + 4 * ROUND, Int32(round))
            fence_sys()
            store_sys(record + 4 * COMPLETE, Int32(1))
            fence_sys()
        turns = Int32(0)
        while turns < RECORD_TURNS:
            turns = turns + 1
            if load_sys(record + 4 * COMPLETE) != 0:
                turns = Int32(RECORD_TURNS)
            else:
                sleep(Int32(1000))
        trap()


@cute.jit
def wait_tagged(
    memory: Int64,
    places: Sequence[Uint32],
    sources: Sequence[Int32],
    halves: cute.Tensor,
    pairs: cutlass.Constexpr[bool],
    epoch: Uint32,
    row: Int32,
    round: cutlass.Constexpr[int],
    watch: Watch,
) -> None:
    """The one wait: spins until every tag at ``places`` equals ``epoch``, then leaves words and tags.

    In a turn all places that are late are read together, so that their latencies overlap.

    Args:
        memory: where place 0 is.
        places: of LL pairs, or of halves; counted in halves.
        sources: the rank that stores at each of them.
        halves: registers, Uint32; 4 a pair or 2 a half: word, tag, word, tag. Where the tags are ``epoch``
            before, nothing is waited for; :func:`nothing_yet` is what to begin with elsewhere.
        pairs: whether pairs or halves are read.
        epoch: the tag to wait for.
        row, round: what a failure reports.
    """
    missing = Uint32(1)
    turns = Int32(0)
    deadline = Int64(0)
    size = const_expr(4 if pairs else 2)
    while missing != 0:
        missing = Uint32(0)
        for i in cutlass.range_constexpr(len(places)):
            place = [halves[size * i + j] for j in range(size)]
            place = (poll_pair if pairs else poll_half)(element(memory, places[i], 8), epoch, *place)
            for j in cutlass.range_constexpr(size):
                halves[size * i + j] = place[j]
            missing = missing | late_tags(place[1], place[-1], epoch)
        if missing != 0:
            turns = turns + 1
            if const_expr(round == 2):
                sleep(Int32(ROUND_2_SLEEP_NS))
            if turns % POLLS_PER_LOOK == 0:
                now = global_timer()
                if deadline == 0:
                    deadline = now + watch.timeout_ns
                if now > deadline:
                    culprit = Int32(-1)
                    for tag in cutlass.range_constexpr(1, size * len(places), 2):
                        culprit = culprit if halves[tag] == epoch else sources[tag // size]
                    watch.fail(row, culprit, epoch, round)


def nothing_yet(halves: cute.Tensor, epoch: Uint32) -> None:
    """Makes every place of :func:`wait_tagged` one to wait for."""
    halves.fill(~epoch)
