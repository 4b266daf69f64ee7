"""``topkx::exchange_merge`` and ``topkx::merge_dcp_topk_``: push and merge in one launch."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from .block_select import BlockSelect
from .outputs import MergeSink, Outputs
from .peers import Peers
from .primitives import WARP, Divisor, SmemAllocator, exchange_word, store_words
from .rank_words import RankWords
from .record import OVERLAP
from .rescue import RowRescue, stage_all
from .row_words import ListSource, LogitsSource, WordStage, row_words, score_bits
from .shape import RowShape
from .wait import Watch


class ExchangeMerge:
    """Pushes this rank's candidates of every row to all ranks, then merges what they pushed.

    Few rows of whole lists are gathered and pushed by several blocks each: a block alone takes as long to gather
    2048 scores, 32 bytes of memory each, as for all the rest of the push.

    It cannot deadlock. All blocks of the launch are resident, and each pushes all its rows before it waits
    for any; a push waits for nothing, so every word of round 1 arrives. Blocks merge their rows in ascending
    order, so of the rows that some rank has not finished, the lowest is being merged by all: its words are
    there, hence all ranks that are saturated in it push their lists, and round 2 ends.

    Args:
        shape: of the merge.
        from_words: the candidates come as words (``local_topk_words``), else as a local top-K (vLLM).
    """

    def __init__(self, shape: RowShape, from_words: bool) -> None:
        self.shape, self.from_words = shape, from_words

    @cute.jit
    def __call__(
        self,
        words: cute.Tensor | None,
        topk_indices: cute.Tensor | None,
        row_starts: cute.Tensor | None,
        logits: cute.Tensor | None,
        row_ends: cute.Tensor | None,
        block_table: cute.Tensor | None,
        req_id: cute.Tensor | None,
        rows: cute.Tensor | None,
        valid: cute.Tensor | None,
        ids: cute.Tensor | None,
        epochs: cute.Tensor,
        list_epoch: cute.Tensor | None,
        bases: cute.Tensor,
        count: Int32,
        rank: Int32,
        interleave: tuple[Int32, Int32, Int32],
        block_size: tuple[Int32, Int32, Int32],
        block_stride: Int32,
        record: Int64,
        timeout_ns: Int64,
        blocks: tuple[Int32, Int32],
        stream: cuda.CUstream,
    ) -> None:
        """Launches ``blocks`` over ``count`` rows, and for each; all of them must be resident at once.

        From words: ``words [T, words]``, and with N < K ``logits``, ``row_ends``. From a local top-K:
        ``topk_indices [T, K]`` (also written: ``ids`` is then None), ``logits``, ``row_starts`` or None.
        ``epochs [capacity]``, ``list_epoch [slots, capacity]`` and ``bases [W]`` are the exchange's.
        """
        self.kernel(
            words, topk_indices, row_starts, logits, row_ends, block_table, req_id, rows, valid, ids, epochs,
            list_epoch, bases, count, rank, interleave, block_size, block_stride, record, timeout_ns,
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
        words: cute.Tensor | None,
        topk_indices: cute.Tensor | None,
        row_starts: cute.Tensor | None,
        logits: cute.Tensor | None,
        row_ends: cute.Tensor | None,
        block_table: cute.Tensor | None,
        req_id: cute.Tensor | None,
        rows: cute.Tensor | None,
        valid: cute.Tensor | None,
        ids: cute.Tensor | None,
        epochs: cute.Tensor,
        list_epoch: cute.Tensor | None,
        bases: cute.Tensor,
        count: Int32,
        rank: Int32,
        interleave: tuple[Int32, Int32, Int32],
        block_size: tuple[Int32, Int32, Int32],
        block_stride: Int32,
        record: Int64,
        timeout_ns: Int64,
    ) -> None:
        tid, _, _ = cute.arch.thread_idx()
        first_row, part, _ = cute.arch.block_idx()
        blocks, parts, _ = cute.arch.grid_dim()
        shape, watch = self.shape, Watch(record, timeout_ns)
        peers = Peers(shape, bases, rank, epochs.shape[0])
        out_ids = ids if const_expr(self.from_words) else topk_indices
        out = Outputs(out_ids, block_table, req_id, rows, valid, Divisor(*block_size), block_stride)
        smem = SmemAllocator()
        select = BlockSelect.allocate(smem, shape.threads)
        stage, rescue, bits = None, None, None
        if const_expr(shape.rescues or not self.from_words):
            bits = score_bits(logits, shape.fp32)
        if const_expr(shape.rescues or not (self.from_words or self.direct)):
            stage = WordStage.allocate(smem, shape.topk, shape.fp32, shape.threads)
        if const_expr(shape.rescues):
            rescue = RowRescue(peers, select, stage, self.from_words, list_epoch, watch)
        # Nothing is stored before the grid that merged the call before has completed: its slots are then free.
        cute.arch.griddepcontrol_wait()

        for row in cutlass.range(first_row, count, blocks):
            epoch = Uint32(epochs[row]) + 1
            place = peers.slot(epoch, rank, row)
            if const_expr(self.from_words):
                peers.push(words[row, None], shape.local_topk, place, epoch)
            else:
                own = self.own_list(bits, topk_indices, row_starts, row)
                kept = peers.own_words(epoch, row)
                if const_expr(not self.direct):
                    self.push_list(own, peers, place, epoch, kept, select, stage)
                elif const_expr(self.shared):
                    self.push_part(own, peers, place, epoch, kept, part, parts)
                else:
                    self.push_whole(own, peers, place, epoch, kept)
        cute.arch.griddepcontrol_launch_dependents()

        if const_expr(self.shared):  # one block merges a row: it has waited for all parts, which have read the epoch
            first_row = first_row if part == 0 else count
        for row in cutlass.range(first_row, count, blocks):
            epoch = Uint32(epochs[row]) + 1
            request = out.request(row)
            if const_expr(self.from_words):
                own_words = words[row, None].iterator.toint()
            else:
                own_words = peers.own_words(epoch, row)
            own_tagged = parts > 1 if const_expr(self.shared) else False
            source = RankWords.slots(peers, epoch, row, Divisor(*interleave), own_words, own_tagged)
            ords = cute.make_rmem_tensor(source.items, Uint32)
            positions = cute.make_rmem_tensor(source.items, Uint32)
            source.wait(ords, positions, epoch, row, watch)
            high, low = select.threshold(source, ords, positions, Int32(shape.topk))
            before = Int32(epoch - 1)
            if tid == 0:  # a barrier ago all threads had read the epoch
                before = exchange_word(epochs.iterator.toint() + Int64(row) * 4, Int32(epoch))
            sink = MergeSink.of_row(source, rank, row, request, out)
            total, first = select.count(source, ords, positions, high, low, sink)
            if const_expr(shape.rescues):
                saturated = sink.saturated()
                if saturated == 0:
                    select.write(source, ords, positions, high, low, first, sink)
                    sink.pad(total)
                else:
                    if const_expr(self.from_words):
                        # A score below the threshold of round 1 is below that of round 2.
                        own = LogitsSource.of_row(bits, row_ends, row, high, shape)
                    else:
                        own = self.own_list(bits, topk_indices, row_starts, row)
                    rescue.run(source, own, saturated, row, request, out)
            else:
                select.write(source, ords, positions, high, low, first, sink)
                sink.pad(total)
            if before != Int32(epoch - 1):  # two launches on one lane took the same epoch, and mixed their words
                watch.fail(row, rank, epoch, OVERLAP)
            cute.arch.sync_threads()  # the next row uses the same shared memory

    def own_list(
        self, bits: cute.Tensor, topk_indices: cute.Tensor, row_starts: cute.Tensor | None, row: Int32
    ) -> ListSource:
        start = Int32(0) if row_starts is None else row_starts[row]
        shape = self.shape
        return ListSource(bits[row, None], topk_indices[row, None], start, shape.topk, shape.fp32, shape.threads)

    @cute.jit
    def push_list(
        self,
        own: ListSource,
        peers: Peers,
        place: Uint32,
        epoch: Uint32,
        kept: Int64,
        select: BlockSelect,
        stage: WordStage | None,
    ) -> None:
        """Pushes the best N of the caller's K, in his order, and keeps them at ``kept``. Ends with a barrier."""
        ords = cute.make_rmem_tensor(own.items, Uint32)
        positions = cute.make_rmem_tensor(own.items, Uint32)
        n = const_expr(self.shape.local_topk)
        if const_expr(self.shape.rescues):
            best = stage.limited_to(n)
            best.clear()
            own.gather(ords, positions)
            high, low = select.threshold(own, ords, positions, Int32(n))
            _, first = select.count(own, ords, positions, high, low, best)
            select.write(own, ords, positions, high, low, first, best)
            cute.arch.sync_threads()
        else:
            stage_all(own, stage)
        peers.push(stage.stage, n, place, epoch)
        peers.keep(stage.stage, n, kept)
        cute.arch.sync_threads()  # the next row uses the same stage; and what is kept can be read

    @property
    def direct(self) -> bool:
        """Whether a list is pushed as it is gathered: all of it, and a candidate is a pair."""
        return not self.shape.rescues and self.shape.fp32

    @property
    def shared(self) -> bool:
        """Whether blocks can share the push of a list."""
        return not self.from_words and self.shape.list_parts > 1

    @cute.jit
    def push_part(
        self, own: ListSource, peers: Peers, place: Uint32, epoch: Uint32, kept: Int64, part: Int32, parts: Int32
    ) -> None:
        """Pushes part ``part`` of the caller's K to all ranks, this one, too; when there is one, as a whole."""
        if parts > 1:
            tid, _, _ = cute.arch.thread_idx()
            pairs = const_expr(row_words(own.topk, True) // 2)
            for pair in cutlass.range(part * own.threads + tid, pairs, parts * own.threads, unroll=1):
                peers.store(pair, WARP, pairs, self.pairs_of(own, pair, 1), place, epoch, True)
        else:
            self.push_whole(own, peers, place, epoch, kept)

    @cute.jit
    def push_whole(self, own: ListSource, peers: Peers, place: Uint32, epoch: Uint32, kept: Int64) -> None:
        """Pushes the caller's K and keeps them at ``kept``. Ends with a barrier.

        Candidate ``k`` is pair ``k``; the row is padded to an even number of pairs.
        """
        pairs = const_expr(row_words(own.topk, True) // 2)
        loaded = self.pairs_of(own, own.place(0), own.items)
        peers.store(own.place(0), WARP, pairs, loaded, place, epoch, False)
        for i in cutlass.range_constexpr(own.items):
            if own.place(i) < pairs:
                store_words(kept + Int64(own.place(i)) * 8, loaded[2 * i], loaded[2 * i + 1])
        cute.arch.sync_threads()  # what is kept can be read

    @cute.jit
    def pairs_of(self, own: ListSource, first: Int32, items: cutlass.Constexpr[int]) -> cute.Tensor:
        """The words of ``items`` candidates of the list: ``first``, and every 32nd from there."""
        ords = cute.make_rmem_tensor(items, Uint32)
        positions = cute.make_rmem_tensor(items, Uint32)
        own.gather_from(first, ords, positions)
        loaded = cute.make_rmem_tensor(2 * items, Uint32)
        for i in cutlass.range_constexpr(items):
            loaded[2 * i] = ords[i]
            loaded[2 * i + 1] = ~positions[i] if ords[i] != 0 else Uint32(0)
        return loaded
