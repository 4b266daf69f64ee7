"""What a merge kernel is specialised on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

#: Candidates that a thread keeps in registers, an ord and a position each. A row of more is read again in every
#: pass, from L2, where it is by then.
MAX_HELD = 8
#: Loads that a thread has in flight together when it pushes, polls or reads candidates again, in round 1 and in
#: round 2, where each needs its rank found: what 128 registers allow.
IN_FLIGHT, IN_FLIGHT_IN_ROUND_2 = 8, 4


@dataclass(frozen=True)
class RowShape:
    """What is known of a merge at compile time.

    Attributes:
        world_size: W.
        topk: K.
        local_topk: N.
        fp32: the ``fp32`` word layout, else ``bf16``.
        threads: of the block. More meet later at a barrier, and have fewer registers for loads in flight.
    """

    world_size: int
    topk: int
    local_topk: int
    fp32: bool
    threads: ClassVar[int] = 512

    @property
    def items(self) -> int:
        """Candidates a thread has in round 1."""
        return -(-self.world_size * self.local_topk // self.threads)

    @property
    def held(self) -> bool:
        """Whether the candidates of round 1 stay in registers."""
        return self.items <= MAX_HELD

    @property
    def rescues(self) -> bool:
        """Whether a rank can be saturated."""
        return self.local_topk < self.topk

    @property
    def list_parts(self) -> int:
        """Blocks that can share the push of a list, a pair a thread: of a whole list of fp32 whose merge is short."""
        return -(-self.topk // self.threads) if self.fp32 and self.held and not self.rescues else 1

    @property
    def items_rescued(self) -> int:
        """Candidates a thread has in round 2 when one rank is saturated."""
        return -(-((self.world_size - 1) * self.local_topk + self.topk) // self.threads)

    @property
    def rescues_held(self) -> bool:
        """Whether those stay in registers."""
        return self.items_rescued <= MAX_HELD

    @property
    def scores_held(self) -> int:
        """Scores of a row that stay in registers while a rescue selects its list, 32 a thread.

        None where the words of more ranks need the registers: there the fewest rows are rescued.
        """
        return 32 * self.threads if self.world_size == 2 else 0
