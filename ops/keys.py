"""The total order: scores to integers, local to global positions, and 64-bit selection keys.

A larger key is better: score descending, then global position ascending. All of it is integer
arithmetic; a position never passes through a float.
"""

from __future__ import annotations

import torch

from .layouts import layout_of

#: Global positions are int32 ids, so 31 bits of a key are enough and a key stays a positive int64.
ID_BITS = 31
ID_MASK = (1 << ID_BITS) - 1


def score_ord(scores: torch.Tensor) -> torch.Tensor:
    """The order-preserving integer of each score, int64: 0 for NaN of either sign, else at least 1.

    Negative: all bits inverted; else: the sign bit set. +0.0 ranks above -0.0, -inf is a score.

    Args:
        scores: bfloat16 or float32, any shape; ``ord`` has 16 or 32 bits accordingly.
    """
    layout = layout_of(scores.dtype)
    as_int = torch.int16 if layout.ord_bits == 16 else torch.int32
    sign, mask = 1 << (layout.ord_bits - 1), (1 << layout.ord_bits) - 1
    bits = scores.contiguous().view(as_int).to(torch.int64) & mask
    return torch.where(scores.isnan(), 0, torch.where(bits >= sign, ~bits & mask, bits | sign))


def global_position(j: torch.Tensor, rank: int | torch.Tensor, world_size: int, interleave: int) -> torch.Tensor:
    """Global position of local position ``j`` of ``rank``: stretches of ``interleave`` go round the ranks."""
    return (j // interleave) * (world_size * interleave) + rank * interleave + j % interleave


def owner_and_local(g: torch.Tensor, world_size: int, interleave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse: which rank holds global position ``g``, and where."""
    stretch = g // interleave
    return stretch % world_size, (stretch // world_size) * interleave + g % interleave


def selection_key(ord: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """``ord << 31 | (2**31 - 1 - position)``, int64; 0 (smaller than any candidate) where ``ord`` is 0."""
    return torch.where(ord != 0, ord << ID_BITS | (ID_MASK - position), 0)


def key_position(key: torch.Tensor) -> torch.Tensor:
    """The position in a key, int64; -1 for the empty key."""
    return torch.where(key != 0, ID_MASK - (key & ID_MASK), -1)
