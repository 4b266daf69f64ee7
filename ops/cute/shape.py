"""What a merge kernel is specialised on."""

from __future__ import annotations

from dataclasses import dataclass

#: Candidates a thread keeps in registers (an ord and a position each). More would spill at the 64 registers
#: that 1024 threads have; then every pass reads its candidates again, from L2, where they are by then.
MAX_HELD = 8
#: Loads that the threads of a block have in flight together when they push, when they poll, and when they read
#: candidates again in round 1 and in round 2 (where each needs its rank found): what 64 Ki registers allow.
PUSHED, WAITED, STREAMED, STREAMED_IN_ROUND_2 = 4096, 4096, 4096, 2048


@dataclass(frozen=True)
class RowShape:
    """What is known of a merge at compile time.

    Attributes:
        world_size: W.
        topk: K.
        local_topk: N.
        fp32: the ``fp32`` word layout, else ``bf16``.
        threads: of the block.
    """

    world_size: int
    topk: int
    local_topk: int
    fp32: bool
    threads: int

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

    @classmethod
    def of(cls, world_size: int, topk: int, local_topk: int, fp32: bool) -> RowShape:
        """With the threads that suit it: 512, unless 1024 hold the candidates and they cannot.

        Fewer threads meet sooner at a barrier, and have registers to keep more loads in flight each.
        """
        held_by_more = 512 * MAX_HELD < world_size * local_topk <= 1024 * MAX_HELD
        return cls(world_size, topk, local_topk, fp32, 1024 if held_by_more else 512)
