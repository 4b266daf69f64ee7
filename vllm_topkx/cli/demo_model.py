"""The demo's model, its decode steps, and what they must give.

Weights, hidden states and keys are whole numbers small enough for float32 to hold every sum exactly. So the
scores of the shards are those of the unsharded keys, in whichever order a kernel adds, and the reference
needs no tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ..ops.reference import reference_topk
from .vllm_cpu import GROUP

HIDDEN, HEADS, HEAD_DIM = 32, 4, 32
TOPK, INTERLEAVE = 128, 16
BLOCK_SIZE, BLOCKS = 64, 8  # a rank's KV cache: positions a block, blocks a request
POSITIONS = BLOCK_SIZE * BLOCKS
REQUESTS, MAX_ROWS = 8, 32
#: Inputs of :class:`Indexer` with a row for each query row: as many as the step has.
DYNAMIC = {"hidden": 0, "req_id": 0, "row_ends": 0}
#: The first two have random scores; the batch size differs from step to step in all of them.
KINDS = ("1 token a request", "4 tokens a request", "skewed to one rank", "ties at threshold", "short contexts")
PLAIN, SPECULATIVE, SKEWED, TIES, SHORT = KINDS


class Indexer(nn.Module):
    """The indexer of DeepSeek sparse attention on one rank of a DCP group, its merge in all-gather form.

    Args:
        rank, world_size: this process's place in the group.
        local_topk: candidates each rank sends.
    """

    def __init__(self, rank: int, world_size: int, local_topk: int) -> None:
        super().__init__()
        self.rank, self.world_size, self.local_topk = rank, world_size, local_topk
        wq, ww = weights()
        self.wq, self.ww = nn.Parameter(torch.from_numpy(wq), False), nn.Parameter(torch.from_numpy(ww), False)

    def forward(
        self,
        hidden: torch.Tensor,
        req_id: torch.Tensor,
        row_ends: torch.Tensor,
        keys: torch.Tensor,
        block_table: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = (hidden @ self.wq).view(-1, HEADS, HEAD_DIM)
        head_weights = (hidden @ self.ww).relu() + 1
        context = keys[block_table[req_id]].flatten(1, 2)
        scores = (q @ context.transpose(1, 2)).relu()
        logits = (scores * head_weights.unsqueeze(-1)).sum(1)

        words = torch.ops.topkx.local_topk_words(logits, row_ends, self.local_topk)
        gathered = torch.ops.vllm.all_gather(words, 0, self.world_size, GROUP)
        gathered = gathered.view(self.world_size, -1, words.shape[1])
        merge = (self.rank, TOPK, self.local_topk, INTERLEAVE)
        kv = (block_table, req_id, BLOCK_SIZE, BLOCK_SIZE)
        rows, valid, ids, saturation = torch.ops.topkx.topk_select(gathered, *merge, "fp32", *kv)
        rows, valid, ids = torch.ops.topkx.topk_rescue(
            gathered, saturation, rows, valid, ids, logits, row_ends, GROUP, *merge, *kv
        )
        return ids, rows, valid


def weights() -> tuple[np.ndarray, np.ndarray]:
    """Of the query projection and of the head weights."""
    rng = np.random.default_rng(0)
    shapes = (HIDDEN, HEADS * HEAD_DIM), (HIDDEN, HEADS)
    return tuple(rng.integers(-1, 2, shape).astype(np.float32) for shape in shapes)


@dataclass(frozen=True)
class Step:
    """A decode step of T rows over R requests, before it is sharded.

    Attributes:
        kind: one of ``KINDS``.
        hidden: float32 ``[T, HIDDEN]``.
        req_id: int32 ``[T]``.
        lengths: int ``[T]``: row t attends to the positions below.
        keys: float32 ``[R, W * POSITIONS, HEAD_DIM]``.
        block_table: int32 ``[R, BLOCKS]``, the same on every rank.
    """

    kind: str
    hidden: np.ndarray
    req_id: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray
    block_table: np.ndarray


def make_step(number: int, world_size: int) -> Step:
    """Step ``number``, the same wherever it is made; kinds take turns."""
    rng = np.random.default_rng(number)
    kind = KINDS[number % len(KINDS)]
    tokens = world_size * POSITIONS
    if kind == SPECULATIVE:
        req_id = np.repeat(rng.permutation(REQUESTS)[: rng.integers(1, REQUESTS + 1)], 4)
    else:
        req_id = rng.permutation(REQUESTS)[: rng.integers(1, REQUESTS + 1)]
    context = rng.integers(0, 150, REQUESTS) if kind == SHORT else rng.integers(tokens // 2, tokens - 4, REQUESTS)
    draft = np.arange(len(req_id)) % 4 if kind == SPECULATIVE else 0
    hidden = rng.integers(-1, 2, (len(req_id), HIDDEN))
    keys = rng.integers(-100, 101, (REQUESTS, tokens, HEAD_DIM))
    if kind == TIES:
        hidden[:, 2:] = 0
        keys = np.sign(keys)
    elif kind == SKEWED:
        hot = rng.integers(0, world_size, REQUESTS)
        owner = np.arange(tokens) // INTERLEAVE % world_size
        keys[owner != hot[:, None]] //= 16
    return Step(
        kind,
        hidden.astype(np.float32),
        req_id.astype(np.int32),
        context[req_id] + draft,
        keys.astype(np.float32),
        rng.permutation(REQUESTS * BLOCKS).astype(np.int32).reshape(REQUESTS, BLOCKS),
    )


def positions_of(rank: int, world_size: int) -> np.ndarray:
    """int ``[POSITIONS]``: the global position of each of ``rank``'s positions."""
    stretch, inside = np.divmod(np.arange(POSITIONS), INTERLEAVE)
    return (stretch * world_size + rank) * INTERLEAVE + inside


def shard(step: Step, rank: int, world_size: int) -> list[torch.Tensor]:
    """The inputs of ``rank``'s :class:`Indexer`."""
    positions = positions_of(rank, world_size)
    row_ends = (positions < step.lengths[:, None]).sum(-1).astype(np.int32)
    cache = np.zeros((REQUESTS * BLOCKS, BLOCK_SIZE, HEAD_DIM), dtype=np.float32)
    cache[step.block_table] = step.keys[:, positions].reshape(REQUESTS, BLOCKS, BLOCK_SIZE, HEAD_DIM)
    arrays = step.hidden, step.req_id, row_ends, cache, step.block_table
    return [torch.from_numpy(array) for array in arrays]


def dense_scores(step: Step) -> np.ndarray:
    """float32 ``[T, W * POSITIONS]``: the scores of the unsharded keys, computed in float64."""
    wq, ww = (weight.astype(np.float64) for weight in weights())
    q = (step.hidden @ wq).reshape(-1, HEADS, HEAD_DIM)
    scores = np.maximum(q @ step.keys.astype(np.float64)[step.req_id].transpose(0, 2, 1), 0)
    return (scores * (np.maximum(step.hidden @ ww, 0) + 1)[..., None]).sum(1).astype(np.float32)


def reference(step: Step) -> np.ndarray:
    """int32 ``[T, TOPK]``: a stable sort of the dense scores."""
    return reference_topk(dense_scores(step)[None], step.lengths[None], TOPK, interleave=1)


def kv_rows(ids: np.ndarray, step: Step, rank: int, world_size: int) -> Iterator[np.ndarray]:
    """For each row, which KV rows of ``rank`` the positions ``ids [T, TOPK]`` that it owns lie in, sorted."""
    local = np.full(world_size * POSITIONS, -1)
    local[positions_of(rank, world_size)] = np.arange(POSITIONS)
    for t, row in enumerate(ids):
        j = local[row[row >= 0]]
        block, inside = np.divmod(j[j >= 0], BLOCK_SIZE)
        yield np.sort(step.block_table[step.req_id[t], block] * BLOCK_SIZE + inside)
