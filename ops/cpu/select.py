"""Local selection, merge selection and their outputs, in torch integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..keys import global_position, key_position, score_ord, selection_key
from ..layouts import layout_of, pack_words, unpack_words
from ..spec import KvMap, Merged, MergeSpec, empty_outputs


def best_in_order(keys: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest non-zero keys of each row, ascending; -1 where there are fewer.

    Args:
        keys: int64 ``[T, M]``, distinct within a row but for the empty key 0.

    Returns:
        int64 ``[T, k]``.
    """
    rows, columns = keys.shape
    kept = keys != 0
    if columns > k:
        kept &= keys >= keys.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    place = torch.where(kept, kept.cumsum(-1) - 1, k)
    chosen = torch.full((rows, k + 1), -1, dtype=torch.int64)
    chosen.scatter_(-1, place, torch.arange(columns).expand(rows, columns))
    return chosen[:, :k]


def take(values: torch.Tensor, chosen: torch.Tensor, empty: int) -> torch.Tensor:
    """``values[t, chosen[t, i]]``, ``empty`` where ``chosen`` is -1."""
    if values.shape[-1] == 0:
        return torch.full_like(chosen, empty)
    return torch.where(chosen >= 0, values.gather(-1, chosen.clamp(min=0)), empty)


def local_topk_words(logits: torch.Tensor, row_ends: torch.Tensor, n: int) -> torch.Tensor:
    """Words of the best ``n`` positions of each row, by ascending position; see ``topkx::local_topk_words``."""
    j = torch.arange(logits.shape[1])
    ord = torch.where(j < row_ends[:, None], score_ord(logits), 0)
    chosen = best_in_order(selection_key(ord, j), n)
    return pack_words(take(ord, chosen, 0), chosen, layout_of(logits.dtype).name)


@dataclass(frozen=True)
class Candidates:
    """Candidates of all ranks: ``ord`` and local ``idx``, int64 ``[T, W, M]``; ``ord`` 0 is empty."""

    ord: torch.Tensor
    idx: torch.Tensor

    @classmethod
    def from_words(cls, words: torch.Tensor, n: int, layout: str) -> Candidates:
        """From gathered words ``[W, T, words]`` of ``n`` candidates each."""
        ord, idx = unpack_words(words.transpose(0, 1), n, layout)
        return cls(ord, idx)


def select(candidates: Candidates, spec: MergeSpec, kv: KvMap | None, emit_ids: bool) -> tuple[Merged, torch.Tensor]:
    """The K best candidates of each row, and how many of them each rank gave (int64 ``[T, W]``)."""
    rows, world_size, width = candidates.ord.shape
    ranks = torch.arange(world_size)[:, None]
    g = global_position(candidates.idx, ranks, world_size, spec.interleave)
    keys = selection_key(candidates.ord, g).flatten(1)
    chosen = best_in_order(keys, spec.topk)
    owner = torch.where(chosen >= 0, chosen // width, world_size)
    out = empty_outputs(rows, spec.topk, kv is not None, emit_ids, keys.device)
    if emit_ids:
        out.ids.copy_(key_position(take(keys, chosen, 0)))
    if kv is not None:
        own = best_in_order((owner == spec.rank).to(torch.int64), spec.topk)  # compact: the places that are ours
        j = take(candidates.idx.flatten(1), take(chosen, own, -1), -1)
        out.rows.copy_(_kv_rows(j, kv))
        out.valid.copy_((owner == spec.rank).sum(-1))
    counts = torch.zeros(rows, world_size + 1, dtype=torch.int64)
    counts.scatter_add_(-1, owner, torch.ones_like(owner))
    return out, counts[:, :world_size]


def _kv_rows(j: torch.Tensor, kv: KvMap) -> torch.Tensor:
    """KV rows of local positions ``j [T, K]``, -1 for -1."""
    safe = j.clamp(min=0)
    block = kv.block_table[kv.req_id.to(torch.int64)[:, None], safe // kv.block_size].to(torch.int64)
    return torch.where(j >= 0, block * kv.block_stride + safe % kv.block_size, -1)


def saturation_word(counts: torch.Tensor, spec: MergeSpec) -> torch.Tensor:
    """int32 ``[T]``: bit r is set when rank r is saturated.

    A rank that had all of its N words selected may hold more candidates that belong. All that it left
    out rank below its last word, so a rank with a word that was not selected has nothing more to give,
    and neither has one that sent all K.
    """
    saturated = (counts == spec.local_topk) & (spec.local_topk < spec.topk)
    return (saturated.to(torch.int64) << torch.arange(spec.world_size)).sum(-1).to(torch.int32)


def select_words(
    gathered: torch.Tensor, spec: MergeSpec, kv: KvMap | None, emit_ids: bool
) -> tuple[Merged, torch.Tensor]:
    """``topkx::topk_select``: outputs and saturation word from gathered words ``[W, T, words]``."""
    candidates = Candidates.from_words(gathered, spec.local_topk, spec.layout.name)
    out, counts = select(candidates, spec, kv, emit_ids)
    return out, saturation_word(counts, spec)


def words_of_local_topk(
    logits: torch.Tensor, topk_indices: torch.Tensor, row_starts: torch.Tensor | None, n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of the best ``n`` and of all of a local top-K that the caller has, in the caller's order.

    Args:
        logits: ``[T, L]`` scores.
        topk_indices: int32 ``[T, K]`` local positions, -1 padded.
        row_starts: int32 ``[T]`` column of position 0 of each row, or None for 0. As in vLLM, columns
            are clamped to the last one.
        n: candidates of round 1.
    """
    layout = layout_of(logits.dtype).name
    idx = topk_indices.to(torch.int64)
    column = idx.clamp(min=0) if row_starts is None else idx.clamp(min=0) + row_starts.to(torch.int64)[:, None]
    if logits.shape[1] == 0:
        ord = torch.zeros_like(idx)
    else:
        scores = logits.gather(-1, column.clamp(max=logits.shape[1] - 1))
        ord = torch.where(idx >= 0, score_ord(scores), 0)
    chosen = best_in_order(selection_key(ord, idx.clamp(min=0)), n)
    return pack_words(take(ord, chosen, 0), take(idx, chosen, 0), layout), pack_words(ord, idx.clamp(min=0), layout)
