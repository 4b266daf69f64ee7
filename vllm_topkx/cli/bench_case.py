"""The inputs of a benchmark: fresh random scores in rotating buffers, and what a rank derives from them."""

from __future__ import annotations

import torch

from ..ops.spec import KvMap

Tensor = torch.Tensor

SCORES = ("random", "skewed", "ties")
#: Buffers that calls take turns with, so that none finds its inputs as the call before left them in a cache.
BUFFERS = 8
BLOCK_SIZE = 64
#: How far skewed scores of ranks that hold no winner lie below the others, and how many values ties have.
SKEW, TIED_VALUES = 50.0, 64


def fill_scores(out: Tensor, kind: str, rank: int, world_size: int, seed: int) -> None:
    """New scores ``[T, L]`` of ``rank``.

    ``skewed``: one rank holds all winners of a row, so that with N < K every row is rescued. ``ties``: few
    values, so that the winners are decided by position.
    """
    generator = torch.Generator(device=out.device).manual_seed(seed * 64 + rank)
    if kind == "ties":
        out.random_(0, TIED_VALUES, generator=generator)
        return
    out.normal_(generator=generator)
    if kind == "skewed":
        rows = torch.arange(out.shape[0], device=out.device)
        out.sub_(torch.where(rows % world_size == rank, 0.0, SKEW)[:, None])


def local_topk(logits: Tensor, topk: int) -> Tensor:
    """int32 ``[T, K]``: the exact local top-K, by position, as radix selects leave it."""
    best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    return best.sort(dim=-1).values.to(torch.int32)


def restore(lists: Tensor, best: Tensor) -> None:
    """Makes list ``i`` of ``lists [calls, T, K]`` the local top-K of buffer ``i % B`` of ``best [B, T, K]``."""
    for first in range(0, len(lists), len(best)):
        part = lists[first : first + len(best)]
        part.copy_(best[: len(part)])


class Case:
    """One rank's inputs of one configuration; :meth:`refresh` changes them in place.

    Attributes:
        logits: float32 ``[B, T, L]``; ``bf16``: the same, rounded.
        ends: int32 ``[T]``: all columns.
        lists: int32 ``[calls, T, K]``, local top-K lists that calls replace by their results.
        words: by N and whether of ``bf16``: ``[B, T, words]``.
        kv: a KV map with a request a row.
    """

    def __init__(
        self, rank: int, world_size: int, rows: int, columns: int, topk: int, scores: str, calls: int, device: str
    ) -> None:
        self.rank, self.world_size, self.rows, self.columns, self.topk = rank, world_size, rows, columns, topk
        self.scores = scores
        self.logits = torch.zeros(BUFFERS, rows, columns, device=device)
        self.bf16 = torch.zeros_like(self.logits, dtype=torch.bfloat16)
        self.ends = torch.full((rows,), columns, dtype=torch.int32, device=device)
        self.best = torch.zeros(BUFFERS, rows, topk, dtype=torch.int32, device=device)
        self.lists = torch.zeros(calls, rows, topk, dtype=torch.int32, device=device)
        self.words: dict[tuple[int, bool], Tensor] = {}
        blocks = -(-columns // BLOCK_SIZE)
        table = torch.randperm(rows * blocks, device=device).view(rows, blocks).to(torch.int32)
        self.kv = KvMap(table, torch.arange(rows, dtype=torch.int32, device=device), BLOCK_SIZE, BLOCK_SIZE)

    def scores_of(self, buffer: int, bf16: bool) -> Tensor:
        return (self.bf16 if bf16 else self.logits)[buffer]

    def words_of(self, n: int, bf16: bool = False) -> Tensor:
        """``[B, T, words]`` of the best ``n``; kept up to date from here on."""
        if (n, bf16) not in self.words:
            self.words[n, bf16] = torch.stack([self._words(b, n, bf16) for b in range(BUFFERS)])
        return self.words[n, bf16]

    def _words(self, buffer: int, n: int, bf16: bool) -> Tensor:
        return torch.ops.topkx.local_topk_words(self.scores_of(buffer, bf16), self.ends, n)

    def refresh(self, seed: int) -> None:
        """New scores in all buffers."""
        for b in range(BUFFERS):
            fill_scores(self.logits[b], self.scores, self.rank, self.world_size, seed * BUFFERS + b)
            self.bf16[b].copy_(self.logits[b])
            self.best[b].copy_(local_topk(self.logits[b], self.topk))
        for (n, bf16), words in self.words.items():
            for b in range(BUFFERS):
                words[b].copy_(self._words(b, n, bf16))

    def restore_lists(self) -> None:
        """Undoes what calls did to ``lists``."""
        restore(self.lists, self.best)
