"""The all-gather form of a merge: what the exchange replaces, and what stands in where it cannot be."""

from __future__ import annotations

import torch

from ..groups import resolve_group
from ..layouts import layout_of


def merge_all_gather(
    words: torch.Tensor,
    logits: torch.Tensor,
    row_ends: torch.Tensor,
    group: str,
    rank: int,
    world_size: int,
    topk: int,
    local_topk: int,
    interleave: int,
    block_table: torch.Tensor | None = None,
    req_id: torch.Tensor | None = None,
    block_size: int = 1,
    block_stride: int = 1,
    *,
    emit_ids: bool = True,
    lane: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``exchange_merge`` as all-gather, ``topk_select`` and ``topk_rescue``.

    Runs eagerly and under ``torch.compile``, where ``ExchangeMergePass`` turns it into the exchange. With
    ``local_topk < topk`` the rescue needs the exchange of the group reserved; with ``local_topk == topk``
    nothing is, and any world size works.

    Args:
        words: int32 ``[T, words]`` of ``topkx::local_topk_words``.
        logits, row_ends: ``[T, L]`` and int32 ``[T]``, what a rescue reads again.
        group: name of the process group; over NCCL for CUDA tensors, gloo for CPU tensors.
        rank, world_size: this process's place in it, and its size.
        topk, local_topk, interleave, block_table, req_id, block_size, block_stride, emit_ids, lane: as in
            ``topkx::exchange_merge``.

    Returns:
        ``rows, valid, ids`` as ``topkx::exchange_merge`` gives them, and the saturation word int32 ``[T]``:
        bit r is set when rank r took part in round 2.

    Raises:
        TopkxError: as the ops do; or the group is unknown or not of ``world_size`` ranks.
    """
    if not torch.compiler.is_compiling():
        resolve_group(group, world_size)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(words, world_size, group)
    gathered = torch.ops._c10d_functional.wait_tensor(gathered).view(world_size, *words.shape)
    kv = (block_table, req_id, block_size, block_stride)
    rows, valid, ids, saturation = torch.ops.topkx.topk_select(
        gathered, rank, topk, local_topk, interleave, layout_of(logits.dtype).name, *kv, emit_ids=emit_ids
    )
    rows, valid, ids = torch.ops.topkx.topk_rescue(
        gathered,
        saturation,
        rows,
        valid,
        ids,
        logits,
        row_ends,
        group,
        rank,
        topk,
        local_topk,
        interleave,
        *kv,
        lane=lane,
    )
    return rows, valid, ids, saturation
