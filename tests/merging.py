"""What a merge must give: shared by the tests of kernels on a GPU, of their PTX, and of dumps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_topkx.cli.dump import Dump
from vllm_topkx.ops import release_all
from vllm_topkx.ops.cpu import select as cpu
from vllm_topkx.ops.layouts import unpack_words
from vllm_topkx.ops.reference import reference_topk
from vllm_topkx.ops.spec import KvMap, Merged, MergeSpec
from vllm_topkx.ranks import RankContext

Ranks = Sequence[torch.Tensor]


def release(context: RankContext) -> None:
    """Lets go of a rank's exchanges: the next may use the same names with other settings."""
    release_all()


def kv_maps(seed: int, world_size: int, rows: int, columns: int, block_size: int) -> list[KvMap]:
    """A block table of three requests for each rank."""
    random = torch.Generator().manual_seed(seed)
    blocks = -(-columns // block_size)
    return [
        KvMap(
            torch.randint(0, 1000, (3, blocks), generator=random, dtype=torch.int32),
            torch.randint(0, 3, (rows,), generator=random, dtype=torch.int32),
            block_size,
            block_size + 5,
        )
        for _ in range(world_size)
    ]


def expected(words: Ranks, lists: Ranks, spec: MergeSpec, kv: KvMap | None) -> Merged:
    """What the CPU backend gives one rank: select, then round 2 over ``lists`` for the saturated rows.

    Args:
        words: int32 ``[T, words]`` of the best N, by rank.
        lists: the same of the best K.
    """
    gathered = torch.stack(list(words))
    out, saturation = cpu.select_words(gathered, spec, kv, emit_ids=True)
    for t in saturation.nonzero().flatten().tolist():
        candidates = cpu.Candidates.from_words(gathered[:, t : t + 1], spec.local_topk, spec.layout.name)
        ord, idx = (torch.zeros(1, spec.world_size, spec.topk, dtype=torch.int64) for _ in range(2))
        ord[..., : spec.local_topk], idx[..., : spec.local_topk] = candidates.ord, candidates.idx
        for rank in range(spec.world_size):
            if saturation[t] >> rank & 1:
                ord[0, rank], idx[0, rank] = unpack_words(lists[rank][t], spec.topk, spec.layout.name)
        of_row = None if kv is None else KvMap(kv.block_table, kv.req_id[t : t + 1], kv.block_size, kv.block_stride)
        better, _ = cpu.select(cpu.Candidates(ord, idx), spec, of_row, emit_ids=True)
        out.ids[t] = better.ids[0]
        if kv is not None:
            out.rows[t], out.valid[t] = better.rows[0], better.valid[0]
    return out


def assert_merged(got: Merged, want: Merged) -> None:
    """``got`` is ``want``, order of ids included."""
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(got.rows, want.rows)
    assert torch.equal(got.valid, want.valid)


def saturation(dump: Dump) -> np.ndarray:
    """What the saturation words must be, by the reference: all N that a rank sent are among the K best sent."""
    if dump.local_topk == dump.topk:
        return np.zeros(dump.rows, dtype=np.int32)
    sent = np.full_like(scores := dump.scores(slice(None)), np.nan)
    for rank in range(dump.world_size):
        best = reference_topk(scores[[rank]], dump.row_ends[[rank]], dump.local_topk, interleave=1)
        for row, places in enumerate(best):
            sent[rank, row, places[places >= 0]] = scores[rank, row, places[places >= 0]]
    chosen = reference_topk(sent, dump.row_ends, dump.topk, dump.interleave)
    owner = np.where(chosen >= 0, chosen // dump.interleave % dump.world_size, -1)
    counts = np.stack([(owner == rank).sum(-1) for rank in range(dump.world_size)])
    return ((counts == dump.local_topk) << np.arange(dump.world_size)[:, None]).sum(0).astype(np.int32)
