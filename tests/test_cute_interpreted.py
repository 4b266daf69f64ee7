"""The kernels' PTX, run in an interpreter on hostile rows, against the CPU backend bit for bit."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from interpreted import Interpreted, interpreting, run_alone
from merging import assert_merged, expected, kv_maps
from ptx_interpreter import Trapped
from shared_memory import SHARED_BYTES

from vllm_topkx.cli.hostile import HOSTILE, stacked
from vllm_topkx.cli.merge_dump import local_lists
from vllm_topkx.ops.cpu import select as cpu
from vllm_topkx.ops.cute import launch
from vllm_topkx.ops.cute.record import RECORD_WORDS, RowEndRecord
from vllm_topkx.ops.errors import ExchangeTimeoutError, TopkxError
from vllm_topkx.ops.layouts import layout_of
from vllm_topkx.ops.reference import reference_topk, same_sets
from vllm_topkx.ops.spec import MergeSpec

DTYPES = [torch.float32, torch.bfloat16]


#: Rows for tests of many ranks: without rescue, with one, with two; and ties.
FEW = ["random_scores", "one_rank_has_all", "two_ranks_have_all", "ties"]


def hostile_ranks(seed: int, world_size: int, rows: int, columns: int, dtype: torch.dtype, names=None):
    """Logits and row ends of all ranks, by rank, and the numpy arrays they come of."""
    logits, ends, _ = stacked(np.random.default_rng(seed), world_size, rows, columns, names)
    return [torch.from_numpy(x).to(dtype) for x in logits], [torch.from_numpy(e) for e in ends], logits, ends


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 40, 300])
def test_local_topk_words(dtype: torch.dtype, n: int) -> None:
    for seed, columns in enumerate((1, 31, 2000)):
        (logits, *_), (ends, *_), _, _ = hostile_ranks(seed, 2, 2, columns, dtype)
        logits = torch.nn.functional.pad(logits, (1, 2))[:, 1:-2]  # a row stride, and rows that are not aligned
        words = run_alone(launch.local_topk_words, logits, ends, n)
        assert torch.equal(words, cpu.local_topk_words(logits, ends, n))


@pytest.mark.parametrize("dtype", DTYPES)
def test_words_of_long_rows(dtype: torch.dtype) -> None:
    columns, n = 20000, 300  # more than registers hold
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((6, columns), dtype=np.float32))
    rows[1] = 1 + rows[1].abs() / 8  # one exponent: the first pass leaves too many
    rows[2, 7000:7400] += 50  # the best are neighbours
    rows[3] = (rows[3] * 3).round()  # ties
    rows[4] = 0.5  # all tie
    rows[5, 200:] = torch.nan  # fewer than N
    ends = torch.tensor([columns, columns - 1, columns, 17001, columns, columns], dtype=torch.int32)
    logits = rows.to(dtype)
    assert torch.equal(run_alone(launch.local_topk_words, logits, ends, n), cpu.local_topk_words(logits, ends, n))


@pytest.mark.parametrize("columns", [0, 9])
def test_an_empty_row_is_not_read(columns: int) -> None:
    ends = torch.zeros(2, dtype=torch.int32)
    assert not run_alone(launch.local_topk_words, torch.zeros(2, columns), ends, 8).any()


def test_all_positions_of_the_bf16_layout() -> None:
    logits = torch.from_numpy(HOSTILE["ties"](np.random.default_rng(0), 1, 1, 1 << 17)[0][0]).to(torch.bfloat16)
    ends = torch.tensor([1 << 17], dtype=torch.int32)
    assert torch.equal(run_alone(launch.local_topk_words, logits, ends, 300), cpu.local_topk_words(logits, ends, 300))


@pytest.mark.parametrize("end", [-1, 51])
def test_a_row_end_outside_the_columns_is_refused(end: int) -> None:
    record = RowEndRecord(torch.zeros(RECORD_WORDS, dtype=torch.int32))
    ends = torch.tensor([50, end], dtype=torch.int32)
    with pytest.raises(Trapped):
        run_alone(launch.local_topk_words, torch.zeros(2, 50), ends, 8, record=record)
    with pytest.raises(TopkxError, match=rf"row_ends\[1\] is {end}: must lie in 0\.\.50"):
        record.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "world_size, k, n, interleave", [(4, 64, 32, 4), (5, 100, 37, 3), (2, 33, 33, 1), (16, 300, 96, 1)]
)
def test_topk_select(dtype: torch.dtype, world_size: int, k: int, n: int, interleave: int) -> None:
    logits, ends, _, _ = hostile_ranks(1, world_size, 1, 400, dtype)
    gathered = torch.stack([cpu.local_topk_words(x, e, n) for x, e in zip(logits, ends, strict=True)])
    rank = world_size - 1
    spec = MergeSpec(rank, world_size, k, n, interleave, layout_of(dtype))
    kv = kv_maps(0, 1, gathered.shape[1], 400, 12 * interleave)[0]
    want, saturation = cpu.select_words(gathered, spec, kv, emit_ids=True)
    got, got_saturation = run_alone(launch.topk_select, gathered, spec, kv, True)
    assert_merged(got, want)
    assert torch.equal(got_saturation, saturation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "world_size, k, n, interleave, with_rows",
    [(3, 40, 13, 3, True), (4, 64, 64, 1, False), (2, 50, 25, 16, False), (16, 64, 30, 1, True)],
)
def test_exchange_merge(dtype: torch.dtype, world_size: int, k: int, n: int, interleave: int, with_rows: bool) -> None:
    names = list(HOSTILE) if world_size < 4 else FEW if world_size < 16 else FEW[1:3]
    loopback = Interpreted(world_size, 20, k, n, dtype, blocks=3)
    for call in range(2):
        columns = 150
        logits, ends, numbers, rows_ends = hostile_ranks(call, world_size, 1, columns, dtype, names)
        count = len(ends[0]) - call  # rows take part in some calls only
        logits, ends = [x[:count] for x in logits], [e[:count] for e in ends]
        words = [cpu.local_topk_words(x, e, n) for x, e in zip(logits, ends, strict=True)]
        lists = [cpu.local_topk_words(x, e, k) for x, e in zip(logits, ends, strict=True)]
        kv = kv_maps(call, world_size, count, columns, 16 * interleave) if with_rows else [None] * world_size
        got = loopback.run(
            lambda x, words=words, logits=logits, ends=ends, kv=kv: launch.prepare_exchange(
                x, words[x.rank], logits[x.rank], ends[x.rank], loopback.spec(x.rank, interleave), kv[x.rank], True
            )
        )
        reference = reference_topk(numbers[:, :count], rows_ends[:, :count], k, interleave)
        for rank, merged in enumerate(got):
            assert_merged(merged, expected(words, lists, loopback.spec(rank, interleave), kv[rank]))
            assert same_sets(merged.ids.numpy(), reference).all()
            assert loopback.exchanges[rank].epoch.tolist() == [call + 1] * count + [call] * (call and 1) + [0] * (
                20 - count - (call and 1)
            )
    assert loopback.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size, k, n", [(5, 1800, 1800), (7, 700, 657)])  # 9000 and 4599 candidates
def test_candidates_that_no_block_can_hold(dtype: torch.dtype, world_size: int, k: int, n: int) -> None:
    names = ["random_scores", "ties", "one_rank_has_all"]  # the last: 4642 candidates in round 2
    logits, ends, _, _ = hostile_ranks(0, world_size, 1, 2500, dtype, names)
    words, lists = ([cpu.local_topk_words(x, e, m) for x, e in zip(logits, ends, strict=True)] for m in (n, k))
    loopback = Interpreted(world_size, 3, k, n, dtype)
    got = loopback.run(
        lambda x: launch.prepare_exchange(
            x, words[x.rank], logits[x.rank], ends[x.rank], loopback.spec(x.rank, 1), None, True
        )
    )
    for rank, merged in enumerate(got):
        assert_merged(merged, expected(words, lists, loopback.spec(rank, 1), None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [16384, 17000])  # all of a row's scores in registers, and more than fit
def test_rescues_of_long_rows(dtype: torch.dtype, columns: int) -> None:
    names, k, n = ["one_rank_has_all"], 40, 25
    logits, ends, numbers, rows_ends = hostile_ranks(0, 2, 1, columns, dtype, names)
    ends, rows_ends = [torch.full_like(e, columns) for e in ends], np.full_like(rows_ends, columns)
    words, lists = ([cpu.local_topk_words(x, e, m) for x, e in zip(logits, ends, strict=True)] for m in (n, k))
    loopback = Interpreted(2, 1, k, n, dtype)
    got = loopback.run(
        lambda x: launch.prepare_exchange(
            x, words[x.rank], logits[x.rank], ends[x.rank], loopback.spec(x.rank, 1), None, True
        )
    )
    assert loopback.exchanges[0].list_epoch[0].tolist() == [1]  # it was rescued
    for rank, merged in enumerate(got):
        assert_merged(merged, expected(words, lists, loopback.spec(rank, 1), None))
        assert same_sets(merged.ids.numpy(), reference_topk(numbers, rows_ends, k, 1)).all()


@pytest.mark.parametrize("k, n", [(64, 40), (64, 64)])
def test_epochs_wrap_through_zero(k: int, n: int) -> None:
    loopback = Interpreted(2, 2, k, n, torch.float32)
    for exchange in loopback.exchanges:
        exchange.epoch.fill_(-3)
        exchange.list_epoch.fill_(-3)
    for call in range(6):
        logits, ends, _, _ = hostile_ranks(call, 2, 1, 200, torch.float32, ["one_rank_has_all", "random_scores"])
        words = [cpu.local_topk_words(x, e, n) for x, e in zip(logits, ends, strict=True)]
        lists = [cpu.local_topk_words(x, e, k) for x, e in zip(logits, ends, strict=True)]
        got = loopback.run(
            lambda x, words=words, logits=logits, ends=ends: launch.prepare_exchange(
                x, words[x.rank], logits[x.rank], ends[x.rank], loopback.spec(x.rank, 1), None, True
            )
        )
        for rank, merged in enumerate(got):
            assert_merged(merged, expected(words, lists, loopback.spec(rank, 1), None))
    assert loopback.exchanges[0].epoch.tolist() == [3, 3]
    if n < k:
        assert loopback.exchanges[0].list_epoch[0].tolist() == [3, -3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k, n, with_starts", [(64, 32, True), (64, 64, False), (33, 5, False)])
def test_merge_dcp_topk(dtype: torch.dtype, k: int, n: int, with_starts: bool) -> None:
    world_size, columns = 3, 150
    loopback = Interpreted(world_size, 20, k, n, dtype)
    logits, ends, _, _ = hostile_ranks(3, world_size, 1, columns, dtype)
    count = len(ends[0])
    starts = [torch.arange(count, dtype=torch.int32) % 7 if with_starts else None for _ in range(world_size)]
    indices = []
    for x, e in zip(logits, ends, strict=True):
        buffer = torch.full((count, k + 3), -7, dtype=torch.int32)
        buffer[:, :k] = -1
        for t in range(count):
            end = max(int(e[t]) - (t % 7 if with_starts else 0), 0)
            best = x[t, :end].float().nan_to_num(-torch.inf).topk(min(k, end)).indices
            order = torch.randperm(k, generator=torch.Generator().manual_seed(t))
            buffer[t, order[: len(best)]] = best.to(torch.int32)
        indices.append(buffer[:, :k])
    pairs = [cpu.words_of_local_topk(*of_rank, n) for of_rank in zip(logits, indices, starts, strict=True)]
    words, lists = zip(*pairs, strict=True)
    got = loopback.run(
        lambda x: launch.prepare_merge_dcp_topk(
            x, logits[x.rank], indices[x.rank], starts[x.rank], loopback.spec(x.rank, 2)
        )
    )
    for rank, ids in enumerate(got):
        assert torch.equal(ids, expected(words, lists, loopback.spec(rank, 2), None).ids)
        assert (indices[rank].as_strided((count, 3), (k + 3, 1), k) == -7).all()


@pytest.mark.parametrize("world_size, parts", [(2, 1), (2, 2), (2, 3), (3, 3)])
def test_several_blocks_push_a_list(world_size: int, parts: int) -> None:
    k, columns, names = 1100, 1500, ["random_scores", "ties"]
    loopback = Interpreted(world_size, 2, k, k, torch.float32, blocks=2 * parts + 1)
    for call in range(3):
        logits, ends, numbers, rows_ends = hostile_ranks(call, world_size, 1, columns, torch.float32, names)
        indices = [local_lists(x, e, k) for x, e in zip(logits, ends, strict=True)]
        words = [cpu.words_of_local_topk(x, i, None, k)[0] for x, i in zip(logits, indices, strict=True)]
        got = loopback.run(
            lambda x, logits=logits, indices=indices: launch.prepare_merge_dcp_topk(
                x, logits[x.rank], indices[x.rank], None, loopback.spec(x.rank, 1)
            )
        )
        reference = reference_topk(numbers, rows_ends, k, 1)
        for rank, ids in enumerate(got):
            assert torch.equal(ids, expected(words, words, loopback.spec(rank, 1), None).ids)
            assert same_sets(ids.numpy(), reference).all()
            assert loopback.exchanges[rank].epoch.tolist() == [call + 1] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_topk_rescue(dtype: torch.dtype) -> None:
    world_size, k, n, columns = 3, 40, 13, 150
    loopback = Interpreted(world_size, 20, k, n, dtype)
    for call in range(2):
        logits, ends, _, _ = hostile_ranks(call, world_size, 1, columns, dtype, FEW)
        words = [cpu.local_topk_words(x, e, n) for x, e in zip(logits, ends, strict=True)]
        lists = [cpu.local_topk_words(x, e, k) for x, e in zip(logits, ends, strict=True)]
        gathered = torch.stack(words)
        kv = kv_maps(call, world_size, len(ends[0]), columns, 16)
        first = [cpu.select_words(gathered, loopback.spec(r, 1), kv[r], emit_ids=True) for r in range(world_size)]
        assert any(saturation.any() for _, saturation in first)
        got = loopback.run(
            lambda x, logits=logits, ends=ends, gathered=gathered, kv=kv, first=first: launch.prepare_rescue(
                x, gathered, first[x.rank][1], first[x.rank][0], logits[x.rank], ends[x.rank],
                loopback.spec(x.rank, 1), kv[x.rank],
            )
        )  # fmt: skip
        for rank, merged in enumerate(got):
            assert_merged(merged, expected(words, lists, loopback.spec(rank, 1), kv[rank]))


def test_two_launches_on_one_lane_are_stopped_when_they_take_the_same_epoch() -> None:
    loopback = Interpreted(2, 2, 16, 16, torch.float32)
    words = cpu.local_topk_words(torch.randn(2, 40), torch.full((2,), 40, dtype=torch.int32), 16)
    with interpreting():
        launches = [
            launch.prepare_exchange(x, words, words, words, loopback.spec(x.rank, 1), None, True)
            for x in loopback.exchanges
            for _ in range(2)
        ]
    with pytest.raises(Trapped):
        loopback.run_launches(launches)
    errors = []
    for exchange in loopback.exchanges:
        try:
            exchange.check_failure()
        except TopkxError as error:
            errors.append(str(error))
    assert errors
    for error in errors:
        assert re.match(r"two calls at once on lane 0 of group 'interpreted' \(row [01], epoch 1\): calls", error)


def test_a_silent_rank_is_named() -> None:
    loopback = Interpreted(3, 4, 16, 16, torch.float32)
    words = cpu.local_topk_words(torch.randn(4, 40), torch.full((4,), 40, dtype=torch.int32), 16)
    for exchange in loopback.exchanges:
        exchange.timeout_s = 1e-3
    with pytest.raises(Trapped):
        loopback.run(
            lambda x: launch.prepare_exchange(x, words, words, words, loopback.spec(x.rank, 1), None, True), [0, 2]
        )
    failures = 0
    for exchange in loopback.exchanges:
        if exchange.record.failure() is not None:
            failures += 1
            with pytest.raises(ExchangeTimeoutError, match=r"rank 1 did not deliver row \d \(epoch 1, round 1\)"):
                exchange.check_failure()
            with pytest.raises(ExchangeTimeoutError), exchange.explained():
                raise RuntimeError("CUDA error: unspecified launch failure")
    assert failures
