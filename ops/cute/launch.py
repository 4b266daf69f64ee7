"""The host functions of the ``topkx::`` operators on CUDA: outputs, arguments, launch.

Each ``prepare_*`` allots outputs and finds the kernel, and returns a :class:`Launch`; running it enqueues one
kernel on torch's current stream. Callers have checked shapes, dtypes and limits; see ``ops/checks.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

import torch

from ..errors import TopkxError
from ..layouts import FP32, layout_of, packed_row_words
from ..spec import KvMap, Merged, MergeSpec, empty_outputs
from . import compile as variants
from .cache import compiled
from .exchange import DeviceExchange
from .primitives import Divisor
from .record import row_end_record
from .shape import RowShape

Result = TypeVar("Result")
Tensor = torch.Tensor
divisor = cache(Divisor.arguments)


@dataclass(frozen=True)
class Launch(Generic[Result]):
    """A kernel that is ready to be enqueued, and what it will have written.

    Attributes:
        kernel: None when there is nothing to do.
        exchange: whose time limit it runs under, or None.
    """

    kernel: Callable[..., None] | None
    arguments: tuple
    result: Result
    exchange: DeviceExchange | None = None

    def run(self) -> Result:
        if self.kernel is None:
            return self.result
        if self.exchange is None:
            self.kernel(*self.arguments)
        else:
            self.exchange.check_failure()
            with self.exchange.explained():
                self.kernel(*self.arguments)
        return self.result


def local_topk_words(logits: Tensor, row_ends: Tensor, n: int) -> Tensor:
    """Words int32 ``[T, packed_row_words(n)]`` of the best ``n`` of each row, by ascending position.

    A row end outside 0..L ends the CUDA context; the next call raises ``TopkxError`` that names it.
    """
    layout = layout_of(logits.dtype)
    words = torch.empty(logits.shape[0], packed_row_words(n, layout.name), dtype=torch.int32, device=logits.device)
    if words.shape[0] == 0:
        return words
    record = row_end_record(logits.device)
    record.check()
    kernel = compiled(variants.LocalTopk(n, layout is FP32), logits.device)
    try:
        kernel(_unit("logits", logits), row_ends, words, record.address)
    except RuntimeError:
        record.check()
        raise
    return words


def topk_select(gathered: Tensor, spec: MergeSpec, kv: KvMap | None, emit_ids: bool) -> tuple[Merged, Tensor]:
    """Outputs and saturation int32 ``[T]`` of gathered words ``[W, T, words]``."""
    rows, device = gathered.shape[1], gathered.device
    out = empty_outputs(rows, spec.topk, kv is not None, emit_ids, device)
    saturation = torch.empty(rows, dtype=torch.int32, device=device)
    if rows:
        kernel = compiled(variants.Select(_shape(spec), kv is not None, emit_ids), device)
        kernel(
            _aligned(gathered), *_outputs(out, kv, emit_ids), saturation, spec.rank, divisor(spec.interleave),
            *_blocks(kv),
        )  # fmt: skip
    return out, saturation


def topk_rescue(
    exchange: DeviceExchange,
    gathered: Tensor,
    saturation: Tensor,
    out: Merged,
    logits: Tensor,
    row_ends: Tensor,
    spec: MergeSpec,
    kv: KvMap | None,
) -> None:
    """Round 2 of the rows with a saturated rank, into ``out``."""
    prepare_rescue(exchange, gathered, saturation, out, logits, row_ends, spec, kv).run()


def prepare_rescue(
    exchange: DeviceExchange,
    gathered: Tensor,
    saturation: Tensor,
    out: Merged,
    logits: Tensor,
    row_ends: Tensor,
    spec: MergeSpec,
    kv: KvMap | None,
) -> Launch[Merged]:
    rows, emit_ids = gathered.shape[1], out.ids.shape[0] != 0
    if rows == 0:
        return Launch(None, (), out)
    kernel = compiled(variants.Rescue(_shape(spec), kv is not None, emit_ids), logits.device)
    arguments = (
        _aligned(gathered), saturation.contiguous(), _unit("logits", logits), row_ends,
        *_outputs(out, kv, emit_ids), exchange.list_epoch, exchange.bases, exchange.rank,
        divisor(spec.interleave), *_blocks(kv), *_watch(exchange, rows),
    )  # fmt: skip
    return Launch(kernel, arguments, out, exchange)


def exchange_merge(
    exchange: DeviceExchange,
    words: Tensor,
    logits: Tensor,
    row_ends: Tensor,
    spec: MergeSpec,
    kv: KvMap | None,
    emit_ids: bool,
) -> Merged:
    """Pushes ``words [T, words]``, merges what all ranks pushed; rescues read ``logits[:, :row_ends]`` again."""
    return prepare_exchange(exchange, words, logits, row_ends, spec, kv, emit_ids).run()


def prepare_exchange(
    exchange: DeviceExchange,
    words: Tensor,
    logits: Tensor,
    row_ends: Tensor,
    spec: MergeSpec,
    kv: KvMap | None,
    emit_ids: bool,
) -> Launch[Merged]:
    rows = words.shape[0]
    out = empty_outputs(rows, spec.topk, kv is not None, emit_ids, words.device)
    if rows == 0:
        return Launch(None, (), out)
    shape = _shape(spec)
    kernel = compiled(variants.WordsMerge(shape, kv is not None, emit_ids), words.device)
    rescue = (_unit("logits", logits), row_ends) if shape.rescues else (None, None)
    arguments = (
        words.contiguous(), None, None, *rescue, *_outputs(out, kv, emit_ids), *_memory(exchange), rows,
        exchange.rank, divisor(spec.interleave), *_blocks(kv), *_watch(exchange, rows),
    )  # fmt: skip
    return Launch(kernel, arguments, out, exchange)


def merge_dcp_topk_(
    exchange: DeviceExchange, logits: Tensor, topk_indices: Tensor, row_starts: Tensor | None, spec: MergeSpec
) -> None:
    """Replaces the local top-K ``topk_indices [T, K]`` by the global one."""
    prepare_merge_dcp_topk(exchange, logits, topk_indices, row_starts, spec).run()


def prepare_merge_dcp_topk(
    exchange: DeviceExchange, logits: Tensor, topk_indices: Tensor, row_starts: Tensor | None, spec: MergeSpec
) -> Launch[Tensor]:
    rows = topk_indices.shape[0]
    if rows == 0:
        return Launch(None, (), topk_indices)
    shape = _shape(spec)
    kernel = compiled(variants.ListMerge(shape, row_starts is not None), logits.device)
    parts = max(1, min(shape.list_parts, exchange.max_blocks // rows))
    arguments = (
        None, _unit("topk_indices", topk_indices), row_starts, _unit("logits", logits), None,
        None, None, None, None, None, *_memory(exchange), rows,
        exchange.rank, divisor(spec.interleave), *_blocks(None), *_watch(exchange, rows, parts),
    )  # fmt: skip
    return Launch(kernel, arguments, topk_indices, exchange)


def _shape(spec: MergeSpec) -> RowShape:
    return RowShape(spec.world_size, spec.topk, spec.local_topk, spec.layout is FP32)


def _outputs(out: Merged, kv: KvMap | None, emit_ids: bool) -> tuple[Tensor | None, ...]:
    """Block table, request ids, rows, valid, ids: as the kernels take them."""
    ids = out.ids if emit_ids else None
    if kv is None:
        return None, None, None, None, ids
    return _unit("block_table", kv.block_table), kv.req_id, out.rows, out.valid, ids


def _blocks(kv: KvMap | None) -> tuple:
    return (divisor(1), 1) if kv is None else (divisor(kv.block_size), kv.block_stride)


def _memory(exchange: DeviceExchange) -> tuple[Tensor | None, ...]:
    """Epochs, list epochs, the ranks' buffers."""
    return exchange.epoch, exchange.list_epoch if exchange.rescue_slots else None, exchange.bases


def _watch(exchange: DeviceExchange, rows: int, parts: int = 1) -> tuple[int, int, tuple[int, int]]:
    """Failure record, time limit, and blocks over the rows and for each.

    All blocks are resident, so that none waits for one that cannot start.
    """
    return exchange.record.address, exchange.timeout_ns, (min(rows, exchange.max_blocks), parts)


def _unit(name: str, tensor: Tensor) -> Tensor:
    """``tensor [rows, columns]``, whose columns must be neighbours."""
    if tensor.stride(1) == 1:
        return tensor
    if tensor.shape[1] > 1:
        raise TopkxError(f"{name} has strides {tensor.stride()}: columns must be contiguous, call .contiguous()")
    return tensor.as_strided(tensor.shape, (tensor.stride(0), 1))


def _aligned(gathered: Tensor) -> Tensor:
    """``gathered [W, T, words]``, copied when a row is not 16-byte aligned memory."""
    fits = gathered.stride(2) == 1 and gathered.stride(0) % 4 == 0 and gathered.stride(1) % 4 == 0
    return gathered if fits and gathered.data_ptr() % 16 == 0 else gathered.contiguous()
