"""Merges on several GPUs, eager and in CUDA graphs, and how many of their rows are wrong: for the tests on GPUs."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from vllm_topkx.ranks import RankContext

ops = torch.ops.topkx
#: Ranks, a GPU each: an even number, for the tests that pair them.
W = int(os.environ.get("TOPKX_TEST_GPUS", "2"))
enough_gpus = pytest.mark.skipif(torch.cuda.device_count() < W, reason=f"needs {W} CUDA GPUs (TOPKX_TEST_GPUS)")


def random_inputs(
    seed: int, rows: int, columns: int, skew: bool = False, world_size: int = W
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and row ends of all ranks, on the CPU; with ``skew`` one rank holds (nearly) all winners of a row."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(world_size, rows, columns, generator=generator)
    if skew:
        logits[torch.arange(rows) % world_size, torch.arange(rows)] += 50
    ends = torch.randint(columns // 2, columns + 1, (world_size, rows), generator=generator, dtype=torch.int32)
    return logits, ends


def exchange(ctx, logits, ends, k, n, interleave=1, lane=0) -> torch.Tensor:
    words = ops.local_topk_words(logits, ends, n)
    return ops.exchange_merge(words, logits, ends, ctx.group_name, ctx.world_size, k, n, interleave, lane=lane)[2]


def expected_scores(logits: torch.Tensor, ends: torch.Tensor, k: int) -> torch.Tensor:
    """The K best scores of distinct random scores, sorted: enough to compare sets on the GPU, many rows at once."""
    columns = logits.shape[-1]
    masked = logits.masked_fill(torch.arange(columns, device=logits.device) >= ends[..., None], -torch.inf)
    return masked.permute(1, 0, 2).flatten(1).topk(k, dim=-1).values


def scores_of(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Scores at global positions of interleave 1, sorted descending."""
    ids = ids.long()
    world_size = len(logits)
    picked = logits[ids % world_size, torch.arange(len(ids), device=ids.device)[:, None], ids // world_size]
    return picked.sort(dim=-1, descending=True).values


def wrong_rows(ids: torch.Tensor, logits: torch.Tensor, ends: torch.Tensor, k: int) -> torch.Tensor:
    """Rows of ``ids`` that are not the K best; on the device."""
    return (scores_of(ids, logits) != expected_scores(logits, ends, k)).any(-1).sum()


class Captured:
    """A graph of ``merges`` exchanges over ``rows`` rows, with inputs that are changed in place."""

    def __init__(self, ctx: RankContext, k: int, n: int, rows: int, merges: int, columns: int, lane: int = 0) -> None:
        self.ctx, self.k = ctx, k
        self.logits = torch.zeros(merges, rows, columns, device=ctx.device)
        self.ends = torch.zeros(merges, rows, dtype=torch.int32, device=ctx.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.ids = [exchange(ctx, self.logits[i], self.ends[i], k, n, lane=lane) for i in range(merges)]

    def replay(self, seed: int) -> torch.Tensor:
        """Replays with fresh inputs; the number of wrong rows, on the device."""
        wrong = torch.zeros((), dtype=torch.int64, device=self.ctx.device)
        merges, rows, columns = self.logits.shape
        inputs = []
        for i in range(merges):
            generator = torch.Generator(device=self.ctx.device).manual_seed(seed * 64 + i)
            logits = torch.randn(W, rows, columns, generator=generator, device=self.ctx.device)
            logits[i % W, 0] += 50  # row 0 is rescued
            ends = torch.full((W, rows), columns, dtype=torch.int32, device=self.ctx.device)
            self.logits[i].copy_(logits[self.ctx.rank])
            self.ends[i].copy_(ends[self.ctx.rank])
            inputs.append((logits, ends))
        self.graph.replay()
        for ids, (logits, ends) in zip(self.ids, inputs, strict=True):
            wrong += wrong_rows(ids, logits, ends, self.k)
        return wrong


def warm_up(ctx: RankContext, k: int, n: int, rows: int, lane: int = 0) -> None:
    """Compiles what the graphs need."""
    logits, ends = (t.to(ctx.device)[ctx.rank] for t in random_inputs(0, rows, 600))
    exchange(ctx, logits, ends, k, n, lane=lane)
    torch.cuda.synchronize()
    dist.barrier(ctx.group)
