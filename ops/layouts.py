"""Bit layouts: candidate words, LL pairs, and the sizes that follow from them.

A candidate travels as 32-bit words in one of two layouts, chosen by the dtype of the scores:

``bf16``
    word ``j < n`` is ``ord16 << 16 | (0xFFFF - (idx & 0xFFFF))``, then ``ceil(n / 32)`` words of high
    bits: bit ``j & 31`` of word ``n + (j >> 5)`` is ``idx >> 16``. 17-bit positions.
``fp32``
    words ``2 j`` and ``2 j + 1`` are ``ord32`` and the bit-inverted position.

``ord`` is the order-preserving integer of a score (:mod:`.keys`), never 0 for a valid candidate, so an
``ord`` of 0 means *empty*. ``idx`` is the position on the sending rank. Rows are padded with zero words
to a multiple of 4 (16-byte stores).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from .errors import TopkxError

#: A row holds a multiple of this many words, so that it can be moved 16 bytes at a time.
WORDS_ALIGN = 4
#: Random scores saturate a rank less than once in this many rows (see :func:`default_local_topk`).
ROWS_PER_SATURATION = 1_000_000
#: Candidates of all ranks up to which whole lists are sent: what 512 threads hold, see :func:`default_list_topk`.
WHOLE_LISTS = 4096
#: ``default_local_topk`` rounds to this: one word of high bits in ``bf16``, 64 words in ``fp32``.
LOCAL_TOPK_ALIGN = 32


@dataclass(frozen=True)
class Layout:
    """How a candidate is written. ``ord_bits`` and ``idx_bits`` are the widths of its two parts."""

    name: str
    dtype: torch.dtype
    ord_bits: int
    idx_bits: int

    @property
    def max_positions(self) -> int:
        """Positions a rank may have: what the layout and int32 ids both hold."""
        return 1 << min(self.idx_bits, 31)


BF16 = Layout("bf16", torch.bfloat16, ord_bits=16, idx_bits=17)
FP32 = Layout("fp32", torch.float32, ord_bits=32, idx_bits=32)
LAYOUTS = {layout.name: layout for layout in (BF16, FP32)}


def get_layout(name: str) -> Layout:
    """The layout called ``name``; refuses unknown names."""
    if name not in LAYOUTS:
        raise TopkxError(f"unknown word layout {name!r}: use one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def layout_of(dtype: torch.dtype) -> Layout:
    """The layout for scores of ``dtype``; refuses anything but bfloat16 and float32."""
    for layout in LAYOUTS.values():
        if layout.dtype == dtype:
            return layout
    raise TopkxError(f"logits are {dtype}: only torch.bfloat16 and torch.float32 are supported, convert them first")


def packed_row_words(n: int, layout: str) -> int:
    """32-bit words of a row of ``n`` candidates, padded to a multiple of 4."""
    words = 2 * n if get_layout(layout) is FP32 else n + -(-n // 32)
    return -(-words // WORDS_ALIGN) * WORDS_ALIGN


def ll_pairs(words: int) -> int:
    """16-byte LL pairs ``(word, epoch, word, epoch)`` that carry ``words`` words."""
    return -(-words // 2)


def ll_offset(j: int) -> int:
    """Byte offset of word ``j`` in a row of LL pairs; its epoch lies 4 bytes further on."""
    return 16 * (j // 2) + 8 * (j % 2)


def rescue_slots(topk: int, local_topk: int) -> int:
    """Most ranks that can be saturated in one row: each of them has ``local_topk`` of the ``topk`` winners."""
    return topk // local_topk if local_topk < topk else 0


def exchange_bytes(world_size: int, rows: int, topk: int, local_topk: int, layout: str) -> int:
    """Bytes of peer-visible memory one rank allots for an exchange: slots of both parities, rescue lists.

    ``2 * W * rows * 16 * ll_pairs(N words) + rescue_slots * rows * 16 * ll_pairs(K words)``
    """
    slots = 2 * world_size * ll_pairs(packed_row_words(local_topk, layout))
    lists = rescue_slots(topk, local_topk) * ll_pairs(packed_row_words(topk, layout))
    return 16 * rows * (slots + lists)


def _log_binomial_tail(n: int, p: float, at_least: int) -> float:
    """log P(Binomial(n, p) >= at_least), summed exactly from log-gamma."""
    terms = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p)
        for k in range(at_least, n + 1)
    ]
    top = max(terms)
    return top + math.log(math.fsum(math.exp(t - top) for t in terms))


@functools.cache
def default_local_topk(topk: int, world_size: int) -> int:
    """Candidates N a rank sends in round 1 so that a rescue is rare.

    A rank of W holds Binomial(K, 1/W) of the winners when scores fall on ranks at random, and it is
    saturated when it holds N or more. N is the smallest number for which that happens on any rank in
    less than one row of a million, rounded up to a multiple of 32, at most K.
    """
    if topk < 1 or world_size < 2:
        raise TopkxError(f"topk {topk} and world size {world_size}: need topk >= 1 and world size >= 2")
    limit = -math.log(ROWS_PER_SATURATION * world_size)  # union bound over the ranks
    low, high = -(-topk // world_size), topk + 1
    while low < high:
        middle = (low + high) // 2
        if middle > topk or _log_binomial_tail(topk, 1 / world_size, middle) < limit:
            high = middle
        else:
            low = middle + 1
    return min(topk, -(-low // LOCAL_TOPK_ALIGN) * LOCAL_TOPK_ALIGN)


def default_list_topk(topk: int, world_size: int) -> int:
    """N for callers that bring a local top-K (``topkx::merge_dcp_topk_``).

    To choose the best N of a list takes longer than to send and merge all of it, as long as one thread block
    holds what all ranks send in registers (docs/performance.md); with more, N is :func:`default_local_topk`.
    """
    return topk if world_size * topk <= WHOLE_LISTS else default_local_topk(topk, world_size)


def _to_int32(value: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of an int64 tensor, as int32."""
    value = value & 0xFFFFFFFF
    return (value - ((value >> 31) << 32)).to(torch.int32)


def pack_words(ord: torch.Tensor, idx: torch.Tensor, layout: str) -> torch.Tensor:
    """Candidates to words.

    Args:
        ord: int64 ``[..., n]``, order-preserving integers; 0 marks an empty place.
        idx: int64 ``[..., n]``, positions on this rank.
        layout: ``"bf16"`` or ``"fp32"``.

    Returns:
        int32 ``[..., packed_row_words(n, layout)]``; empty places and padding are 0.
    """
    n = ord.shape[-1]
    filled = ord != 0
    words = ord.new_zeros(*ord.shape[:-1], packed_row_words(n, layout))
    if get_layout(layout) is FP32:
        words[..., 0 : 2 * n : 2] = ord
        words[..., 1 : 2 * n : 2] = torch.where(filled, ~idx & 0xFFFFFFFF, 0)
    else:
        words[..., :n] = torch.where(filled, ord << 16 | (0xFFFF - (idx & 0xFFFF)), 0)
        j = torch.arange(n, device=ord.device)
        high = torch.where(filled, (idx >> 16) << (j & 31), 0)
        words.index_add_(-1, n + (j >> 5), high)
    return _to_int32(words)


def unpack_words(words: torch.Tensor, n: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Words back to ``(ord, idx)``, int64 ``[..., n]``; ``ord`` is 0 where a place is empty."""
    words = words.to(torch.int64) & 0xFFFFFFFF
    if get_layout(layout) is FP32:
        return words[..., 0 : 2 * n : 2], ~words[..., 1 : 2 * n : 2] & 0xFFFFFFFF
    j = torch.arange(n, device=words.device)
    high = (words[..., n + (j >> 5)] >> (j & 31)) & 1
    return words[..., :n] >> 16, high << 16 | (0xFFFF - (words[..., :n] & 0xFFFF))
