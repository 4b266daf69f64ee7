"""What goes wrong with ranks that are processes, and what the user sees; docs/faults.md has the whole table."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cpu_calls import K, N, merge, reserve, scores, segments, wrong_calls
from forking import seen_in_child

import vllm_topkx
from vllm_topkx.ops import checks
from vllm_topkx.ops.cpu import exchange as cpu_exchange
from vllm_topkx.ops.cute import report
from vllm_topkx.ops.errors import ExchangeTimeoutError, TopkxError
from vllm_topkx.ops.layouts import exchange_bytes
from vllm_topkx.ranks import RankContext, RankError, RankPool

LIMIT_S = 2.0


@pytest.fixture
def few() -> Iterator[RankPool]:
    """Three ranks of their own."""
    with RankPool(3) as ranks:
        pids = [process.pid for process in ranks.processes]
        yield ranks
    assert segments(pids) == []


def with_limit(seconds: float = LIMIT_S) -> None:
    os.environ["VLLM_TOPKX_TIMEOUT_S"] = str(seconds)


def error_of(call: Callable[[], object]) -> str:
    """What the user sees of ``call``, and "late" when a survivor needed more than the limit and a second."""
    start = time.monotonic()
    try:
        call()
    except (TopkxError, ExchangeTimeoutError, KeyboardInterrupt) as error:
        late = time.monotonic() - start > LIMIT_S + 1
        return f"{'late ' if late else ''}{type(error).__name__}: {error}"
    return "accepted"


def missing(rank: int, row: int, epoch: int) -> str:
    text = f"rank {rank} did not deliver row {row} (epoch {epoch}, round 1) within {LIMIT_S:g} s"
    return f"ExchangeTimeoutError: .* {re.escape(text)}"


# a rank that is gone, stopped or late


def merge_until_killed(ctx: RankContext, notes: Path) -> None:
    with_limit()
    reserve(ctx, rows=2)
    for call in range(5):
        merge(ctx, call, 2)
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    (notes / str(ctx.rank)).write_text(error_of(lambda: merge(ctx, 5, 2)))


def test_survivors_of_sigkill_name_the_dead_rank_in_time(tmp_path: Path) -> None:
    with RankPool(3) as ranks:
        processes = list(ranks.processes)
        pids = [process.pid for process in processes]
        with pytest.raises(RankError, match="rank 1: died"):
            ranks.run(merge_until_killed, tmp_path)
    for rank in (0, 2):
        assert re.match(missing(1, 0, 6), (tmp_path / str(rank)).read_text())
    assert not any(process.is_alive() for process in processes)
    assert segments(pids) == []


def stopped_for_5_s(ctx: RankContext) -> tuple[list[int], float]:
    with_limit(60)
    reserve(ctx, rows=2)
    wrong = wrong_calls(ctx, [(0, 2)])
    start = time.monotonic()
    if ctx.rank == 1:
        waker = subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()
    return wrong + wrong_calls(ctx, [(call, 2) for call in range(1, 5)]), time.monotonic() - start


def test_a_rank_that_is_stopped_for_5_s_is_waited_for(few: RankPool) -> None:
    for wrong, seconds in few.run(stopped_for_5_s):
        assert wrong == []
        assert seconds > 4.5


def started_5_s_later(ctx: RankContext) -> list[int]:
    with_limit()
    time.sleep(5 * (ctx.rank == 1))
    reserve(ctx, rows=2)
    return wrong_calls(ctx, [(0, 2), (1, 2)])


def test_ranks_that_start_5_s_apart_meet_in_reserve(few: RankPool) -> None:
    assert few.run(started_5_s_later) == [[]] * 3  # with a limit of 2 s


# calls that differ between ranks


def another_topk(ctx: RankContext) -> tuple[str, list[int]]:
    with_limit()
    reserve(ctx, rows=2)
    wrong = wrong_calls(ctx, [(0, 2)])
    if ctx.rank == 2:
        logits, ends = (torch.from_numpy(a[ctx.rank]) for a in scores(0, 3, 2))
        words = torch.ops.topkx.local_topk_words(logits, ends, N)
        call = torch.ops.topkx.exchange_merge
        seen = error_of(lambda: call(words, logits, ends, ctx.group_name, 3, K + 1, N, 4))
    else:
        seen = error_of(lambda: merge(ctx, 0, 2))
    reserve(ctx, rows=2)
    return seen, wrong + wrong_calls(ctx, [(1, 2)])


def test_a_rank_that_calls_with_another_topk_is_refused_and_the_others_name_it(few: RankPool) -> None:
    *others, (refused, wrong) = few.run(another_topk)
    assert re.match(r"TopkxError: topk 25 in layout fp32: .* was reserved for topk 24 in layout fp32", refused)
    assert wrong == []
    for seen, wrong in others:
        assert re.match(missing(2, 0, 2), seen)
        assert wrong == []


def one_call_more(ctx: RankContext) -> str:
    with_limit()
    reserve(ctx, rows=2)
    for call in range(2):
        merge(ctx, call, 2)
    return error_of(lambda: merge(ctx, 2, 2)) if ctx.rank == 0 else ""


def test_three_calls_on_one_rank_and_two_on_the_others(few: RankPool) -> None:
    assert re.match(missing(1, 0, 3), few.run(one_call_more)[0])


def micro_batches(ctx: RankContext) -> tuple[list[int], str, list[int]]:
    with_limit()
    for lane in (0, 1):
        reserve(ctx, rows=2, lane=lane)
    wrong = wrong_calls(ctx, [(0, 2)], lane=0)
    seen = "" if ctx.rank == 1 else error_of(lambda: merge(ctx, 0, 2, lane=1))
    dist.barrier(ctx.group)
    return wrong, seen, wrong_calls(ctx, [(1, 2)], lane=0)  # a lane fails alone


def test_a_rank_without_a_second_micro_batch_is_named(few: RankPool) -> None:
    for rank, (before, seen, after) in enumerate(few.run(micro_batches)):
        assert before == after == []
        assert re.match(missing(1, 0, 1), seen) if rank != 1 else seen == ""


def two_threads_on_one_lane(ctx: RankContext) -> tuple[str, list[int]]:
    with_limit(20)
    reserve(ctx, rows=2)
    if ctx.rank:
        dist.barrier(ctx.group)
        return "", wrong_calls(ctx, [(0, 2), (1, 2)])
    wrong: list[int] = []
    waits = threading.Event()
    wait_words = cpu_exchange.wait_words

    def waiting(*args: object) -> object:
        waits.set()
        return wait_words(*args)

    cpu_exchange.wait_words = waiting
    first = threading.Thread(target=lambda: wrong.extend(wrong_calls(ctx, [(0, 2)])))
    first.start()
    waits.wait()  # its words are with the peers, which have not called
    seen = error_of(lambda: merge(ctx, 9, 2))
    cpu_exchange.wait_words = wait_words
    dist.barrier(ctx.group)
    first.join()
    return seen, wrong + wrong_calls(ctx, [(1, 2)])


def test_two_calls_at_once_on_one_lane_are_refused_not_mixed(few: RankPool) -> None:
    found = few.run(two_threads_on_one_lane)
    assert re.match(r"TopkxError: two calls at once on lane 0 of group .* need a lane each", found[0][0])
    assert [wrong for _, wrong in found] == [[]] * 3


# memory


def no_room_on_one_rank(ctx: RankContext) -> tuple[str, list[int]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ctx.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    seen = error_of(lambda: reserve(ctx, rows=200))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    reserve(ctx, rows=2)
    return seen, wrong_calls(ctx, [(0, 2)])


def test_out_of_memory_in_reserve_on_one_rank_stops_all_and_less_can_be_reserved(few: RankPool) -> None:
    for seen, wrong in few.run(no_room_on_one_rank):
        assert re.match(
            r"BackendUnavailableError: rank 1 has no shared memory: \d+ bytes: .*; free some, or reserve fewer", seen
        )
        assert wrong == []


@pytest.mark.parametrize("shape", [(16, 4096, 4096, "fp32"), (2, 2048, 1152, "bf16")])
def test_a_buffer_that_32_bits_cannot_address_is_refused(shape: tuple[int, int, int, str]) -> None:
    world_size, topk, local_topk, layout = shape
    most = (32 << 30) // exchange_bytes(world_size, 1, topk, local_topk, layout)
    checks.check_memory(world_size, most, topk, local_topk, layout)
    refusal = f"{most + 1} rows take 32.0 GiB .* allowed is 32 GiB; reserve at most {most} rows"
    with pytest.raises(TopkxError, match=refusal):
        checks.check_memory(world_size, most + 1, topk, local_topk, layout)


def reserve_too_much(ctx: RankContext) -> str:
    os.environ["VLLM_TOPKX_MAX_ROWS"] = str(1 << 30)
    return error_of(lambda: vllm_topkx.reserve(ctx.group, rows=1 << 29, topk=2048))


def test_reserve_refuses_such_a_buffer(few: RankPool) -> None:
    for seen in few.run(reserve_too_much):
        assert re.match(r"TopkxError: 536870912 rows take .* reserve at most \d+ rows", seen)


# processes


def forked(ctx: RankContext) -> tuple[str, list[int]]:
    reserve(ctx, rows=2)
    wrong = wrong_calls(ctx, [(0, 2)])
    seen = seen_in_child(lambda: error_of(lambda: merge(ctx, 1, 2)))
    return seen, wrong + wrong_calls(ctx, [(1, 2)])


def test_a_fork_is_refused_and_its_parent_goes_on(few: RankPool) -> None:
    for seen, wrong in few.run(forked):
        assert re.match(r"TopkxError: the exchange of group .* belongs to the process that forked this one", seen)
        assert wrong == []


def interrupted(ctx: RankContext) -> tuple[str, str, list[int]]:
    with_limit()
    reserve(ctx, rows=2)
    wrong = wrong_calls(ctx, [(0, 2)])
    if ctx.rank == 0:  # ranks are started with SIGINT held back
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    seen = error_of(lambda: merge(ctx, 0, 2)) if ctx.rank != 1 else ""
    again = error_of(lambda: merge(ctx, 0, 2)) if ctx.rank != 1 else ""
    reserve(ctx, rows=2)
    return seen, again, wrong + wrong_calls(ctx, [(1, 2)])


def test_ctrl_c_ends_a_wait_and_its_exchange(few: RankPool) -> None:
    (seen, again, wrong), (_, _, also_wrong), (late, unusable, wrong_too) = few.run(interrupted)
    assert seen == "KeyboardInterrupt: "
    assert "was ended by KeyboardInterrupt while its words were with the peers" in again
    assert re.match(missing(1, 0, 2), late) and "The exchange is unusable from here on" in unusable
    assert wrong == also_wrong == wrong_too == []


# a lost CUDA context


class LostExchange:
    """As an exchange whose kernel gives up waiting after a while."""

    def __init__(self) -> None:
        self.error: ExchangeTimeoutError | None = None

    def failed(self) -> bool:
        return self.error is not None

    def check_failure(self) -> None:
        if self.error is not None:
            raise self.error


def test_a_lost_context_is_explained_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    lost, sound = LostExchange(), LostExchange()
    for exchange in (lost, sound):
        report.watch(exchange)
    lost.error = ExchangeTimeoutError("dcp:0", 3, 1, 7, 1, 10.0)
    deadline = time.monotonic() + 20
    while not caplog.messages and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(3 * report.LOOK_EVERY_S)
    assert caplog.messages == [str(lost.error)]
