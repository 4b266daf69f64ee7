"""Scores that merges get wrong: ``HOSTILE`` maps a name to ``f(rng, W, T, L) -> (logits, row_ends)``.

``logits`` is float32 ``[W, T, L]`` whose values bfloat16 holds exactly (of NaNs: that they are NaN, and
their sign), ``row_ends`` int32 ``[W, T]``. :func:`bf16_bits` gives the same scores as bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Inputs = tuple[np.ndarray, np.ndarray]
Maker = Callable[[np.random.Generator, int, int, int], Inputs]
HOSTILE: dict[str, Maker] = {}


def _hostile(make: Callable[..., Inputs | np.ndarray]) -> Maker:
    def made(rng: np.random.Generator, world_size: int, rows: int, columns: int) -> Inputs:
        result = make(rng, world_size, rows, columns)
        logits, ends = result if isinstance(result, tuple) else (result, _full(world_size, rows, columns))
        return to_bf16(logits), ends.astype(np.int32)

    HOSTILE[make.__name__] = made
    return made


def to_bf16(logits: np.ndarray) -> np.ndarray:
    """``logits`` cut to values that bfloat16 holds, as float32; NaNs stay NaN."""
    return (logits.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def bf16_bits(logits: np.ndarray) -> np.ndarray:
    """uint16 bits of bfloat16 of values that it holds exactly."""
    return (logits.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def stacked(
    rng: np.random.Generator, world_size: int, rows: int, columns: int, names: list[str] | None = None
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """``rows`` rows of each maker (``names``: of those) as one input; and which maker made each row."""
    names = list(HOSTILE) if names is None else names
    made = [HOSTILE[name](rng, world_size, rows, columns) for name in names]
    logits, ends = (np.concatenate(parts, axis=1) for parts in zip(*made, strict=True))
    return logits, ends, [name for name in names for _ in range(rows)]


def _full(world_size: int, rows: int, columns: int) -> np.ndarray:
    return np.full((world_size, rows), columns)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@_hostile
def random_scores(rng, world_size, rows, columns):
    return _normal(rng, world_size, rows, columns)


@_hostile
def ties(rng, world_size, rows, columns):
    """Five values, so that the threshold always falls into ties across all ranks."""
    return rng.integers(-2, 3, (world_size, rows, columns)).astype(np.float32)


@_hostile
def all_equal(rng, world_size, rows, columns):
    values = np.resize(np.float32([0.0, -0.0, 1.5, -np.inf, np.inf, -3.0]), rows)
    return np.broadcast_to(values[None, :, None], (world_size, rows, columns)).copy()


@_hostile
def one_rank_has_all(rng, world_size, rows, columns):
    logits = _normal(rng, world_size, rows, columns)
    rows_of = np.arange(rows)
    logits[rows_of % world_size, rows_of] += 100
    return logits


@_hostile
def two_ranks_have_all(rng, world_size, rows, columns):
    """The first and the last rank, alternately by position, hold all that belongs."""
    logits = _normal(rng, world_size, rows, columns) - 100
    best = 10.0 + rng.permuted(np.tile(np.arange(columns) % 64, (rows, 1)), axis=1)
    logits[0], logits[-1] = best, best
    return logits


@_hostile
def staircase(rng, world_size, rows, columns):
    """In row t one rank has exactly t + 1 of the best: below, at and above its N, for any small N."""
    logits = _normal(rng, world_size, rows, columns)
    for t in range(rows):
        places = rng.choice(columns, min(t + 1, columns), replace=False)
        logits[t % world_size, t, places] += 100
    return logits


@_hostile
def nan_of_both_signs(rng, world_size, rows, columns):
    logits = _normal(rng, world_size, rows, columns)
    bits = np.uint32([0x7FC00000, 0xFFC00000, 0x7F810000, 0xFFFF0000]).view(np.float32)
    mask = rng.random(logits.shape) < np.linspace(0.2, 1.0, rows)[None, :, None]  # the last row: nothing else
    logits.view(np.uint32)[mask] = rng.choice(bits, int(mask.sum())).view(np.uint32)
    return logits


@_hostile
def infinities(rng, world_size, rows, columns):
    logits = _normal(rng, world_size, rows, columns)
    kind = rng.random(logits.shape)
    logits[kind < 0.4], logits[kind > 0.6] = -np.inf, np.inf
    return logits


@_hostile
def signed_zeros(rng, world_size, rows, columns):
    logits = np.where(rng.random((world_size, rows, columns)) < 0.5, np.float32(0.0), np.float32(-0.0))
    return np.where(rng.random(logits.shape) < 0.05, _normal(rng, *logits.shape), logits)


@_hostile
def denormals(rng, world_size, rows, columns):
    """Denormals of both signs that bfloat16 holds too, among zeros: flushed to zero they would tie."""
    bits = rng.integers(0, 0x80, (world_size, rows, columns)).astype(np.uint32) << 16
    return (bits | rng.integers(0, 2, bits.shape).astype(np.uint32) << 31).view(np.float32)


@_hostile
def empty_shards(rng, world_size, rows, columns):
    ends = _full(world_size, rows, columns)
    ends[rng.random(ends.shape) < 0.5] = 0
    ends[:, -1] = 0  # and a row with no candidate at all
    return _normal(rng, world_size, rows, columns), ends


@_hostile
def short_rows(rng, world_size, rows, columns):
    """What lies past an end is stale and best of all; most rows have fewer candidates than K."""
    logits = _normal(rng, world_size, rows, columns)
    ends = rng.integers(0, min(columns, 12) + 1, (world_size, rows))
    logits[np.arange(columns) >= ends[..., None]] = np.inf
    return logits, ends


@_hostile
def speculative_rows(rng, world_size, rows, columns):
    """Rows of one request: the same scores, each row seeing one global position more than the last."""
    logits = np.repeat(_normal(rng, world_size, 1, columns), rows, axis=1)
    last = world_size * columns - rows - int(rng.integers(0, max(1, columns // 2)))
    ends = np.maximum(last + np.arange(rows)[None, :] - np.arange(world_size)[:, None] + world_size - 1, 0)
    return logits, np.minimum(ends // world_size, columns)
