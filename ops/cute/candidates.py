"""What selection asks of where candidates come from, and of what becomes of those that are kept.

A candidate is an ``ord`` (0: empty) and a position; the better of two has the larger ``ord``, then the
smaller position.
"""

from __future__ import annotations

from typing import Protocol

import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64

from .primitives import WARP


class Source(Protocol):
    """Where the candidates of a row come from.

    Which candidates a thread has is what :func:`candidate` says: consecutive lanes read consecutive memory, and
    the candidates of a warp are consecutive, so that one scan over the warps orders them all.

    Attributes:
        items: candidates a thread holds at once.
        groups: times ``items`` that a thread has; 1 and registers are then loaded once, or a traced value.
    """

    items: int
    groups: int | Int32

    def load(self, group: Int32, ords: cute.Tensor, positions: cute.Tensor) -> None:
        """Fills the registers ``ords`` and ``positions`` (whatever where the ord is 0) with a group."""


class Sink(Protocol):
    """What becomes of the candidates that are kept: ``put`` puts those at their places. All threads call each.

    ``observe`` is told of every candidate before any is put; ``publish`` may then leave words 0..31 of
    the partials 0 and 1, one a warp, which ``collect`` finds after a barrier.
    """

    def observe(self, group: Int32, i: int, kept: Boolean, position: Uint32) -> None: ...

    def publish(self, partials: cute.Tensor, warp: Int32, lane: Int32) -> None: ...

    def collect(self, partials: cute.Tensor, warps: int, lane: Int32) -> None: ...

    def put(self, kept: Boolean, place: Int32, group: Int32, i: int, ord: Uint32, position: Uint32) -> None: ...


def candidate(items: int, i: int, group: Int32 | int = 0, groups: Int32 | int = 1) -> Int32:
    """Candidate ``i`` of this thread in ``group``, for ``items`` and ``groups`` as :class:`Source` has them."""
    tid, _, _ = cute.arch.thread_idx()
    return ((tid // WARP * groups + group) * items + i) * WARP + tid % WARP


def is_kept(ord: Uint32, position: Uint32, high: Uint32, low: Uint32) -> Boolean:
    """Whether a candidate ranks at or above the threshold ``(high, low)``; ``high`` is at least 1."""
    return _key(ord, ~position) >= _key(high, low)


def _key(high: Uint32, low: Uint32) -> Uint64:
    """Two words that are compared as one."""
    return (Uint64(high) << 32) | Uint64(low)
