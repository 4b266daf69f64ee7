"""What is right: a stable sort of all ranks' scores on the GPU, and a system's results against it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..ops.spec import KvMap
from .bench_record import EXACT, TIES, WRONG

Tensor = torch.Tensor


@dataclass(frozen=True)
class Truth:
    """The exact top-K of every row.

    Attributes:
        ids: int64 ``[T, K]``, ascending.
        scores: ``[T, W * L]`` by global position.
        world_size, interleave: W and I.
    """

    ids: Tensor
    scores: Tensor
    world_size: int
    interleave: int

    @classmethod
    def of(cls, scores: Tensor, topk: int, interleave: int) -> Truth:
        """From ``scores [W, T, L]`` without NaN; L is a multiple of ``interleave``."""
        world_size, rows, columns = scores.shape
        stretches = scores.view(world_size, rows, columns // interleave, interleave)
        flat = stretches.permute(1, 2, 0, 3).reshape(rows, world_size * columns)
        best = flat.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
        return cls(best.sort(dim=-1).values, flat, world_size, interleave)

    def verdict_on_ids(self, ids: Tensor) -> str:
        """``ids`` int32 ``[T, K]`` in any order."""
        got = ids.long().sort(dim=-1).values
        if torch.equal(got, self.ids):
            return EXACT
        inside = (got >= 0) & (got < self.scores.shape[1])
        distinct = (got[:, 1:] != got[:, :-1]).all()
        if got.shape != self.ids.shape or not bool(inside.all() & distinct):
            return WRONG
        scores = [self.scores.gather(1, places).sort(dim=-1).values for places in (got, self.ids)]
        return TIES if torch.equal(*scores) else WRONG

    def verdict_on_rows(self, rows: Tensor, valid: Tensor, rank: int, kv: KvMap) -> str:
        """``rows`` int32 ``[T, K]``: the KV rows of ``rank``'s own winners in front, -1 past ``valid``."""
        stretch = self.ids // self.interleave
        own = stretch % self.world_size == rank
        j = (stretch // self.world_size * self.interleave + self.ids % self.interleave).where(own, 0)
        blocks = kv.block_table[kv.req_id.long()].long().gather(1, j // kv.block_size)
        expected = torch.where(own, blocks * kv.block_stride + j % kv.block_size, -1)
        count = own.sum(dim=-1)
        past = torch.arange(rows.shape[1], device=rows.device) >= count[:, None]
        compact = bool(((rows == -1) == past).all())
        same = torch.equal(rows.long().sort(dim=-1).values, expected.sort(dim=-1).values)
        return EXACT if compact and same and torch.equal(valid.long(), count) else WRONG


def worst(verdicts: Iterable[str], default: str) -> str:
    """The least good of ``verdicts``; ``default`` of none."""
    return max(verdicts, key=(EXACT, TIES, WRONG).index, default=default)
