"""The smallest part of a dump that still fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from .dump import Dump

Fails = Callable[[Dump], bool]


def shrink(dump: Dump, fails: Fails) -> Dump:
    """``dump`` with the fewest rows, then columns, that are found to fail; ``dump`` fails."""
    dump = with_rows(dump, _fewest(dump.rows, lambda rows: fails(with_rows(dump, rows))))
    columns = dump.logits.shape[2]
    return with_columns(dump, _fewest(columns, lambda some: fails(with_columns(dump, some))))


def with_rows(dump: Dump, rows: np.ndarray) -> Dump:
    """The rows ``rows``, ascending, in the calls that they were in."""
    call_of_row = np.repeat(np.arange(len(dump.calls)), dump.calls)[rows] if dump.calls else rows
    calls = tuple(np.unique(call_of_row, return_counts=True)[1].tolist()) if dump.calls else ()
    logits, ends = (np.ascontiguousarray(array[:, rows]) for array in (dump.logits, dump.row_ends))
    return replace(dump, logits=logits, row_ends=ends, calls=calls)


def with_columns(dump: Dump, columns: np.ndarray) -> Dump:
    """The local positions ``columns``, ascending, of every rank; each row ends where it did among them."""
    ends = np.searchsorted(columns, dump.row_ends).astype(np.int32)
    return replace(dump, logits=np.ascontiguousarray(dump.logits[:, :, columns]), row_ends=ends)


def _fewest(count: int, fails: Callable[[np.ndarray], bool]) -> np.ndarray:
    """Some of ``range(count)`` that fail: all but the halves, quarters and so on that can be left out."""
    kept, length = np.arange(count), count // 2
    while length:
        start = 0
        while start < len(kept) > 1:
            rest = np.delete(kept, slice(start, start + length))
            if len(rest) and fails(rest):
                kept = rest
            else:
                start += length
        length //= 2
    return kept
