"""What goes wrong with ranks on GPUs, and what the user sees; docs/faults.md has the whole table."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forking import seen_in_child
from gpu_calls import Captured, W, enough_gpus, exchange, random_inputs, warm_up, wrong_rows

import vllm_topkx
from vllm_topkx.ops.errors import ExchangeTimeoutError, TopkxError
from vllm_topkx.ranks import RankContext, RankError, RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu2,
    enough_gpus,
]

ops = torch.ops.topkx
K, N, COLUMNS = 128, 80, 600


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankPool]:
    with RankPool(W, device_type="cuda") as ranks:
        yield ranks


@contextlib.contextmanager
def environment(name: str, value: object) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = str(value)
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def reserve(ctx: RankContext, lane: int, limit_s: float = 10) -> vllm_topkx.TopkExchange:
    with environment("VLLM_TOPKX_TIMEOUT_S", limit_s):
        return vllm_topkx.reserve(ctx.group, rows=32, topk=K, local_topk=N, lane=lane)


def wrong_in_eager_calls(ctx: RankContext, lane: int) -> int:
    wrong = 0
    for call in range(3):
        logits, ends = (t.to(ctx.device) for t in random_inputs(call, 8, COLUMNS, skew=True))
        ids = exchange(ctx, logits[ctx.rank], ends[ctx.rank], K, N, lane=lane)
        wrong += int(wrong_rows(ids, logits, ends, K))
    return wrong


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (TopkxError, ExchangeTimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


# faults that the ranks survive


def stopped_for_5_s(ctx: RankContext) -> tuple[int, float]:
    lane = 10
    reserve(ctx, lane)
    warm_up(ctx, K, N, 8, lane)
    graph = Captured(ctx, K, N, 8, 3, COLUMNS, lane)
    wrong = int(graph.replay(0))
    dist.barrier(ctx.group)
    torch.cuda.synchronize()
    start = time.monotonic()
    if ctx.rank == 1:
        waker = subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()
    wrong += sum(int(graph.replay(replay)) for replay in range(1, 5))
    return wrong, time.monotonic() - start


def test_a_rank_that_is_stopped_for_5_s_is_waited_for(gpus: RankPool) -> None:
    for wrong, seconds in gpus.run(stopped_for_5_s):
        assert wrong == 0
        assert seconds > 4.5


def started_5_s_later(ctx: RankContext) -> int:
    time.sleep(5 * (ctx.rank == 1))
    reserve(ctx, lane=11, limit_s=2)
    warm_up(ctx, K, N, 8, lane=11)
    return wrong_in_eager_calls(ctx, lane=11)


def test_ranks_that_start_5_s_apart_meet_in_reserve(gpus: RankPool) -> None:
    assert gpus.run(started_5_s_later) == [0] * W  # with a limit of 2 s


def refused_calls(ctx: RankContext) -> tuple[list[str], int]:
    lane = 12
    reserve(ctx, lane)
    seen = []
    for k, rows, of_lane in [(K + 1, 8, lane), (K, 33, lane), (K, 8, 99)]:
        logits, ends = (t.to(ctx.device)[ctx.rank] for t in random_inputs(0, rows, COLUMNS))
        words = ops.local_topk_words(logits, ends, N)
        arguments = (words, logits, ends, ctx.group_name, W, k, N, 1)
        seen.append(error_of(lambda a=arguments, of=of_lane: ops.exchange_merge(*a, lane=of)))
    return seen, wrong_in_eager_calls(ctx, lane)


def test_calls_that_do_not_fit_the_exchange_are_refused_before_anything_is_stored(gpus: RankPool) -> None:
    for (topk, rows, lane), wrong in gpus.run(refused_calls):
        assert "topk 129 in layout fp32" in topk and "was reserved for topk 128" in topk
        assert "33 rows" in rows and "has 32 reserved" in rows
        assert "no exchange is reserved" in lane and "lane 99" in lane
        assert wrong == 0


def destroyed_group(ctx: RankContext) -> tuple[str, str, int]:
    group = dist.new_group(list(range(W)))
    inner = RankContext(ctx.rank, W, group, ctx.device)
    reserve(inner, lane=0)
    warm_up(inner, K, N, 8)
    graph = Captured(inner, K, N, 8, 2, COLUMNS)
    wrong = int(graph.replay(0))
    dist.destroy_process_group(group)
    logits, ends = (t.to(ctx.device)[ctx.rank] for t in random_inputs(0, 8, COLUMNS))
    call = error_of(lambda: exchange(inner, logits, ends, K, N))
    again = error_of(lambda: vllm_topkx.reserve(group, rows=32, topk=K, local_topk=N))
    wrong += int(graph.replay(1))  # the graph's memory is alive
    reserve(ctx, lane=13)
    return call, again, wrong + wrong_in_eager_calls(ctx, lane=13)


def test_an_exchange_whose_group_was_destroyed(gpus: RankPool) -> None:
    for call, again, wrong in gpus.run(destroyed_group):
        assert "is unknown or was destroyed" in call
        assert "was destroyed" in again
        assert wrong == 0


def out_of_memory(ctx: RankContext) -> tuple[str, int, int]:
    gc.collect()
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    hog = torch.empty(before - (512 << 20), dtype=torch.uint8, device=ctx.device) if ctx.rank == 1 else None
    with environment("VLLM_TOPKX_MAX_ROWS", 16384):  # 2 GiB
        seen = error_of(lambda: vllm_topkx.reserve(ctx.group, rows=16384, topk=2048, local_topk=2048, lane=14))
    del hog
    gc.collect()
    torch.cuda.empty_cache()
    kept = before - torch.cuda.mem_get_info()[0]
    reserve(ctx, lane=14)
    return seen, kept, wrong_in_eager_calls(ctx, lane=14)


def test_out_of_memory_in_reserve_on_one_rank_stops_all_and_less_can_be_reserved(gpus: RankPool) -> None:
    for seen, kept, wrong in gpus.run(out_of_memory):
        assert re.match(
            r"BackendUnavailableError: rank 1 cannot allot symmetric memory: .*out of memory", seen, re.I | re.S
        )
        assert kept < 256 << 20
        assert wrong == 0


def forked(ctx: RankContext) -> tuple[str, int]:
    lane = 15
    reserve(ctx, lane)
    wrong = wrong_in_eager_calls(ctx, lane)
    logits, ends = (t.to(ctx.device)[ctx.rank] for t in random_inputs(0, 8, COLUMNS))
    words = ops.local_topk_words(logits, ends, N)
    torch.cuda.synchronize()
    arguments = (words, logits, ends, ctx.group_name, W, K, N, 1)
    seen = seen_in_child(lambda: error_of(lambda: ops.exchange_merge(*arguments, lane=lane)))
    return seen, wrong + wrong_in_eager_calls(ctx, lane)


def test_a_fork_is_refused_and_its_parent_goes_on(gpus: RankPool) -> None:
    for seen, wrong in gpus.run(forked):
        assert "belongs to the process that forked this one" in seen
        assert wrong == 0


# faults that end ranks


class Lines(logging.Handler):
    """What the package logs in a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("vllm_topkx").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def wait(self) -> list[str]:
        deadline = time.monotonic() + 5
        while not self.lines and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.lines


def left_alone(ctx: RankContext, notes: Path) -> None:
    """Rank 0 replays once more than rank 1; then rank 1 has a second micro-batch, and rank 0 has none."""
    log = Lines()
    for lane in (0, 1):
        reserve(ctx, lane, limit_s=1)
        warm_up(ctx, K, N, 4, lane)
    graphs = [Captured(ctx, K, N, 4, 1, COLUMNS, lane) for lane in (0, 1)]
    assert sum(int(graphs[0].replay(replay)) for replay in range(2)) == 0
    words = torch.zeros(4, 2 * N, dtype=torch.int32, device=ctx.device)
    logits, ends = torch.zeros(4, 1, device=ctx.device), words[:, 0]
    torch.cuda.synchronize()
    dist.barrier(ctx.group)
    torch.cuda.synchronize()
    if ctx.rank == 1:
        time.sleep(2.5)  # rank 0 is lost by now
    start = time.monotonic()
    graphs[ctx.rank].graph.replay()
    plain = ""
    try:
        torch.cuda.synchronize()  # as a program that knows nothing of exchanges
    except RuntimeError as error:
        plain = str(error).splitlines()[0]
    seconds = time.monotonic() - start
    again = error_of(lambda: ops.exchange_merge(words, logits, ends, ctx.group_name, W, K, N, 1, lane=ctx.rank))
    note = {"plain": plain, "seconds": seconds, "logged": log.wait(), "again": again}
    (notes / str(ctx.rank)).write_text(json.dumps(note))
    if ctx.rank == 0:
        time.sleep(4)  # rank 1 waits for a rank that lives


@pytest.mark.skipif(W != 2, reason="two ranks leave one another alone, with a lane each")
def test_a_replay_too_many_and_a_second_micro_batch_name_the_idle_rank(tmp_path: Path) -> None:
    with RankPool(W, device_type="cuda") as ranks:
        ranks.run(left_alone, tmp_path)
    for rank, epoch in ((0, 4), (1, 2)):  # lane 0 was warmed up and replayed twice, lane 1 warmed up
        note = json.loads((tmp_path / str(rank)).read_text())
        culprit = rf"rank {1 - rank} did not deliver row [0-3] \(epoch {epoch}, round 1\) within 1 s"
        assert note["plain"]  # a CUDA error, which names nobody
        assert 0.9 < note["seconds"] < 2.0
        assert len(note["logged"]) == 1 and re.search(culprit, note["logged"][0])
        assert note["again"].startswith("ExchangeTimeoutError: ") and re.search(culprit, note["again"])


def two_graphs_at_once(ctx: RankContext, notes: Path) -> None:
    log = Lines()
    reserve(ctx, 0, limit_s=1)
    warm_up(ctx, K, N, 4)
    on_streams = [(Captured(ctx, K, N, 4, 61, COLUMNS).graph, torch.cuda.Stream()) for _ in range(2)]
    torch.cuda.synchronize()
    dist.barrier(ctx.group)
    torch.cuda.synchronize()
    with contextlib.suppress(RuntimeError):
        for _ in range(50):
            for graph, stream in on_streams:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
    (notes / str(ctx.rank)).write_text(json.dumps(log.wait()))


def test_two_graphs_at_once_on_one_lane_are_stopped(tmp_path: Path) -> None:
    with RankPool(W, device_type="cuda") as ranks:
        ranks.run(two_graphs_at_once, tmp_path)
    logged = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(W)]
    stopped = (
        r"two calls at once on lane 0 of group '.*' \(row [0-3], epoch \d+\): calls that can be in flight together"
    )
    assert any(re.search(stopped, line) for lines in logged for line in lines), logged
    for lines in logged:  # the other rank may wait for the one that stopped
        assert all(re.search(stopped + "|did not deliver row", line) for line in lines)


def killed_in_a_graph(ctx: RankContext, notes: Path) -> None:
    of_lane = reserve(ctx, 0, limit_s=1)
    warm_up(ctx, K, N, 8)
    graph = Captured(ctx, K, N, 8, 61, COLUMNS)
    assert int(graph.replay(0)) == 0
    try:
        with of_lane.explained():
            for replay in range(100_000):
                graph.graph.replay()
                if replay % 50 == 49:
                    torch.cuda.synchronize()
                if ctx.rank == 1 and replay == 120:  # some are in flight
                    (notes / "killed").write_text(str(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL)
    except ExchangeTimeoutError as error:
        (notes / "error").write_text(json.dumps([time.monotonic(), str(error)]))


def starts_again(ctx: RankContext) -> tuple[int, str]:
    """Exact merges; and at last a graph whose exchange was closed, which must not write to memory of others."""
    reserve(ctx, lane=0)
    wrong = wrong_in_eager_calls(ctx, lane=0)
    graph = Captured(ctx, K, N, 8, 2, COLUMNS)
    wrong += int(graph.replay(0))
    torch.cuda.synchronize()
    dist.barrier(ctx.group)
    torch.cuda.synchronize()
    vllm_topkx.release_all()
    try:
        graph.graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return wrong, str(error).splitlines()[0]
    return wrong, "accepted"


def test_survivors_of_sigkill_in_a_graph_name_the_dead_rank_and_ranks_can_start_again(tmp_path: Path) -> None:
    with RankPool(W, device_type="cuda") as ranks, pytest.raises(RankError, match="rank 1: died"):
        ranks.run(killed_in_a_graph, tmp_path)
    failed, error = json.loads((tmp_path / "error").read_text())
    assert "rank 1 did not deliver row" in error
    assert failed - float((tmp_path / "killed").read_text()) < 2.0  # the limit and a second
    with RankPool(W, device_type="cuda") as ranks:
        for wrong, closed in ranks.run(starts_again):
            assert wrong == 0
            assert "CUDA error" in closed or "illegal" in closed


def living(session: int) -> list[str]:
    """Command lines of the processes of a session, but for those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, of, *_ = (path / "stat").read_text().rpartition(")")[2].split()
            if int(of) == session and state != "Z":
                found.append((path / "cmdline").read_text())
    return found


def test_ctrl_c_ends_all_ranks() -> None:
    program = (  # a job in the background of a script is started with SIGINT ignored
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from vllm_topkx.cli import main; sys.exit(main())"
    )
    line = [sys.executable, "-P", "-c", program, "soak", "--backend", "cuda", "--merges", "8000000"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    lines = [process.stderr.readline()]
    while lines[-1] and not re.match(r"merges: [1-9]", lines[-1]):
        lines.append(process.stderr.readline())
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the ranks, too
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert time.monotonic() - start < 10
    assert out == "" and "Traceback" not in err
    deadline = time.monotonic() + 5
    while (left := living(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
