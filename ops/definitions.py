"""The ``topkx::`` operators: schema, fake and real implementation side by side.

A fake and the real implementation of an op begin with the same checks, so that a bad call fails with the
same words at trace time and at run time.

Ops that talk to peers are impure twice over, as their epochs are state that no argument shows: their
schema is mutable (``order``), and they are marked for FX. So no compiler drops an unused one or merges
two. ``order`` is a tensor that every exchange of a graph names as mutated, though none writes it: a
compiler must then keep their order. The passes of :mod:`vllm_topkx.fx_passes` add it.
"""

from __future__ import annotations

import torch
from torch.fx.node import has_side_effect

from . import checks
from .exchange import TopkExchange, require_exchange
from .layouts import Layout, packed_row_words
from .spec import KvMap, Merged, MergeSpec, empty_outputs

Tensor = torch.Tensor
Outputs = tuple[Tensor, Tensor, Tensor]

_lib = torch.library.Library("topkx", "DEF")
_KV = "Tensor? block_table=None, Tensor? req_id=None, int block_size=1, int block_stride=1"


def _define(name: str, schema: str, fake, cpu, cuda, communicates: bool = False) -> None:
    _lib.define(f"{name}{schema}", tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    _lib.impl(name, cpu, "CPU")
    _lib.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"topkx::{name}", fake, lib=_lib)
    if communicates:
        packet = getattr(torch.ops.topkx, name)
        has_side_effect(packet)  # what a Dynamo graph calls
        has_side_effect(packet.default)  # what later graphs call


def _kv_map(block_table: Tensor | None, req_id: Tensor | None, block_size: int, block_stride: int) -> KvMap | None:
    if block_table is None or req_id is None:
        return None
    return KvMap(block_table, req_id, block_size, block_stride)


# local_topk_words: logits, row ends -> words of the local top-N


def _check_local_topk_words(logits: Tensor, row_ends: Tensor, local_topk: int) -> Layout:
    layout = checks.check_logits(logits, interleave=1, world_size=1)
    checks.check_topk(checks.MAX_TOPK, local_topk)
    checks.check_row_ends(logits, row_ends)
    return layout


def _local_topk_words_fake(logits: Tensor, row_ends: Tensor, local_topk: int) -> Tensor:
    layout = _check_local_topk_words(logits, row_ends, local_topk)
    return logits.new_empty((logits.shape[0], packed_row_words(local_topk, layout.name)), dtype=torch.int32)


def _local_topk_words_cpu(logits: Tensor, row_ends: Tensor, local_topk: int) -> Tensor:
    from .cpu.select import local_topk_words

    _check_local_topk_words(logits, row_ends, local_topk)
    return local_topk_words(logits, row_ends, local_topk)


def _local_topk_words_cuda(logits: Tensor, row_ends: Tensor, local_topk: int) -> Tensor:
    from .cute.launch import local_topk_words

    _check_local_topk_words(logits, row_ends, local_topk)
    return local_topk_words(logits, row_ends, local_topk)


_define(
    "local_topk_words",
    "(Tensor logits, Tensor row_ends, int local_topk) -> Tensor",
    _local_topk_words_fake,
    _local_topk_words_cpu,
    _local_topk_words_cuda,
)


# topk_select: gathered words of all ranks -> rows, valid, ids, saturation word


def _check_topk_select(
    gathered: Tensor,
    rank: int,
    topk: int,
    local_topk: int,
    interleave: int,
    layout: str,
    block_table: Tensor | None = None,
    req_id: Tensor | None = None,
    block_size: int = 1,
    block_stride: int = 1,
    emit_ids: bool = True,
) -> tuple[MergeSpec, KvMap | None]:
    found = checks.check_select(gathered, rank, topk, local_topk, interleave, layout)
    rows, device = gathered.shape[1], gathered.device
    checks.check_kv_rows(rows, interleave, block_table, req_id, block_size, block_stride, device)
    spec = MergeSpec(rank, gathered.shape[0], topk, local_topk, interleave, found)
    return spec, _kv_map(block_table, req_id, block_size, block_stride)


def _topk_select_fake(gathered: Tensor, *args, emit_ids: bool = True, **kwargs) -> tuple[Tensor, ...]:
    spec, kv = _check_topk_select(gathered, *args, emit_ids=emit_ids, **kwargs)
    rows = gathered.shape[1]
    out = empty_outputs(rows, spec.topk, kv is not None, emit_ids, gathered.device)
    return out.rows, out.valid, out.ids, gathered.new_empty(rows)


def _topk_select_cpu(gathered: Tensor, *args, emit_ids: bool = True, **kwargs) -> tuple[Tensor, ...]:
    from .cpu.select import select_words

    spec, kv = _check_topk_select(gathered, *args, emit_ids=emit_ids, **kwargs)
    out, saturation = select_words(gathered, spec, kv, emit_ids)
    return out.rows, out.valid, out.ids, saturation


def _topk_select_cuda(gathered: Tensor, *args, emit_ids: bool = True, **kwargs) -> tuple[Tensor, ...]:
    from .cute.launch import topk_select

    spec, kv = _check_topk_select(gathered, *args, emit_ids=emit_ids, **kwargs)
    out, saturation = topk_select(gathered, spec, kv, emit_ids)
    return out.rows, out.valid, out.ids, saturation


_define(
    "topk_select",
    "(Tensor gathered, int rank, int topk, int local_topk, int interleave, str layout, "
    f"{_KV}, *, bool emit_ids=True) -> (Tensor rows, Tensor valid, Tensor ids, Tensor saturation)",
    _topk_select_fake,
    _topk_select_cpu,
    _topk_select_cuda,
)


# topk_rescue: round 2 of the saturated rows


def _check_topk_rescue(
    gathered: Tensor,
    saturation: Tensor,
    rows: Tensor,
    valid: Tensor,
    ids: Tensor,
    logits: Tensor,
    row_ends: Tensor,
    group: str,
    rank: int,
    topk: int,
    local_topk: int,
    interleave: int,
    block_table: Tensor | None = None,
    req_id: Tensor | None = None,
    block_size: int = 1,
    block_stride: int = 1,
    lane: int = 0,
    order: Tensor | None = None,
) -> tuple[MergeSpec, KvMap | None, TopkExchange | None]:
    world_size, count, device = gathered.shape[0], logits.shape[0], gathered.device
    layout = checks.check_logits(logits, interleave, world_size)
    spec, kv = _check_topk_select(
        gathered, rank, topk, local_topk, interleave, layout.name, block_table, req_id, block_size, block_stride
    )
    checks.check_words("gathered", gathered, (world_size, count), local_topk, layout)
    checks.check_row_ends(logits, row_ends)
    checks.check_tensor("saturation", saturation, torch.int32, (count,), device)
    shape = empty_outputs(count, topk, kv is not None, ids.shape[0] != 0, torch.device("meta"))
    checks.check_tensor("rows", rows, torch.int32, tuple(shape.rows.shape), device)
    checks.check_tensor("valid", valid, torch.int32, tuple(shape.valid.shape), device)
    checks.check_tensor("ids", ids, torch.int32, tuple(shape.ids.shape), device)
    checks.check_tensor("logits", logits, logits.dtype, (count, None), device)
    checks.check_order(order, device)
    exchange = None
    if local_topk < topk:
        exchange = require_exchange(group, world_size, device, count, topk, local_topk, layout.name, lane)
        checks.require(rank == exchange.rank, f"rank {rank}: this process is rank {exchange.rank} of group {group!r}")
    return spec, kv, exchange


def _topk_rescue_fake(gathered, saturation, rows, valid, ids, logits, row_ends, *args, **kwargs) -> Outputs:
    _check_topk_rescue(gathered, saturation, rows, valid, ids, logits, row_ends, *args, **kwargs)
    return torch.empty_like(rows), torch.empty_like(valid), torch.empty_like(ids)


def _topk_rescue_cpu(gathered, saturation, rows, valid, ids, logits, row_ends, *args, **kwargs) -> Outputs:
    from .cpu.select import local_topk_words

    spec, kv, exchange = _check_topk_rescue(gathered, saturation, rows, valid, ids, logits, row_ends, *args, **kwargs)
    out = Merged(rows.clone(), valid.clone(), ids.clone())
    if exchange is not None:
        exchange.rescue(
            gathered, saturation, out, lambda t: local_topk_words(logits[t], row_ends[t], spec.topk), spec, kv
        )
    return out.rows, out.valid, out.ids


def _topk_rescue_cuda(gathered, saturation, rows, valid, ids, logits, row_ends, *args, **kwargs) -> Outputs:
    from .cute.launch import topk_rescue

    spec, kv, exchange = _check_topk_rescue(gathered, saturation, rows, valid, ids, logits, row_ends, *args, **kwargs)
    out = Merged(rows.clone(), valid.clone(), ids.clone())
    if exchange is not None:
        topk_rescue(exchange, gathered, saturation, out, logits, row_ends, spec, kv)
    return out.rows, out.valid, out.ids


_define(
    "topk_rescue",
    "(Tensor gathered, Tensor saturation, Tensor rows, Tensor valid, Tensor ids, Tensor logits, Tensor row_ends, "
    f"str group, int rank, int topk, int local_topk, int interleave, {_KV}, *, int lane=0, Tensor(a!)? order=None)"
    " -> (Tensor rows, Tensor valid, Tensor ids)",
    _topk_rescue_fake,
    _topk_rescue_cpu,
    _topk_rescue_cuda,
    communicates=True,
)


# exchange_merge: words (+ what a rescue re-reads) -> rows, valid, ids in one exchange


def _check_exchange_merge(
    words: Tensor,
    logits: Tensor,
    row_ends: Tensor,
    group: str,
    world_size: int,
    topk: int,
    local_topk: int,
    interleave: int,
    block_table: Tensor | None = None,
    req_id: Tensor | None = None,
    block_size: int = 1,
    block_stride: int = 1,
    emit_ids: bool = True,
    lane: int = 0,
    order: Tensor | None = None,
) -> tuple[MergeSpec, KvMap | None, TopkExchange]:
    checks.check_world(world_size)
    checks.check_topk(topk, local_topk)
    layout = checks.check_logits(logits, interleave, world_size)
    count, device = logits.shape[0], logits.device
    checks.check_row_ends(logits, row_ends)
    checks.check_tensor("words", words, torch.int32, (count, packed_row_words(local_topk, layout.name)), device)
    checks.check_kv_rows(count, interleave, block_table, req_id, block_size, block_stride, device)
    checks.check_order(order, device)
    exchange = require_exchange(group, world_size, device, count, topk, local_topk, layout.name, lane)
    spec = MergeSpec(exchange.rank, world_size, topk, local_topk, interleave, layout)
    return spec, _kv_map(block_table, req_id, block_size, block_stride), exchange


def _exchange_merge_fake(words: Tensor, *args, emit_ids: bool = True, **kwargs) -> Outputs:
    spec, kv, _ = _check_exchange_merge(words, *args, emit_ids=emit_ids, **kwargs)
    out = empty_outputs(words.shape[0], spec.topk, kv is not None, emit_ids, words.device)
    return out.rows, out.valid, out.ids


def _exchange_merge_cpu(words: Tensor, logits: Tensor, row_ends: Tensor, *args, emit_ids: bool = True, **kwargs):
    from .cpu.select import local_topk_words

    spec, kv, exchange = _check_exchange_merge(words, logits, row_ends, *args, emit_ids=emit_ids, **kwargs)
    out = exchange.merge(words, lambda t: local_topk_words(logits[t], row_ends[t], spec.topk), spec, kv, emit_ids)
    return out.rows, out.valid, out.ids


def _exchange_merge_cuda(words: Tensor, logits: Tensor, row_ends: Tensor, *args, emit_ids: bool = True, **kwargs):
    from .cute.launch import exchange_merge

    spec, kv, exchange = _check_exchange_merge(words, logits, row_ends, *args, emit_ids=emit_ids, **kwargs)
    out = exchange_merge(exchange, words, logits, row_ends, spec, kv, emit_ids)
    return out.rows, out.valid, out.ids


_define(
    "exchange_merge",
    "(Tensor words, Tensor logits, Tensor row_ends, str group, int world_size, int topk, int local_topk, "
    f"int interleave, {_KV}, *, bool emit_ids=True, int lane=0, Tensor(a!)? order=None)"
    " -> (Tensor rows, Tensor valid, Tensor ids)",
    _exchange_merge_fake,
    _exchange_merge_cpu,
    _exchange_merge_cuda,
    communicates=True,
)


# merge_dcp_topk_: vLLM's contract: local top-K ids in, global ids out, in place


def _check_merge_dcp_topk(
    logits: Tensor,
    topk_indices: Tensor,
    topk: int,
    rank: int,
    world_size: int,
    interleave: int,
    row_starts: Tensor | None = None,
    *,
    group: str,
    local_topk: int,
    lane: int = 0,
) -> tuple[MergeSpec, TopkExchange]:
    checks.check_world(world_size)
    checks.check_topk(topk, local_topk)
    layout = checks.check_logits(logits, interleave, world_size)
    count, device = logits.shape[0], logits.device
    checks.check_tensor("topk_indices", topk_indices, torch.int32, (count, topk), device)
    if row_starts is not None:
        checks.check_tensor("row_starts", row_starts, torch.int32, (count,), device)
    exchange = require_exchange(group, world_size, device, count, topk, local_topk, layout.name, lane)
    checks.require(rank == exchange.rank, f"rank {rank}: this process is rank {exchange.rank} of group {group!r}")
    return MergeSpec(rank, world_size, topk, local_topk, interleave, layout), exchange


def _merge_dcp_topk_fake(*args, **kwargs) -> None:
    _check_merge_dcp_topk(*args, **kwargs)


def _merge_dcp_topk_cpu(logits, topk_indices, topk, rank, world_size, interleave, row_starts=None, **kwargs) -> None:
    from .cpu.select import words_of_local_topk

    spec, exchange = _check_merge_dcp_topk(
        logits, topk_indices, topk, rank, world_size, interleave, row_starts, **kwargs
    )
    words, lists = words_of_local_topk(logits, topk_indices, row_starts, spec.local_topk)
    out = exchange.merge(words, lambda t: lists[t], spec, None, emit_ids=True)
    topk_indices.copy_(out.ids)


def _merge_dcp_topk_cuda(logits, topk_indices, topk, rank, world_size, interleave, row_starts=None, **kwargs) -> None:
    from .cute.launch import merge_dcp_topk_

    spec, exchange = _check_merge_dcp_topk(
        logits, topk_indices, topk, rank, world_size, interleave, row_starts, **kwargs
    )
    merge_dcp_topk_(exchange, logits, topk_indices, row_starts, spec)


_define(
    "merge_dcp_topk_",
    "(Tensor logits, Tensor(a!) topk_indices, int topk, int rank, int world_size, int interleave, "
    "Tensor? row_starts=None, *, str group, int local_topk, int lane=0) -> ()",
    _merge_dcp_topk_fake,
    _merge_dcp_topk_cpu,
    _merge_dcp_topk_cuda,
    communicates=True,
)
