"""The independent reference: a stable sort of the unsharded scores.

Shares no code with the ops: numpy, floats compared as floats, no keys and no words.
"""

from __future__ import annotations

import numpy as np


def reference_topk(logits: np.ndarray, row_ends: np.ndarray, topk: int, interleave: int) -> np.ndarray:
    """The exact global top-K of every row.

    Args:
        logits: float32 ``[W, T, L]``: rank r's scores of its own shard.
        row_ends: int ``[W, T]``: position j of row t is a candidate on rank r when ``j < row_ends[r, t]``.
        topk: K.
        interleave: ``cp_kv_cache_interleave_size``.

    Returns:
        int32 ``[T, K]`` global positions, best first, -1 past the number of candidates.
    """
    world_size, rows, columns = logits.shape
    rank = np.arange(world_size)[:, None]
    j = np.arange(columns)[None, :]
    stretch, inside = np.divmod(j, interleave)
    g = (stretch * world_size + rank) * interleave + inside
    by_position = np.argsort(g, axis=None)
    result = np.full((rows, topk), -1, dtype=np.int32)
    for t in range(rows):
        scores = logits[:, t, :]
        valid = (j < row_ends[:, t, None]) & ~np.isnan(scores)
        order = by_position[valid.reshape(-1)[by_position]]  # the valid candidates, by global position
        s = scores.reshape(-1)[order]
        best = order[np.lexsort((np.signbit(s), -s))[:topk]]  # lexsort is stable: ties stay by position
        result[t, : len(best)] = g.reshape(-1)[best]
    return result


def same_sets(ids: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """bool ``[...]``: whether each row of ``ids [..., T, K]`` holds the ids of ``reference [T, K]``."""
    return (np.sort(ids, axis=-1) == np.sort(reference, axis=-1)).all(axis=-1)
