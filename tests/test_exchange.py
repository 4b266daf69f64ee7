"""The exchange on real processes: epochs, parity, growth, lanes, time limit, death, and what stays behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cpu_calls import INTERLEAVE, K, N, merge, reserve, scores, segments, wrong_calls

import vllm_topkx
from vllm_topkx.ops.cpu import exchange as exchange_module
from vllm_topkx.ops.cpu import shared_memory
from vllm_topkx.ops.errors import ExchangeTimeoutError, TopkxError
from vllm_topkx.ops.exchange import find_exchange
from vllm_topkx.ranks import RankContext, RankError, RankPool


@pytest.fixture
def few() -> Iterator[RankPool]:
    """Three ranks of their own, for tests that break them."""
    with RankPool(3) as ranks:
        yield ranks


def reserve_rows(ctx: RankContext, rows: int) -> None:
    reserve(ctx, rows)


def many_calls(ctx: RankContext) -> tuple[list[int], list[int]]:
    exchange = reserve(ctx, rows=6)
    before = exchange.epoch.tolist()
    calls = [(call, 1 + call * call % 6) for call in range(40)]
    wrong = wrong_calls(ctx, calls)
    expected = [before[t] + sum(rows > t for _, rows in calls) for t in range(6)]
    return wrong, [a - b for a, b in zip(exchange.epoch.tolist(), expected, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3, 8, 16])
def test_calls_of_changing_rows_are_exact_and_count_their_rows(pool: RankPool, world_size: int) -> None:
    for wrong, epoch_difference in pool.run(many_calls, world_size=world_size):
        assert wrong == []
        assert epoch_difference == [0] * 6


def calls_around_the_wrap(ctx: RankContext) -> tuple[list[int], list[int]]:
    exchange = reserve(ctx, rows=3, lane=1)
    for epochs in (exchange.epoch, exchange.list_epoch):
        epochs.fill_(2**32 - 8 - 2**32)
    dist.barrier(ctx.group)
    return wrong_calls(ctx, [(call, 3) for call in range(20)], lane=1), exchange.epoch.tolist()


def test_epochs_wrap_through_zero(pool: RankPool) -> None:
    for wrong, epochs in pool.run(calls_around_the_wrap, world_size=3):
        assert wrong == []
        assert epochs == [12] * 3


def one_rank_ahead(ctx: RankContext) -> list[int]:
    reserve(ctx, rows=2, lane=2)
    wrong = []
    for call in range(12):
        if call % ctx.world_size == ctx.rank:
            time.sleep(0.003)  # the others have pushed, and wait, when this rank begins
        wrong += wrong_calls(ctx, [(call, 2)], lane=2)
    return wrong


def test_ranks_that_run_ahead_are_exact(pool: RankPool) -> None:
    assert pool.run(one_rank_ahead, world_size=3) == [[]] * 3


def grow(ctx: RankContext) -> dict[str, object]:
    small = reserve(ctx, rows=2, lane=3)
    again = reserve(ctx, rows=1, lane=3)
    wrong = wrong_calls(ctx, [(0, 2), (1, 1)], lane=3)
    large = reserve(ctx, rows=5, lane=3)
    wrong += wrong_calls(ctx, [(2, 5), (3, 2)], lane=3)
    return {
        "cached": again is small,
        "new": large is not small,
        "rows": (small.rows, large.rows),
        "old epochs": small.epoch.tolist(),
        "new epochs": large.epoch.tolist(),
        "old alive": small.failure is None,
        "wrong": wrong,
    }


def test_growing_makes_a_new_exchange_and_keeps_the_old(pool: RankPool) -> None:
    for found in pool.run(grow, world_size=2):
        assert found == {
            "cached": True,
            "new": True,
            "rows": (2, 5),
            "old epochs": [2, 1],
            "new epochs": [2, 2, 1, 1, 1],
            "old alive": True,
            "wrong": [],
        }


def two_lanes(ctx: RankContext) -> list[int]:
    reserve(ctx, rows=4, lane=4)
    reserve(ctx, rows=4, lane=5)
    order = (4, 5) if ctx.rank == 0 else (5, 4)  # lanes are independent: their order may differ between ranks
    logits, ends = scores(0, ctx.world_size, 4)
    exchanges = {lane: find_exchange(ctx.group_name, torch.device("cpu"), N, lane) for lane in order}
    words = torch.ops.topkx.local_topk_words(torch.from_numpy(logits[ctx.rank]), torch.from_numpy(ends[ctx.rank]), N)
    for lane in order:  # both micro-batches push before either merges
        exchanges[lane]._push(words, exchanges[lane].epoch.numpy().view(np.uint32)[:4] + np.uint32(1))
    return wrong_calls(ctx, [(0, 4)], lane=4) + wrong_calls(ctx, [(0, 4)], lane=5)


def test_two_lanes_in_flight_do_not_share_slots(pool: RankPool) -> None:
    assert pool.run(two_lanes, world_size=2) == [[], []]


def refused_reserve(ctx: RankContext, **changes: object) -> str:
    arguments = {"rows": 2, "topk": K, "local_topk": N, "lane": 6, **changes}
    try:
        vllm_topkx.reserve(arguments.pop("group", ctx.group), **arguments)
    except TopkxError as error:
        return str(error)
    return "accepted"


def reserve_refusals(ctx: RankContext) -> dict[str, str]:
    vllm_topkx.reserve(ctx.group, rows=2, topk=K, local_topk=N, lane=6)
    return {
        "rows 0": refused_reserve(ctx, rows=0),
        "rows 257": refused_reserve(ctx, rows=257),
        "topk 0": refused_reserve(ctx, topk=0),
        "local_topk": refused_reserve(ctx, local_topk=K + 1),
        "dtype": refused_reserve(ctx, dtype=torch.float16),
        "lane": refused_reserve(ctx, lane=-1),
        "group": refused_reserve(ctx, group="nowhere"),
        "device": refused_reserve(ctx, device="meta"),
        "other topk": refused_reserve(ctx, topk=K + 1),
        "other layout": refused_reserve(ctx, dtype=torch.bfloat16),
        "ranks differ": refused_reserve(ctx, rows=2 + ctx.rank, lane=7),
    }


def test_reserve_refusals(pool: RankPool) -> None:
    expected = {
        "rows 0": "0 rows: an exchange is reserved for 1..256 (VLLM_TOPKX_MAX_ROWS",
        "rows 257": "257 rows: an exchange is reserved for 1..256",
        "topk 0": "topk 0",
        "local_topk": "local_topk 25: each rank sends 1..topk = 24",
        "dtype": "torch.float16",
        "lane": "lane -1",
        "group": "group 'nowhere' is unknown or was destroyed",
        "device": "device meta: an exchange lives on a CUDA GPU or the CPU",
        "other topk": "topk 25, fp32 needs another lane",
        "other layout": "topk 24, bf16 needs another lane",
        "ranks differ": "reserve() differs between ranks: rank 0 asks for",
    }
    for found in pool.run(reserve_refusals, world_size=2):
        assert found.keys() == expected.keys()
        for name, message in expected.items():
            assert message in found[name]


def destroyed_group(ctx: RankContext) -> tuple[str, str, list[int]]:
    group = dist.new_group(list(range(ctx.world_size)))
    inner = RankContext(ctx.rank, ctx.world_size, group, ctx.device)
    name = group.group_name
    reserve(inner, rows=2)
    merge(inner, 0, 2)
    dist.destroy_process_group(group)
    call = refused_merge(name, ctx)
    return call, refused_reserve(ctx, group=group), wrong_calls(ctx, [(1, 2)], lane=0)


def refused_merge(group: str, ctx: RankContext) -> str:
    logits, ends = (torch.from_numpy(a[ctx.rank]) for a in scores(0, ctx.world_size, 2))
    words = torch.ops.topkx.local_topk_words(logits, ends, N)
    try:
        torch.ops.topkx.exchange_merge(words, logits, ends, group, ctx.world_size, K, N, INTERLEAVE)
    except TopkxError as error:
        return str(error)
    return "accepted"


def test_an_exchange_of_a_destroyed_group_is_refused(few: RankPool) -> None:
    few.run(reserve_rows, 2)
    for call, reserved, wrong in few.run(destroyed_group):
        assert "is unknown or was destroyed" in call
        assert "destroyed" in reserved
        assert wrong == []


def wait_for_a_rank_that_does_not_call(ctx: RankContext, limit_s: float) -> tuple[object, float, float]:
    os.environ["VLLM_TOPKX_TIMEOUT_S"] = str(limit_s)
    reserve(ctx, rows=3)
    wrong_calls(ctx, [(0, 3)])
    if ctx.rank == 2:
        return None, 0.0, 0.0
    start, cpu = time.monotonic(), time.process_time()
    try:
        merge(ctx, 1, 2)
    except ExchangeTimeoutError as error:
        return error, time.monotonic() - start, time.process_time() - cpu
    return "accepted", 0.0, 0.0


def again(ctx: RankContext) -> tuple[str, list[int]]:
    try:
        merge(ctx, 2, 2) if ctx.rank != 2 else None
        message = ""
    except ExchangeTimeoutError as error:
        message = str(error)
    reserve(ctx, rows=3)  # collective: all ranks see that the old one is broken on some
    return message, wrong_calls(ctx, [(3, 3)])


def test_a_rank_that_never_pushes_is_named_and_waiting_costs_little(few: RankPool) -> None:
    found = few.run(wait_for_a_rank_that_does_not_call, 1.0)
    for error, seconds, cpu_seconds in found[:2]:
        assert isinstance(error, ExchangeTimeoutError)
        assert (error.row, error.source_rank, error.epoch, error.round) == (0, 2, 2, 1)
        assert "rank 2 did not deliver row 0 (epoch 2, round 1) within 1 s" in str(error)
        assert 1.0 <= seconds < 2.0
        assert cpu_seconds < 0.5 * seconds
    for rank, (message, wrong) in enumerate(few.run(again)):
        assert ("unusable" in message) == (rank != 2)  # a broken exchange is never used again
        assert wrong == []


def ended_in_the_middle(ctx: RankContext) -> tuple[str, str, list[int]]:
    os.environ["VLLM_TOPKX_TIMEOUT_S"] = "2"
    reserve(ctx, rows=2)
    select, message = exchange_module.select_words, ""
    if ctx.rank == 0:

        def interrupted(*args: object) -> None:
            raise KeyboardInterrupt

        exchange_module.select_words = interrupted
    try:
        merge(ctx, 1, 2)
    except (KeyboardInterrupt, ExchangeTimeoutError) as error:
        message = type(error).__name__
    finally:
        exchange_module.select_words = select
    try:
        merge(ctx, 2, 2)
        again = "accepted"
    except (TopkxError, ExchangeTimeoutError) as error:
        again = str(error)
    reserve(ctx, rows=2)
    return message, again, wrong_calls(ctx, [(3, 2)])


def test_a_call_that_is_ended_in_the_middle_breaks_the_exchange(few: RankPool) -> None:
    found = few.run(ended_in_the_middle)
    (first, refused, _), *others = found
    assert first == "KeyboardInterrupt"
    assert "was ended by KeyboardInterrupt while its words were with the peers" in refused
    for message, again, _ in others:  # call 1 waits for rank 0's rescue lists
        assert message == "ExchangeTimeoutError" and "unusable" in again
    assert [wrong for _, _, wrong in found] == [[]] * 3


def fewer_rows(ctx: RankContext) -> ExchangeTimeoutError | None:
    os.environ["VLLM_TOPKX_TIMEOUT_S"] = "2"
    reserve(ctx, rows=5, n=K)
    try:
        merge(ctx, 0, 5 if ctx.rank == 0 else 3, n=K)
    except ExchangeTimeoutError as error:
        return error
    return None


def test_a_rank_with_fewer_rows_is_named(few: RankPool) -> None:
    error, *others = few.run(fewer_rows)
    assert (error.row, error.source_rank, error.epoch, error.round) == (3, 1, 1, 1)
    assert others == [None, None]


def die_before_the_rescue(ctx: RankContext) -> ExchangeTimeoutError | None:
    os.environ["VLLM_TOPKX_TIMEOUT_S"] = "2"
    exchange = reserve(ctx, rows=2)
    if ctx.rank == 1:  # holds everything of row 1 in call 1, so all wait for its list; it only pushes
        logits, ends = (torch.from_numpy(a[ctx.rank]) for a in scores(1, ctx.world_size, 2))
        exchange._push(torch.ops.topkx.local_topk_words(logits, ends, N), np.ones(2, dtype=np.uint32))
        return None
    try:
        merge(ctx, 1, 2)
    except ExchangeTimeoutError as error:
        return error
    return None


def test_a_missing_rescue_list_is_round_2(few: RankPool) -> None:
    error, _, other = few.run(die_before_the_rescue)
    for found in (error, other):
        assert (found.row, found.source_rank, found.epoch, found.round) == (0, 1, 1, 2)  # row 0 needs its list too


def merge_until_killed(ctx: RankContext) -> ExchangeTimeoutError | None:
    os.environ["VLLM_TOPKX_TIMEOUT_S"] = "2"
    reserve(ctx, rows=2)
    for call in range(1000):
        if ctx.rank == 1 and call == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            merge(ctx, call, 2)
        except ExchangeTimeoutError as error:
            return error
    return None


def test_survivors_of_sigkill_fail_in_time_and_can_start_again() -> None:
    with RankPool(3) as ranks:
        pids = [process.pid for process in ranks.processes]
        start = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1: died \(exit code -9\)"):
            ranks.run(merge_until_killed)
        assert time.monotonic() - start < 10
    assert segments(pids) == []
    with RankPool(3) as ranks:
        pids = [process.pid for process in ranks.processes]
        ranks.run(reserve_rows, 2)
        assert ranks.run(wrong_calls, [(0, 2), (1, 2)]) == [[]] * 3
    assert segments(pids) == []


def names_in_use(ctx: RankContext) -> list[str]:
    reserve(ctx, rows=2)
    dist.barrier(ctx.group)
    return segments([os.getpid()])


def test_no_name_stays_while_an_exchange_lives(few: RankPool) -> None:
    assert few.run(names_in_use) == [[]] * 3


def die_with_a_named_segment(ctx: RankContext) -> None:
    if ctx.rank == 0:
        shared_memory._create(4096)
        os.kill(os.getpid(), signal.SIGKILL)


def test_segments_of_the_dead_are_reclaimed_and_those_of_the_living_kept() -> None:
    path, fd = shared_memory._create(4096)
    try:
        with RankPool(2) as ranks:
            pids = [os.getpid(), *(process.pid for process in ranks.processes)]
            with pytest.raises(RankError, match="died"):
                ranks.run(die_with_a_named_segment)
        shared_memory.reclaim()  # or a rank of another test, which does so when it starts
        assert segments(pids) == [path.name]
    finally:
        os.close(fd)
    shared_memory.reclaim()
    assert segments(pids) == []


def full_memory(ctx: RankContext) -> str:
    if ctx.rank == 1:
        shared_memory.SHM = Path("/nonexistent")
    message = refused_reserve(ctx, rows=2, lane=0)
    shared_memory.SHM = Path("/dev/shm")
    return message


def test_a_rank_that_cannot_set_up_stops_all_ranks(few: RankPool) -> None:
    pids = [process.pid for process in few.processes]
    messages = few.run(full_memory)
    assert len(set(messages)) == 1
    assert re.match(r"rank 1 has no shared memory: .*No such file", messages[0])
    assert segments(pids) == []
