"""``topkx::topk_select``: outputs and saturation from the gathered words of all ranks."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from .block_select import BlockSelect
from .outputs import MergeSink, Outputs
from .primitives import Divisor, SmemAllocator
from .rank_words import RankWords
from .shape import RowShape


class TopkSelect:
    """One block a row.

    Args:
        shape: of the merge.
    """

    def __init__(self, shape: RowShape) -> None:
        self.shape = shape

    @cute.jit
    def __call__(
        self,
        gathered: cute.Tensor,
        block_table: cute.Tensor | None,
        req_id: cute.Tensor | None,
        rows: cute.Tensor | None,
        valid: cute.Tensor | None,
        ids: cute.Tensor | None,
        saturation: cute.Tensor,
        rank: Int32,
        interleave: tuple[Int32, Int32, Int32],
        block_size: tuple[Int32, Int32, Int32],
        block_stride: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launches on ``gathered [W, T, words]``; each output is None or written (``ids [T, K]``, ...).

        ``interleave`` and ``block_size`` are :meth:`Divisor.arguments`.
        """
        self.kernel(
            gathered, block_table, req_id, rows, valid, ids, saturation, rank, interleave, block_size, block_stride
        ).launch(
            grid=[saturation.shape[0], 1, 1],
            block=[self.shape.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        gathered: cute.Tensor,
        block_table: cute.Tensor | None,
        req_id: cute.Tensor | None,
        rows: cute.Tensor | None,
        valid: cute.Tensor | None,
        ids: cute.Tensor | None,
        saturation: cute.Tensor,
        rank: Int32,
        interleave: tuple[Int32, Int32, Int32],
        block_size: tuple[Int32, Int32, Int32],
        block_stride: Int32,
    ) -> None:
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        shape = self.shape
        select = BlockSelect.allocate(SmemAllocator(), shape.threads)
        cute.arch.griddepcontrol_wait()  # the words come from the kernel before
        cute.arch.griddepcontrol_launch_dependents()
        out = Outputs(ids, block_table, req_id, rows, valid, Divisor(*block_size), block_stride)
        request = out.request(row)
        source = RankWords.gathered(shape, gathered, row, Divisor(*interleave))
        ords = cute.make_rmem_tensor(source.items, Uint32)
        positions = cute.make_rmem_tensor(source.items, Uint32)
        source.fetch(ords, positions)
        high, low = select.threshold(source, ords, positions, Int32(shape.topk))
        sink = MergeSink.of_row(source, rank, row, request, out)
        total, first = select.count(source, ords, positions, high, low, sink)
        select.write(source, ords, positions, high, low, first, sink)
        sink.pad(total)
        if tid == 0:
            if const_expr(shape.rescues):
                saturation[row] = Int32(sink.saturated())
            else:
                saturation[row] = Int32(0)
