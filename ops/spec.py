"""The settings of one merge, as the backends pass them around."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layouts import Layout


@dataclass(frozen=True)
class MergeSpec:
    """Which ranks are merged, how many candidates they send and keep, and how positions interleave."""

    rank: int
    world_size: int
    topk: int
    local_topk: int
    interleave: int
    layout: Layout


@dataclass(frozen=True)
class KvMap:
    """Where this rank's local positions lie in its KV cache.

    Position j of row t is KV row
    ``block_table[req_id[t], j // block_size] * block_stride + j % block_size``.

    Attributes:
        block_table: int32 ``[requests, blocks]``.
        req_id: int32 ``[T]``, the request of each row.
        block_size: positions a block.
        block_stride: KV rows from one block to the next.
    """

    block_table: torch.Tensor
    req_id: torch.Tensor
    block_size: int
    block_stride: int


@dataclass
class Merged:
    """What a merge gives.

    Attributes:
        rows: int32 ``[T, K]`` this rank's selected positions as KV rows, compacted, -1 past ``valid``;
            ``[0, K]`` without a block table.
        valid: int32 ``[T]`` their count; ``[0]`` without a block table.
        ids: int32 ``[T, K]`` global positions, rank by rank and within a rank in the order of its
            words, -1 past the number of candidates; ``[0, K]`` when they were not asked for.
    """

    rows: torch.Tensor
    valid: torch.Tensor
    ids: torch.Tensor


def empty_outputs(rows: int, topk: int, with_rows: bool, with_ids: bool, device: torch.device) -> Merged:
    """Unwritten outputs of the shapes that :class:`Merged` names."""

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    kv_rows = rows if with_rows else 0
    return Merged(rows=new(kv_rows, topk), valid=new(kv_rows), ids=new(rows if with_ids else 0, topk))
