"""A kernel behind a merge that reads its ids the moment programmatic dependent launch lets it."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from vllm_topkx.ops.cute import compile as variants
from vllm_topkx.ops.cute.primitives import global_timer

THREADS = 256


class EarlyReader:
    """Copies ids, and notes when it began and when it was let."""

    @cute.jit
    def __call__(self, ids: cute.Tensor, copy: cute.Tensor, times: cute.Tensor, stream: cuda.CUstream) -> None:
        """``ids``, ``copy`` int32 ``[T, K]``; ``times`` int64 ``[T, 2]``, nanoseconds."""
        self.kernel(ids, copy, times).launch(
            grid=[cute.size(ids, mode=[0]), 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, ids: cute.Tensor, copy: cute.Tensor, times: cute.Tensor) -> None:
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        began = global_timer()
        cute.arch.griddepcontrol_wait()
        for k in cutlass.range(tid, cute.size(ids, mode=[1]), THREADS, unroll=1):
            copy[row, k] = ids[row, k]
        if tid == 0:
            times[row, 0] = began
            times[row, 1] = global_timer()


@dataclass(frozen=True)
class Reader:
    """The variant for rows of ``topk`` ids."""

    topk: int

    def build(self, options: str) -> variants.Kernel:
        rows = cute.sym_int()
        ids, copy = (variants._tensor(Int32, rows, self.topk) for _ in range(2))
        return variants._compile(options, EarlyReader(), ids, copy, variants._tensor(Int64, rows, 2, align=8))
