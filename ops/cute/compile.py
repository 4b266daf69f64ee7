"""The kernel variants, and how each is compiled: what it specialises on, and the shapes that stay dynamic.

Tensors are described to the compiler, not made, so that compiling needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .device import require_dsl
from .exchange_merge import ExchangeMerge
from .local_topk import LocalTopkWords
from .rescue import TopkRescue
from .row_words import row_words
from .select import TopkSelect
from .shape import RowShape

Kernel = Callable[..., None]
_DIVISOR = (Int32(1), Int32(1), Int32(31))
_BLOCKS = (Int32(1), Int32(1))


@dataclass(frozen=True)
class LocalTopk:
    """``topkx::local_topk_words``: ``(logits, row_ends, words, record)``."""

    n: int
    fp32: bool

    def build(self, options: str) -> Kernel:
        rows = cute.sym_int()
        words = _tensor(Int32, rows, row_words(self.n, self.fp32), align=16)
        kernel = LocalTopkWords(self.n, self.fp32)
        return _compile(options, kernel, _logits(rows, self.fp32), _column(rows), words, Int64(0))


@dataclass(frozen=True)
class Select:
    """``topkx::topk_select``; arguments of :class:`.select.TopkSelect`."""

    shape: RowShape
    with_rows: bool
    emit_ids: bool

    def build(self, options: str) -> Kernel:
        rows, shape = cute.sym_int(), self.shape
        outputs = _outputs(rows, shape, self.with_rows, self.emit_ids)
        return _compile(
            options, TopkSelect(shape), _gathered(rows, shape), *outputs, _tensor(Int32, rows), Int32(0),
            _DIVISOR, _DIVISOR, Int32(1),
        )  # fmt: skip


@dataclass(frozen=True)
class Rescue:
    """``topkx::topk_rescue``; arguments of :class:`.rescue.TopkRescue`."""

    shape: RowShape
    with_rows: bool
    emit_ids: bool

    def build(self, options: str) -> Kernel:
        rows, shape = cute.sym_int(), self.shape
        _, list_epoch, bases = _exchange(shape)
        return _compile(
            options, TopkRescue(shape), _gathered(rows, shape), _tensor(Int32, rows), _logits(rows, shape.fp32),
            _column(rows), *_outputs(rows, shape, self.with_rows, self.emit_ids), list_epoch, bases, Int32(0),
            _DIVISOR, _DIVISOR, Int32(1), Int64(0), Int64(0), _BLOCKS,
        )  # fmt: skip


@dataclass(frozen=True)
class WordsMerge:
    """``topkx::exchange_merge``; arguments of :class:`.exchange_merge.ExchangeMerge`."""

    shape: RowShape
    with_rows: bool
    emit_ids: bool

    def build(self, options: str) -> Kernel:
        rows, shape = cute.sym_int(), self.shape
        words = _tensor(Int32, rows, row_words(shape.local_topk, shape.fp32), align=16)
        rescue = (_logits(rows, shape.fp32), _column(rows)) if shape.rescues else (None, None)
        return _compile(
            options, ExchangeMerge(shape, from_words=True), words, None, None, *rescue,
            *_outputs(rows, shape, self.with_rows, self.emit_ids), *_exchange(shape), Int32(1), Int32(0),
            _DIVISOR, _DIVISOR, Int32(1), Int64(0), Int64(0), _BLOCKS,
        )  # fmt: skip


@dataclass(frozen=True)
class ListMerge:
    """``topkx::merge_dcp_topk_``; arguments of :class:`.exchange_merge.ExchangeMerge`."""

    shape: RowShape
    with_starts: bool

    def build(self, options: str) -> Kernel:
        rows, shape = cute.sym_int(), self.shape
        indices = _rows_of(Int32, rows, shape.topk)
        starts = _column(rows) if self.with_starts else None
        return _compile(
            options, ExchangeMerge(shape, from_words=False), None, indices, starts, _logits(rows, shape.fp32), None,
            None, None, None, None, None, *_exchange(shape), Int32(1), Int32(0),
            _DIVISOR, _DIVISOR, Int32(1), Int64(0), Int64(0), _BLOCKS,
        )  # fmt: skip


def _compile(options: str, kernel: object, *arguments: object) -> Kernel:
    require_dsl()
    # The stream is torch's current one, handed over by TVM-FFI with the tensors.
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *arguments, stream, options=f"--enable-tvm-ffi {options}")


def _tensor(dtype: type, *shape: object, align: int = 4) -> cute.Tensor:
    """Contiguous."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return cute.runtime.make_fake_tensor(dtype, shape, stride=tuple(strides), assumed_align=align)


def _rows_of(dtype: type, rows: object, columns: object) -> cute.Tensor:
    """``[rows, columns]`` with any stride between rows."""
    return cute.runtime.make_fake_tensor(dtype, (rows, columns), stride=(cute.sym_int64(), 1))


def _column(rows: object) -> cute.Tensor:
    """Int32 ``[rows]`` with any stride."""
    return cute.runtime.make_fake_tensor(Int32, (rows,), stride=(cute.sym_int64(),))


def _logits(rows: object, fp32: bool) -> cute.Tensor:
    return _rows_of(cutlass.Float32 if fp32 else cutlass.BFloat16, rows, cute.sym_int())


def _gathered(rows: object, shape: RowShape) -> cute.Tensor:
    strides = (cute.sym_int64(divisibility=4), cute.sym_int64(divisibility=4), 1)
    words = row_words(shape.local_topk, shape.fp32)
    return cute.runtime.make_fake_tensor(Int32, (shape.world_size, rows, words), stride=strides, assumed_align=16)


def _outputs(rows: object, shape: RowShape, with_rows: bool, emit_ids: bool) -> tuple[cute.Tensor | None, ...]:
    """Block table, request ids, rows, valid, ids."""
    kv = (None, None, None, None)
    if with_rows:
        table = _rows_of(Int32, cute.sym_int(), cute.sym_int())
        kv = (table, _column(rows), _tensor(Int32, rows, shape.topk), _tensor(Int32, rows))
    return *kv, _tensor(Int32, rows, shape.topk) if emit_ids else None


def _exchange(shape: RowShape) -> tuple[cute.Tensor | None, ...]:
    """Epochs, list epochs, and the ranks' buffers."""
    capacity = cute.sym_int()
    lists = None
    if shape.rescues:
        lists = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), capacity), stride=(cute.sym_int64(), 1))
    return _tensor(Int32, capacity), lists, _tensor(Int64, shape.world_size, align=8)
