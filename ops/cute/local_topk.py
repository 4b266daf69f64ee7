"""``topkx::local_topk_words``: the words of the best N scores of each row, by ascending position."""

from __future__ import annotations

from dataclasses import replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from .block_select import BlockSelect
from .primitives import SmemAllocator
from .row_words import LogitsSource, WordStage, score_bits
from .survivors import ROOM, Survivors
from .wait import Watch

#: One block a row of up to 131072 scores: as many threads as a block can have.
THREADS = 1024
#: Scores of a row that stay in registers, 16 a thread: their passes cost no memory time.
SCORES_HELD = 16 * THREADS


@cute.jit
def stage_best(source: LogitsSource, select: BlockSelect, stage: WordStage, survivors: Survivors | None = None) -> None:
    """The best ``stage.n`` of ``source`` into the stage, which can be read after this returns; a rescue's, too.

    ``survivors``: memory for those of a row that is longer than what registers hold; else it is read in each pass.
    """
    stage.clear()
    if const_expr(source.most_held == 0):
        _stage_best(source, select, stage)
    elif (source.end > 0) & (source.end <= source.most_held):  # of an empty row nothing can be read
        _stage_best(replace(source, held=True), select, stage)
    elif const_expr(survivors is None):
        _stage_best(source, select, stage)
    else:
        ords = cute.make_rmem_tensor(source.items, Uint32)
        positions = cute.make_rmem_tensor(source.items, Uint32)
        floor, left = select.narrow(source, ords, positions, Int32(stage.n), ROOM)
        if left <= ROOM:
            _stage_best(survivors.gathered(replace(source, floor=floor), select.partials), select, stage)
        else:
            _stage_best(source, select, stage)
    cute.arch.sync_threads()


@cute.jit
def _stage_best(source: LogitsSource | Survivors, select: BlockSelect, stage: WordStage) -> None:
    ords = cute.make_rmem_tensor(source.items, Uint32)
    positions = cute.make_rmem_tensor(source.items, Uint32)
    source.fetch(ords, positions)
    high, low = select.threshold(source, ords, positions, Int32(stage.n))
    _, first = select.count(source, ords, positions, high, low, stage)
    select.write(source, ords, positions, high, low, first, stage)


class LocalTopkWords:
    """One block a row.

    Args:
        n: candidates a row, 1..4096.
        fp32: float32 scores and the ``fp32`` layout, else bfloat16 and ``bf16``.
    """

    def __init__(self, n: int, fp32: bool) -> None:
        self.n, self.fp32 = n, fp32

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,
        row_ends: cute.Tensor,
        words: cute.Tensor,
        record: Int64,
        stream: cuda.CUstream,
    ) -> None:
        """Launches on ``logits [T, L]``, ``row_ends [T]`` into ``words [T, packed_row_words(n)]``.

        ``record``: address of the failure record that a row end outside 0..L is written to.
        """
        self.kernel(logits, row_ends, words, record).launch(
            grid=[words.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    @cute.kernel
    def kernel(self, logits: cute.Tensor, row_ends: cute.Tensor, words: cute.Tensor, record: Int64) -> None:
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        select = BlockSelect.allocate(smem, THREADS, ord_bits=32 if self.fp32 else 16)
        stage = WordStage.allocate(smem, self.n, self.fp32, THREADS)
        survivors = Survivors.allocate(smem, THREADS)
        cute.arch.griddepcontrol_wait()  # the logits may come from the kernel before
        cute.arch.griddepcontrol_launch_dependents()
        end, columns = row_ends[row], logits.shape[1]
        if (end < 0) | (end > columns):
            Watch(record, Int64(0)).fail(row, columns, Uint32(end), 0)
        bits = score_bits(logits, self.fp32)[row, None]
        source = LogitsSource(bits, end, Uint32(1), self.fp32, THREADS, SCORES_HELD)
        stage_best(source, select, stage, survivors)
        staged = stage.stage
        for i in cutlass.range(tid, stage.words, THREADS):
            words[row, i] = Int32(staged[i])
