"""The CUDA backend on one GPU: kernels and W virtual ranks, against the CPU backend bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from merging import Ranks, assert_merged, expected, kv_maps

from vllm_topkx.cli.hostile import HOSTILE, stacked
from vllm_topkx.ops.cpu import select as cpu
from vllm_topkx.ops.layouts import default_local_topk, layout_of
from vllm_topkx.ops.reference import reference_topk, same_sets
from vllm_topkx.ops.spec import KvMap, Merged, MergeSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]

if torch.cuda.is_available():
    from vllm_topkx.ops.cute import launch
    from vllm_topkx.ops.cute.loopback import Loopback

DTYPES = [torch.float32, torch.bfloat16]


def on_gpu(tensors: Ranks) -> Ranks:
    return [tensor.cuda() for tensor in tensors]


def kv_on_gpu(kv: KvMap | None) -> KvMap | None:
    return kv and KvMap(kv.block_table.cuda(), kv.req_id.cuda(), kv.block_size, kv.block_stride)


def to_cpu(merged: Merged) -> Merged:
    return Merged(merged.rows.cpu(), merged.valid.cpu(), merged.ids.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 40, 352, 2048, 4096])
@pytest.mark.parametrize("columns", [1, 31, 5000, 131072])
def test_local_topk_words(dtype: torch.dtype, n: int, columns: int) -> None:
    logits, ends, _ = stacked(np.random.default_rng(n), 1, 2, columns)
    logits, ends = torch.from_numpy(logits[0]).to(dtype), torch.from_numpy(ends[0])
    wide = torch.nn.functional.pad(logits, (1, 2)).cuda()  # a row stride, and rows that are not aligned
    words = launch.local_topk_words(wide[:, 1:-2], ends.cuda(), n)
    assert torch.equal(words.cpu(), cpu.local_topk_words(logits, ends, n))


def merge_cases():
    """World size, K, N: the default N, N = K, and N so small that rescues are common."""
    for world_size in (2, 4, 8, 16):
        for k in (512, 2048):
            yield world_size, k, default_local_topk(k, world_size)
        yield world_size, 512, 512
        yield world_size, 300, 300 // world_size + 5
    yield 3, 1, 1
    yield 5, 4096, 1000
    yield 16, 2048, 2048


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size, k, n", merge_cases())
def test_topk_select(dtype: torch.dtype, world_size: int, k: int, n: int) -> None:
    columns, interleave = 3000, 16
    logits, ends, _ = stacked(np.random.default_rng(k), world_size, 1, columns)
    rows = ends.shape[1]
    per_rank = zip(torch.from_numpy(logits).to(dtype), torch.from_numpy(ends), strict=True)
    gathered = torch.stack([cpu.local_topk_words(x, e, n) for x, e in per_rank])
    kv = kv_maps(0, 1, rows, columns, 64)[0]
    spec = MergeSpec(world_size - 1, world_size, k, n, interleave, layout_of(dtype))
    want, saturation = cpu.select_words(gathered, spec, kv, emit_ids=True)
    got, got_saturation = launch.topk_select(gathered.cuda(), spec, kv_on_gpu(kv), True)
    assert torch.equal(got_saturation.cpu(), saturation)
    assert_merged(to_cpu(got), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size, k, n", merge_cases())
def test_exchange_merge_of_hostile_rows(dtype: torch.dtype, world_size: int, k: int, n: int) -> None:
    columns, interleave = 3000, 16
    numbers, number_ends, _ = stacked(np.random.default_rng(n), world_size, 2, columns)
    rows = number_ends.shape[1]
    logits, ends = list(torch.from_numpy(numbers).to(dtype)), list(torch.from_numpy(number_ends))
    words = [cpu.local_topk_words(x, e, n) for x, e in zip(logits, ends, strict=True)]
    lists = [cpu.local_topk_words(x, e, k) for x, e in zip(logits, ends, strict=True)]
    kv = kv_maps(0, world_size, rows, columns, 64)
    loopback = Loopback(world_size, rows, k, n, dtype)
    reference = reference_topk(numbers, number_ends, k, interleave)
    inputs = on_gpu(words), on_gpu(logits), on_gpu(ends)
    for call in range(3):
        with_rows = [kv_on_gpu(m) for m in kv] if call else None
        got = loopback.exchange_merge(*inputs, interleave, with_rows, emit_ids=True)
        loopback.synchronize()
        for rank, merged in enumerate(got):
            of_rank = kv[rank] if call else None
            assert_merged(to_cpu(merged), expected(words, lists, loopback.spec(rank, interleave), of_rank))
            assert same_sets(merged.ids.cpu().numpy(), reference).all()
            assert loopback.exchanges[rank].epoch.tolist() == [call + 1] * rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size, k, n", merge_cases())
def test_vllms_contract_in_place(dtype: torch.dtype, world_size: int, k: int, n: int) -> None:
    columns, interleave = 4500, 1
    numbers, number_ends, _ = stacked(np.random.default_rng(n), world_size, 1, columns)
    logits, ends = list(torch.from_numpy(numbers).to(dtype)), list(torch.from_numpy(number_ends))
    rows = number_ends.shape[1]
    starts = [torch.arange(rows, dtype=torch.int32) % 5 for _ in range(world_size)]
    indices = []
    for x, e, s in zip(logits, ends, starts, strict=True):
        column = torch.arange(columns)
        inside = (column >= s[:, None]) & (column < e[:, None])
        best = torch.where(inside, x.float().nan_to_num(-torch.inf), -torch.inf).topk(k, dim=-1)
        local = torch.where(best.values > -torch.inf, best.indices - s[:, None], -1).to(torch.int32)
        indices.append(local[:, torch.randperm(k)])
    words, lists = zip(
        *[cpu.words_of_local_topk(*of_rank, n) for of_rank in zip(logits, indices, starts, strict=True)], strict=True
    )
    loopback = Loopback(world_size, rows, k, n, dtype)
    buffers = [torch.full((rows, k + 8), -7, dtype=torch.int32, device="cuda") for _ in range(world_size)]
    for buffer, local in zip(buffers, indices, strict=True):
        buffer[:, :k] = local.cuda()
    in_place = [buffer[:, :k] for buffer in buffers]
    loopback.merge_dcp_topk_(on_gpu(logits), in_place, interleave, on_gpu(starts))
    loopback.synchronize()
    for rank, buffer in enumerate(buffers):
        want = expected(words, lists, loopback.spec(rank, interleave), None)
        assert torch.equal(buffer[:, :k].cpu(), want.ids)
        assert (buffer[:, k:] == -7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rescue_storms(dtype: torch.dtype) -> None:
    """Every row is rescued, in the exchange and after an all-gather, with more rows than blocks."""
    world_size, k, n, columns, rows = 8, 256, 40, 600, 80
    loopback = Loopback(world_size, rows, k, n, dtype)
    for call, name in enumerate(["one_rank_has_all", "two_ranks_have_all", "staircase"]):
        numbers, number_ends = HOSTILE[name](np.random.default_rng(call), world_size, rows, columns)
        logits, ends = list(torch.from_numpy(numbers).to(dtype)), list(torch.from_numpy(number_ends))
        words = [cpu.local_topk_words(x, e, n) for x, e in zip(logits, ends, strict=True)]
        lists = [cpu.local_topk_words(x, e, k) for x, e in zip(logits, ends, strict=True)]
        kv = kv_maps(call, world_size, rows, columns, 64)
        kv_gpu = [kv_on_gpu(m) for m in kv]
        inputs = on_gpu(logits), on_gpu(ends)
        merged = loopback.exchange_merge(on_gpu(words), *inputs, 1, kv_gpu)
        gathered = torch.stack(words).cuda()
        first = [launch.topk_select(gathered, loopback.spec(r, 1), kv_gpu[r], True) for r in range(world_size)]
        assert (first[0][1] != 0).sum() > rows // 2
        rescued, saturation = zip(*first, strict=True)
        loopback.topk_rescue(gathered, saturation, rescued, *inputs, 1, kv_gpu)
        loopback.synchronize()
        for rank in range(world_size):
            want = expected(words, lists, loopback.spec(rank, 1), kv[rank])
            assert_merged(to_cpu(merged[rank]), want)
            assert_merged(to_cpu(rescued[rank]), want)


def test_epochs_wrap_through_zero() -> None:
    world_size, k, n, rows = 4, 128, 48, 8
    loopback = Loopback(world_size, rows, k, n)
    for exchange in loopback.exchanges:
        exchange.epoch.fill_(-6)
        exchange.list_epoch.fill_(-6)
    for call in range(12):
        numbers, number_ends, _ = stacked(
            np.random.default_rng(call), world_size, 4, 400, ["one_rank_has_all", "random_scores"]
        )
        logits, ends = list(torch.from_numpy(numbers)), list(torch.from_numpy(number_ends))
        words = [cpu.local_topk_words(x, e, n) for x, e in zip(logits, ends, strict=True)]
        got = loopback.exchange_merge(on_gpu(words), on_gpu(logits), on_gpu(ends))
        loopback.synchronize()
        reference = reference_topk(numbers, number_ends, k, 1)
        for merged in got:
            assert same_sets(merged.ids.cpu().numpy(), reference).all()
    assert loopback.exchanges[0].epoch.tolist() == [6] * rows


def test_replayed_graph_advances_the_epochs() -> None:
    world_size, k, rows, columns = 4, 256, 6, 2000
    loopback = Loopback(world_size, rows, k)
    n = loopback.exchanges[0].settings.local_topk
    logits = torch.zeros(world_size, rows, columns, device="cuda")
    ends = torch.full((world_size, rows), columns, dtype=torch.int32, device="cuda")

    def merge() -> list[Merged]:
        words = [launch.local_topk_words(x, e, n) for x, e in zip(logits, ends, strict=True)]
        return loopback.exchange_merge(words, list(logits), list(ends))

    merge()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = merge()
    for replay in range(20):
        numbers = np.random.default_rng(replay).standard_normal((world_size, rows, columns)).astype(np.float32)
        numbers[replay % world_size] += 3 * (replay % 2)
        logits.copy_(torch.from_numpy(numbers))
        graph.replay()
        loopback.synchronize()
        reference = reference_topk(numbers, ends.cpu().numpy(), k, 1)
        for merged in got:
            assert same_sets(merged.ids.cpu().numpy(), reference).all()
    assert loopback.exchanges[0].epoch.tolist() == [21] * rows


def test_no_rows_and_no_columns() -> None:
    words = launch.local_topk_words(
        torch.zeros(3, 0, device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda"), 8
    )
    assert words.shape == (3, 16) and not words.any()
    loopback = Loopback(2, 4, 16, 16)
    empty = torch.zeros(0, 32, dtype=torch.int32, device="cuda")
    got = loopback.exchange_merge([empty] * 2, [torch.zeros(0, 9, device="cuda")] * 2, [empty[:, 0]] * 2)
    assert [merged.ids.shape for merged in got] == [(0, 16)] * 2
