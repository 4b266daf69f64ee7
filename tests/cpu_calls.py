"""Small merges on ranks that are processes, and which of them are wrong: for the tests of the CPU exchange."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

import vllm_topkx
from vllm_topkx.ops.cpu import shared_memory
from vllm_topkx.ops.exchange import TopkExchange
from vllm_topkx.ops.reference import reference_topk, same_sets
from vllm_topkx.ranks import RankContext

K, N, INTERLEAVE, L = 24, 10, 4, 90


def scores(call: int, world_size: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and row ends of a call, with ties and, in row 1, one rank that holds everything."""
    rng = np.random.default_rng(call)
    logits = rng.standard_normal((world_size, rows, L)).astype(np.float32).round(1)
    if rows > 1:
        logits[call % world_size, 1] += 100
    return logits, rng.integers(0, L + 1, (world_size, rows)).astype(np.int32)


def merge(ctx: RankContext, call: int, rows: int, lane: int = 0, n: int = N) -> np.ndarray:
    logits, ends = (torch.from_numpy(a[ctx.rank]) for a in scores(call, ctx.world_size, rows))
    words = torch.ops.topkx.local_topk_words(logits, ends, n)
    _, _, ids = torch.ops.topkx.exchange_merge(
        words, logits, ends, ctx.group_name, ctx.world_size, K, n, INTERLEAVE, lane=lane
    )
    return ids.numpy()


def wrong_calls(ctx: RankContext, calls: list[tuple[int, int]], lane: int = 0) -> list[int]:
    """Runs ``calls`` (call number, rows); returns the numbers of those that differ from the reference."""
    wrong = []
    for call, rows in calls:
        ids = merge(ctx, call, rows, lane)
        if not same_sets(ids, reference_topk(*scores(call, ctx.world_size, rows), K, INTERLEAVE)).all():
            wrong.append(call)
    return wrong


def reserve(ctx: RankContext, rows: int, lane: int = 0, n: int = N) -> TopkExchange:
    return vllm_topkx.reserve(ctx.group, rows=rows, topk=K, local_topk=n, lane=lane)


def segments(pids: Iterable[int | None]) -> list[str]:
    """Names of the shared memory of these processes; other tests may have some of their own."""
    of_these = {str(pid) for pid in pids}
    names = sorted(path.name for path in shared_memory.SHM.glob(shared_memory.PREFIX + "*"))
    return [name for name in names if name.split("-")[1] in of_these]
