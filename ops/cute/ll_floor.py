"""The LL floor: what an exchange costs when nothing is done with the words. ``vllm-topkx bench`` measures it.

The push of ``topkx::exchange_merge`` and a wait for all that the ranks push, with its slots, epochs, blocks and
threads, and no selection: no merge of the same words over this protocol can take less.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint32, const_expr

from ..layouts import FP32
from ..spec import MergeSpec
from . import compile as variants
from .cache import compiled
from .exchange import DeviceExchange
from .launch import Launch, _watch
from .peers import Peers
from .row_words import row_words
from .shape import IN_FLIGHT, RowShape
from .wait import Watch, nothing_yet, wait_tagged


class LlFloor:
    """Pushes this rank's words of every row to all ranks, and waits for theirs.

    Args:
        shape: of the merge whose floor it is.
    """

    def __init__(self, shape: RowShape) -> None:
        self.shape = shape

    @cute.jit
    def __call__(
        self,
        words: cute.Tensor,
        epochs: cute.Tensor,
        bases: cute.Tensor,
        count: Int32,
        rank: Int32,
        record: Int64,
        timeout_ns: Int64,
        blocks: tuple[Int32, Int32],
        stream: cuda.CUstream,
    ) -> None:
        """Launches ``blocks`` over ``count`` rows of ``words [T, words]``; all must be resident at once.

        ``epochs [capacity]`` and ``bases [W]`` are the exchange's.
        """
        self.kernel(words, epochs, bases, count, rank, record, timeout_ns).launch(
            grid=[*blocks, 1],
            block=[self.shape.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        words: cute.Tensor,
        epochs: cute.Tensor,
        bases: cute.Tensor,
        count: Int32,
        rank: Int32,
        record: Int64,
        timeout_ns: Int64,
    ) -> None:
        tid, _, _ = cute.arch.thread_idx()
        first_row, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        shape, watch = self.shape, Watch(record, timeout_ns)
        peers = Peers(shape, bases, rank, epochs.shape[0])
        # As in the merge: nothing is stored before the grid of the call before has completed.
        cute.arch.griddepcontrol_wait()

        for row in cutlass.range(first_row, count, blocks):
            epoch = Uint32(epochs[row]) + 1
            peers.push(words[row, None], shape.local_topk, peers.slot(epoch, rank, row), epoch)
        cute.arch.griddepcontrol_launch_dependents()

        for row in cutlass.range(first_row, count, blocks):
            epoch = Uint32(epochs[row]) + 1
            self.wait(bases[rank], peers.slot(epoch, Int32(0), row), peers.slot_stride, rank, epoch, row, watch)
            cute.arch.sync_threads()  # all threads have read the row's epoch
            if tid == 0:
                epochs[row] = Int32(epoch)

    @cute.jit
    def wait(
        self, memory: Int64, words: Uint32, stride: Uint32, rank: Int32, epoch: Uint32, row: Int32, watch: Watch
    ) -> None:
        """The block waits for the pairs that all ranks but this one store for a row; each thread for its own.

        ``words`` is where rank 0's begin in ``memory``, and ``stride`` leads to the next rank's, in halves.
        """
        tid, _, _ = cute.arch.thread_idx()
        shape = self.shape
        pairs = const_expr(row_words(shape.local_topk, shape.fp32) // 2)
        total = const_expr((shape.world_size - 1) * pairs)
        # As many at once as the merge waits for, so that their latencies overlap.
        at_once = const_expr(min(IN_FLIGHT, -(-total // shape.threads)))
        halves = cute.make_rmem_tensor(4 * at_once, Uint32)
        for first in cutlass.range(tid, total, at_once * shape.threads, unroll=1):
            places, ranks = [], []
            for i in cutlass.range_constexpr(at_once):
                # Past the end the last pair is waited for again: that costs less than a branch.
                index = cutlass.min(first + i * shape.threads, Int32(total - 1))
                source = index // pairs
                pair = index - source * pairs
                source = source + 1 if source >= rank else source
                places += [words + Uint32(source) * stride + Uint32(2 * pair)]
                ranks += [source]
            nothing_yet(halves, epoch)
            wait_tagged(memory, places, ranks, halves, True, epoch, row, 1, watch)


@dataclass(frozen=True)
class Floor:
    """The variant; arguments of :class:`LlFloor`."""

    shape: RowShape

    def build(self, options: str) -> variants.Kernel:
        rows, shape = cute.sym_int(), self.shape
        words = variants._tensor(Int32, rows, row_words(shape.local_topk, shape.fp32), align=16)
        epochs, _, bases = variants._exchange(shape)
        launch = (Int32(1), Int32(0), Int64(0), Int64(0), variants._BLOCKS)
        return variants._compile(options, LlFloor(shape), words, epochs, bases, *launch)


def prepare_floor(exchange: DeviceExchange, words: torch.Tensor, spec: MergeSpec) -> Launch[None]:
    """One call of the floor on ``words [T, words]``, ready to be enqueued; a call of ``exchange`` like any other."""
    rows = words.shape[0]
    if rows == 0:
        return Launch(None, (), None)
    shape = RowShape(spec.world_size, spec.topk, spec.local_topk, spec.layout is FP32)
    arguments = (
        words.contiguous(), exchange.epoch, exchange.bases, rows, exchange.rank, *_watch(exchange, rows),
    )  # fmt: skip
    return Launch(compiled(Floor(shape), words.device), arguments, None, exchange)
