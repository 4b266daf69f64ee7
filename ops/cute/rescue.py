"""Round 2: saturated ranks push their local top-K, and the row is selected again.

:class:`RowRescue` is the code of a row, for the exchange and for ``topkx::topk_rescue``, whose kernel is
:class:`TopkRescue`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ..layouts import rescue_slots
from .block_select import BlockSelect
from .local_topk import stage_best
from .outputs import MergeSink, Outputs
from .peers import Peers
from .primitives import Divisor, SmemAllocator
from .rank_words import RankWords
from .row_words import ListSource, LogitsSource, WordStage, score_bits
from .shape import RowShape
from .wait import Watch


@dataclass(frozen=True)
class RowRescue:
    """Round 2 of the rows of a block.

    Attributes:
        peers: where lists are pushed.
        select: shared memory of the selections.
        stage: shared memory for a row of K candidates.
        from_logits: whether this rank's list is chosen from its logits; else the caller brought it.
        list_epoch: int32 ``[slots, capacity]``, times each list was used.
        watch: the time limit.
    """

    peers: Peers
    select: BlockSelect
    stage: WordStage
    from_logits: bool
    list_epoch: cute.Tensor
    watch: Watch

    @cute.jit
    def stage_list(self, own: LogitsSource | ListSource) -> None:
        """This rank's list into the stage: the best K by ascending position, or the caller's K in his order."""
        if const_expr(self.from_logits):
            stage_best(own, self.select, self.stage)
        else:
            stage_all(own, self.stage)

    @cute.jit
    def run(
        self,
        words: RankWords,
        own: LogitsSource | ListSource,
        saturated: Uint32,
        row: Int32,
        request: Int32 | None,
        out: Outputs,
    ) -> None:
        """Selects row ``row`` again; all threads of the block call it, with the same ``saturated``, not 0.

        Args:
            words: of round 1.
            own: where this rank's list comes from.
            saturated: ranks that push a list.
        """
        tid, _, _ = cute.arch.thread_idx()
        peers, shape, tags = self.peers, self.peers.shape, self.list_epoch
        second = words.with_lists(peers, row, saturated)
        cute.arch.sync_threads()  # all threads have read who is saturated from memory that selections share
        if second.is_saturated(peers.rank):
            self.stage_list(own)
            place = second.list_of(peers.rank)
            tag = Uint32(tags[place, row]) + 1
            peers.push(self.stage.stage, shape.topk, peers.list(place, row), tag, to_self=True)
        second.wait_lists(tags, row, self.watch)
        held = replace(second, held=True)
        if const_expr(not shape.rescues_held):
            self.merge(second, row, request, out)
        elif const_expr(rescue_slots(shape.topk, shape.local_topk) == 1):
            self.merge(held, row, request, out)
        elif cute.arch.popc(saturated) == 1:
            self.merge(held, row, request, out)
        else:
            self.merge(second, row, request, out)
        if tid < Int32(cute.arch.popc(saturated)):
            tags[tid, row] = tags[tid, row] + 1  # a barrier ago all threads had read it

    @cute.jit
    def merge(self, words: RankWords, row: Int32, request: Int32 | None, out: Outputs) -> None:
        """Selects the best K of round 2 and writes them."""
        ords = cute.make_rmem_tensor(words.items, Uint32)
        positions = cute.make_rmem_tensor(words.items, Uint32)
        words.fetch(ords, positions)
        topk = Int32(words.shape.topk)
        high, low = self.select.threshold(words, ords, positions, topk)
        sink = MergeSink.of_row(words, self.peers.rank, row, request, out)
        total, first = self.select.count(words, ords, positions, high, low, sink)
        self.select.write(words, ords, positions, high, low, first, sink)
        sink.pad(total)


@cute.jit
def stage_all(own: ListSource, stage: WordStage) -> None:
    """All K of the caller into the stage, each at its place; the stage can be read after this returns."""
    ords = cute.make_rmem_tensor(own.items, Uint32)
    positions = cute.make_rmem_tensor(own.items, Uint32)
    stage.clear()
    own.gather(ords, positions)
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(own.items):
        stage.put(ords[i] != 0, own.place(i), Int32(0), i, ords[i], positions[i])
    cute.arch.sync_threads()


class TopkRescue:
    """``topkx::topk_rescue``: round 2 after an all-gather and :class:`.select.TopkSelect`.

    Blocks take rows in ascending order, so the lowest row that any rank has not finished is being worked
    on by all ranks: as all blocks are resident, its lists arrive.

    Args:
        shape: of the merge, N < K.
    """

    def __init__(self, shape: RowShape) -> None:
        self.shape = shape

    @cute.jit
    def __call__(
        self,
        gathered: cute.Tensor,
        saturation: cute.Tensor,
        logits: cute.Tensor,
        row_ends: cute.Tensor,
        block_table: cute.Tensor | None,
        req_id: cute.Tensor | None,
        rows: cute.Tensor | None,
        valid: cute.Tensor | None,
        ids: cute.Tensor | None,
        list_epoch: cute.Tensor,
        bases: cute.Tensor,
        rank: Int32,
        interleave: tuple[Int32, Int32, Int32],
        block_size: tuple[Int32, Int32, Int32],
        block_stride: Int32,
        record: Int64,
        timeout_ns: Int64,
        blocks: tuple[Int32, Int32],
        stream: cuda.CUstream,
    ) -> None:
        """Launches ``blocks``, all of which must be resident, over the rows of ``saturation [T]``."""
        self.kernel(
            gathered, saturation, logits, row_ends, block_table, req_id, rows, valid, ids, list_epoch, bases,
            rank, interleave, block_size, block_stride, record, timeout_ns,
        ).launch(
            grid=[*blocks, 1],
            block=[self.shape.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        gathered: cute.Tensor,
        saturation: cute.Tensor,
        logits: cute.Tensor,
        row_ends: cute.Tensor,
        block_table: cute.Tensor | None,
        req_id: cute.Tensor | None,
        rows: cute.Tensor | None,
        valid: cute.Tensor | None,
        ids: cute.Tensor | None,
        list_epoch: cute.Tensor,
        bases: cute.Tensor,
        rank: Int32,
        interleave: tuple[Int32, Int32, Int32],
        block_size: tuple[Int32, Int32, Int32],
        block_stride: Int32,
        record: Int64,
        timeout_ns: Int64,
    ) -> None:
        first_row, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        shape = self.shape
        out = Outputs(ids, block_table, req_id, rows, valid, Divisor(*block_size), block_stride)
        smem = SmemAllocator()
        rescue = RowRescue(
            Peers(shape, bases, rank, list_epoch.shape[1]),
            BlockSelect.allocate(smem, shape.threads),
            WordStage.allocate(smem, shape.topk, shape.fp32, shape.threads),
            True,
            list_epoch,
            Watch(record, timeout_ns),
        )
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        bits = score_bits(logits, shape.fp32)
        for row in cutlass.range(first_row, saturation.shape[0], blocks):
            saturated = Uint32(saturation[row])
            if saturated != 0:
                words = RankWords.gathered(shape, gathered, row, Divisor(*interleave))
                own = LogitsSource.of_row(bits, row_ends, row, Uint32(1), shape)
                rescue.run(words, own, saturated, row, out.request(row), out)
                cute.arch.sync_threads()  # the next row uses the same shared memory
