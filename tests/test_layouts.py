"""Words, keys and sizes: sections 3 and 4 of the specification, against independent arithmetic."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_topkx.ops import keys, layouts
from vllm_topkx.ops.errors import TopkxError

SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 1e-45, -1e-45, 3.4e38, -3.4e38, 1e-38, -1e-38]


def ord_of_float(value: float, bits: int) -> int:
    """The specification's map, on Python integers."""
    raw = struct.unpack("<I", struct.pack("<f", value))[0] >> (32 - bits)
    sign = 1 << (bits - 1)
    return raw ^ ((1 << bits) - 1) if raw & sign else raw | sign


@pytest.mark.parametrize("dtype, bits", [(torch.float32, 32), (torch.bfloat16, 16)])
def test_ord_is_the_specified_map_and_keeps_the_order(dtype: torch.dtype, bits: int) -> None:
    values = torch.tensor(SPECIAL, dtype=dtype)
    ords = keys.score_ord(values)
    assert ords.tolist() == [ord_of_float(float(v), bits) for v in values]
    by_ord = sorted(zip(ords.tolist(), values.tolist(), strict=True))
    assert [v for _, v in by_ord] == sorted(values.tolist())
    assert keys.score_ord(torch.tensor(0.0, dtype=dtype)) > keys.score_ord(torch.tensor(-0.0, dtype=dtype))
    assert ords.min() >= 1


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
def test_nan_of_either_sign_is_empty(bits: int) -> None:
    nan = torch.tensor([bits], dtype=torch.uint32).view(torch.float32)
    assert nan.isnan().all()
    assert keys.score_ord(nan).item() == 0


def test_every_bfloat16_is_ordered() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    finite = every[~every.isnan()]
    ords = keys.score_ord(finite)
    assert len(ords.unique()) == len(finite)
    ascending = finite[ords.argsort()].to(torch.float32)
    assert (ascending[1:] >= ascending[:-1]).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), layout=st.sampled_from(["bf16", "fp32"]), n=st.integers(1, 70))
def test_words_round_trip(data: st.DataObject, layout: str, n: int) -> None:
    bits = layouts.LAYOUTS[layout].ord_bits
    positions = min(1 << layouts.LAYOUTS[layout].idx_bits, 1 << 31)
    ord = torch.tensor(data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=n, max_size=n)))
    idx = torch.tensor(data.draw(st.lists(st.integers(0, positions - 1), min_size=n, max_size=n)))
    words = layouts.pack_words(ord[None], idx[None], layout)
    assert words.dtype == torch.int32
    assert words.shape == (1, layouts.packed_row_words(n, layout))
    got_ord, got_idx = layouts.unpack_words(words, n, layout)
    assert got_ord[0].tolist() == ord.tolist()
    filled = ord != 0
    assert got_idx[0][filled].tolist() == idx[filled].tolist()


def test_bf16_words_are_the_specified_bits() -> None:
    idx = [0, 1, 65535, 65536, 131071] + [7] * 30
    ord = list(range(100, 100 + len(idx)))
    words = layouts.pack_words(torch.tensor([ord]), torch.tensor([idx]), "bf16")[0].to(torch.int64) & 0xFFFFFFFF
    n = len(idx)
    assert layouts.packed_row_words(n, "bf16") == 40 == len(words)  # 35 + 2, padded to 4
    for j in range(n):
        assert words[j] == ord[j] << 16 | (0xFFFF - (idx[j] & 0xFFFF))
        assert words[n + (j >> 5)] >> (j & 31) & 1 == idx[j] >> 16
    assert words[n + 2 :].tolist() == [0] * 3


def test_fp32_words_are_the_specified_bits() -> None:
    words = layouts.pack_words(torch.tensor([[0xFFFFFFFE, 0]]), torch.tensor([[(1 << 31) - 1, 5]]), "fp32")
    assert (words.to(torch.int64) & 0xFFFFFFFF).tolist() == [[0xFFFFFFFE, 0x80000000, 0, 0]]


@pytest.mark.parametrize(
    "n, layout, words",
    [(1, "fp32", 4), (2, "fp32", 4), (3, "fp32", 8), (1, "bf16", 4), (32, "bf16", 36), (33, "bf16", 36)],
)
def test_packed_row_words(n: int, layout: str, words: int) -> None:
    assert layouts.packed_row_words(n, layout) == words


def test_ll_pairs_hold_two_words_with_their_epochs() -> None:
    assert [layouts.ll_pairs(w) for w in (4, 5, 8)] == [2, 3, 4]
    assert [layouts.ll_offset(j) for j in range(4)] == [0, 8, 16, 24]


@pytest.mark.parametrize("world_size", [2, 3, 16])
@pytest.mark.parametrize("interleave", [1, 3, 64])
def test_global_positions_are_a_bijection(world_size: int, interleave: int) -> None:
    j = torch.arange(200)
    rank = torch.arange(world_size)[:, None]
    g = keys.global_position(j, rank, world_size, interleave)
    assert g.unique().numel() == g.numel()
    owner, local = keys.owner_and_local(g, world_size, interleave)
    assert (owner == rank).all() and (local == j).all()


def test_keys_are_exact_beyond_2_to_24() -> None:
    g = torch.tensor([(1 << 24) + 1, (1 << 24) + 2, (1 << 31) - 1])
    key = keys.selection_key(torch.full_like(g, 0xFFFFFFFF), g)
    assert keys.key_position(key).tolist() == g.tolist()
    assert key[0] > key[1] > key[2] > 0
    assert keys.key_position(torch.tensor([0])).tolist() == [-1]


def binomial_saturation(topk: int, world_size: int, n: int) -> float:
    p = 1 / world_size
    return world_size * sum(math.comb(topk, k) * p**k * (1 - p) ** (topk - k) for k in range(n, topk + 1))


@pytest.mark.parametrize("topk, world_size", [(512, 2), (512, 16), (64, 4), (100, 3)])
def test_default_local_topk_saturates_less_than_once_in_a_million_rows(topk: int, world_size: int) -> None:
    n = layouts.default_local_topk(topk, world_size)
    assert n == topk or (n % 32 == 0 and binomial_saturation(topk, world_size, n) < 1e-6)
    assert n < 64 or n == topk or binomial_saturation(topk, world_size, n - 32) > 1e-6


def test_default_local_topk_of_the_models() -> None:
    assert [layouts.default_local_topk(2048, w) for w in (2, 4, 8, 16)] == [1152, 640, 352, 192]
    assert layouts.default_local_topk(1, 2) == 1


def test_short_lists_are_sent_whole() -> None:
    assert [layouts.default_list_topk(2048, w) for w in (2, 4, 8)] == [2048, 640, 352]
    assert [layouts.default_list_topk(512, w) for w in (8, 16)] == [512, layouts.default_local_topk(512, 16)]


def test_rescue_slots_and_bytes() -> None:
    assert layouts.rescue_slots(2048, 352) == 5
    assert layouts.rescue_slots(2048, 2048) == 0
    n, k = layouts.packed_row_words(352, "fp32"), layouts.packed_row_words(2048, "fp32")
    assert layouts.exchange_bytes(8, 256, 2048, 352, "fp32") == 256 * (2 * 8 * n * 8 + 5 * k * 8)
    assert layouts.exchange_bytes(8, 256, 2048, 352, "fp32") < 100e6


def test_unknown_layouts_and_dtypes_are_refused() -> None:
    with pytest.raises(TopkxError, match="unknown word layout 'fp8'"):
        layouts.packed_row_words(4, "fp8")
    with pytest.raises(TopkxError, match=r"torch\.float16"):
        layouts.layout_of(torch.float16)
    with pytest.raises(TopkxError, match="world size 1"):
        layouts.default_local_topk(4, 1)
