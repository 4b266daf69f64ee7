"""Random dumps: one generator for ``fuzz`` and for the property tests, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..ops.layouts import BF16, FP32, LAYOUTS, default_local_topk, exchange_bytes
from .dump import Dump
from .hostile import HOSTILE, bf16_bits, stacked

#: A whole number from ``low`` to ``high``, both included: of a seeded generator, or of hypothesis.
Choose = Callable[[int, int], int]
WRAP = 1 << 32  # of epochs
#: An exchange has K // N lists of K candidates a row: with N = 1 and a large K, more memory than there is.
MOST_RESCUE_SLOTS = 64
MEMORY = 1 << 28  # bytes of the exchanges of all ranks


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for."""

    world_size: int
    topk: int
    local_topk: int
    layout: str


@dataclass(frozen=True)
class Limits:
    """Most of what a dump may have.

    Attributes:
        calls, rows, columns: calls, rows of a call, positions a rank.
        candidates: of a call, all ranks together; fewer rows where rows are long.
    """

    calls: int
    rows: int
    columns: int
    candidates: int


def choose_shape(choose: Choose, world_sizes: Sequence[int], most_topk: int) -> Shape:
    """Any shape; N is often K, the default, as small as may be, or so small that several ranks are saturated."""
    world_size = _one_of(choose, world_sizes)
    topk = choose(1, _one_of(choose, [size for size in (8, 64, 300, 2048) if size <= most_topk]))
    least = -(-topk // MOST_RESCUE_SLOTS)
    kinds = [topk, least, default_local_topk(topk, world_size), min(topk, topk // world_size + 1), choose(least, topk)]
    return Shape(world_size, topk, _one_of(choose, kinds), _one_of(choose, list(LAYOUTS)))


def choose_dump(choose: Choose, shape: Shape, limits: Limits) -> Dump:
    """Scores, row ends, interleave, KV map, calls and first epoch for ``shape``."""
    interleave = _one_of(choose, (1, 2, 3, 16, 64))
    form = choose(0, 4)
    block_size, lists = interleave * max(form - 1, 0), int(form == 0)  # local top-Ks; ids; or ids and KV rows
    columns = choose(1, _one_of(choose, (min(limits.columns, 2 * shape.topk), limits.columns)))
    row_bytes = exchange_bytes(shape.world_size, 1, shape.topk, shape.local_topk, shape.layout)
    most = limits.candidates // (shape.world_size * max(columns, shape.local_topk))
    most = max(1, min(limits.rows, most, MEMORY // (shape.world_size * row_bytes)))
    calls = tuple(choose(1, most) for _ in range(choose(1, limits.calls)))
    epoch = _one_of(choose, (0, WRAP - choose(3, 10), WRAP // 2 - choose(1, 8)))  # the wrap, and that of int32
    makers = list(HOSTILE)
    first = choose(0, len(makers) - 1)
    names = makers[first : choose(first, len(makers) - 1) + 1]
    rng = np.random.default_rng(choose(0, WRAP - 1))
    logits, ends, _ = stacked(rng, shape.world_size, -(-sum(calls) // len(names)), columns, names)
    rows = rng.permutation(ends.shape[1])[: sum(calls)]
    logits, ends = (np.ascontiguousarray(array[:, rows]) for array in (logits, ends))
    if shape.layout == FP32.name and choose(0, 1):  # makers give scores that bfloat16 holds: set the lower bits too
        logits.view(np.uint32)[:, rng.random(len(rows)) < 0.5] |= rng.integers(0, 1 << 16, columns).astype(np.uint32)
    scores = {"logits_bf16": bf16_bits(logits)} if shape.layout == BF16.name else {"logits": logits}
    numbers = {
        "calls": np.int64(calls),
        "epoch": np.int64(epoch),
        "block_size": np.int64(block_size),
        "lists": np.int64(lists),
    }
    return Dump.checked({**scores, "row_ends": ends, **numbers}, shape.topk, interleave, shape.local_topk)


def _one_of(choose: Choose, values: Sequence) -> object:
    return values[choose(0, len(values) - 1)]
