"""The exchange between two GPUs over NVLink: exactness, CUDA graphs, lanes, wrap, time limit, set-up."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gpu_calls import Captured, W, enough_gpus, exchange, random_inputs, warm_up, wrong_rows

import vllm_topkx
from vllm_topkx.cli.hostile import stacked
from vllm_topkx.ops import exchange as exchanges
from vllm_topkx.ops.errors import ExchangeTimeoutError, TopkxError
from vllm_topkx.ops.reference import reference_topk, same_sets
from vllm_topkx.ranks import RankContext, RankError, RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu2,
    enough_gpus,
]

ops = torch.ops.topkx


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankPool]:
    with RankPool(W, device_type="cuda") as ranks:
        yield ranks


@pytest.fixture
def own_gpus() -> Iterator[RankPool]:
    """Ranks for a test that ends their CUDA contexts."""
    with RankPool(W, device_type="cuda") as ranks:
        yield ranks


# exactness


def hostile_rows(ctx: RankContext, logits: np.ndarray, ends: np.ndarray, bf16: bool, k: int, n: int, interleave: int):
    lg = torch.from_numpy(logits[ctx.rank]).to(ctx.device)
    lg = lg.to(torch.bfloat16) if bf16 else lg
    e = torch.from_numpy(ends[ctx.rank]).to(ctx.device)
    vllm_topkx.reserve(ctx.group, rows=len(e), topk=k, local_topk=n, dtype=lg.dtype, lane=3 if bf16 else 2)
    runs = [exchange(ctx, lg, e, k, n, interleave, lane=3 if bf16 else 2) for _ in range(3)]
    torch.cuda.synchronize()
    return [ids.cpu().numpy() for ids in runs]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("k, n, interleave", [(512, 320, 16), (512, 512, 1), (33, 5, 64), (2048, 1152, 64)])
def test_hostile_rows_are_exact(gpus: RankPool, bf16: bool, k: int, n: int, interleave: int) -> None:
    logits, ends, names = stacked(np.random.default_rng(k + n), W, 3, 3000)
    per_rank = gpus.run(hostile_rows, logits, ends, bf16, k, n, interleave)
    reference = reference_topk(logits, ends, k, interleave)
    for runs in per_rank:
        for ids in runs:
            same = same_sets(ids, reference)
            assert same.all(), [names[t] for t in np.flatnonzero(~same)]
            assert np.array_equal(ids, per_rank[0][0])  # the same order on every rank and in every run


def many_random_rows(ctx: RankContext, k: int, n: int, rows: int, calls: int, skew: bool) -> int:
    vllm_topkx.reserve(ctx.group, rows=rows, topk=k, local_topk=n)
    wrong = 0
    for call in range(calls):
        logits, ends = (t.to(ctx.device) for t in random_inputs(call, rows, 5000, skew, ctx.world_size))
        ids = exchange(ctx, logits[ctx.rank], ends[ctx.rank], k, n)
        wrong += int(wrong_rows(ids, logits, ends, k))
    return wrong


@pytest.mark.parametrize("skew", [False, True])
@pytest.mark.parametrize("k, n", [(512, 352), (1024, 1024), (2048, 1152)])
def test_20000_random_rows(gpus: RankPool, k: int, n: int, skew: bool) -> None:
    assert gpus.run(many_random_rows, k, n, 200, 100, skew) == [0] * W


def dcp_contract(ctx: RankContext, k: int, n: int) -> tuple[list[bool], list]:
    """vLLM's contract: an unordered, -1 padded local top-K, prefill rows with row starts."""
    vllm_topkx.reserve(ctx.group, rows=16, topk=k, local_topk=n)
    logits, ends = (t.to(ctx.device) for t in random_inputs(1, 16, 4000))
    starts = torch.arange(16, device=ctx.device, dtype=torch.int32) * 7
    lengths = (ends - starts - 100).clamp(min=0)
    lengths[:, 5] = 40  # fewer than K: padding
    column = torch.arange(4000, device=ctx.device)
    inside = (column >= starts[:, None]) & (column < (starts + lengths)[..., None])
    local = logits.masked_fill(~inside, -torch.inf)
    best = local[ctx.rank].topk(k, dim=-1)
    indices = torch.where(best.values > -torch.inf, best.indices - starts[:, None], -1).to(torch.int32)
    indices = indices[:, torch.randperm(k, generator=torch.Generator().manual_seed(3)).to(ctx.device)].contiguous()
    buffer = torch.full((20, k + 8), -7, dtype=torch.int32, device=ctx.device)
    buffer[:16, :k] = indices
    ops.merge_dcp_topk_(
        logits[ctx.rank], buffer[:16, :k], k, ctx.rank, W, 1, starts, group=ctx.group_name, local_topk=n
    )
    shifted = torch.stack([torch.stack([local[r, t].roll(-int(starts[t])) for t in range(16)]) for r in range(W)])
    same = []
    for t in range(16):
        ids = buffer[t, :k]
        ids = ids[ids >= 0].long()
        got = shifted[ids % W, t, ids // W].sort(descending=True).values
        all_scores = shifted[:, t].flatten()
        want = all_scores[all_scores > -torch.inf].sort(descending=True).values[:k]
        same.append(torch.equal(got, want))
    untouched = bool((buffer[16:] == -7).all() and (buffer[:, k:] == -7).all())
    return [*same, untouched], buffer[:16, :k].tolist()


@pytest.mark.parametrize("k, n", [(512, 512), (512, 320), (2048, 2048)])
def test_vllms_contract_in_place(gpus: RankPool, k: int, n: int) -> None:
    found = gpus.run(dcp_contract, k, n)
    for same, ids in found:
        assert ids == found[0][1]
        assert all(same)


# CUDA graphs


def graphs_of_all_sizes(ctx: RankContext, replays: int) -> int:
    k, n = 128, 80
    vllm_topkx.reserve(ctx.group, rows=32, topk=k, local_topk=n)
    warm_up(ctx, k, n, 4)
    graphs = [Captured(ctx, k, n, rows, merges, 600) for rows, merges in [(1, 1), (4, 2), (32, 3), (8, 61)]]
    order = np.random.default_rng(5)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for replay in range(replays):
        choice = int(order.integers(0, len(graphs) + 1))
        if choice < len(graphs):
            wrong += graphs[choice].replay(replay)
        else:  # an eager call in between, of other rows
            logits, ends = (t.to(ctx.device) for t in random_inputs(replay, 7, 600))
            ids = exchange(ctx, logits[ctx.rank], ends[ctx.rank], k, n)
            wrong += wrong_rows(ids, logits, ends, k)
    return int(wrong)


def test_graphs_of_1_2_3_and_61_exchanges_in_random_order(gpus: RankPool) -> None:
    assert gpus.run(graphs_of_all_sizes, 300) == [0] * W


def many_replays(ctx: RankContext, replays: int) -> int:
    k, n = 128, 80
    vllm_topkx.reserve(ctx.group, rows=32, topk=k, local_topk=n)
    warm_up(ctx, k, n, 4)
    graph = Captured(ctx, k, n, 4, 1, 600)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for replay in range(replays):
        wrong += graph.replay(replay)
    return int(wrong)


def test_10000_replays_with_changing_inputs(gpus: RankPool) -> None:
    assert gpus.run(many_replays, 10_000) == [0] * W


def epochs_about_to_wrap(ctx: RankContext) -> tuple[int, list[int]]:
    k, n, lane = 128, 80, 4
    exchange_ = vllm_topkx.reserve(ctx.group, rows=8, topk=k, local_topk=n, lane=lane)
    for epochs in (exchange_.epoch, exchange_.list_epoch):
        epochs.fill_(-8)  # 8 below 2**32
    torch.cuda.synchronize()
    dist.barrier(ctx.group)
    graph = Captured(ctx, k, n, 8, 2, 600, lane=lane)
    wrong = sum(int(graph.replay(replay)) for replay in range(10))
    return wrong, exchange_.epoch.tolist()


def test_epochs_wrap_through_zero(gpus: RankPool) -> None:
    assert gpus.run(epochs_about_to_wrap) == [(0, [12] * 8)] * W


def two_lanes_on_two_streams(ctx: RankContext, rounds: int) -> int:
    k, n = 128, 80
    lanes = [5, 6]
    for lane in lanes:
        vllm_topkx.reserve(ctx.group, rows=8, topk=k, local_topk=n, lane=lane)
        warm_up(ctx, k, n, 8, lane)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for step in range(rounds):
        results = []
        torch.cuda.synchronize()
        for lane, stream in zip(lanes if ctx.rank == 0 else lanes[::-1], streams, strict=True):
            with torch.cuda.stream(stream):
                logits, ends = (t.to(ctx.device) for t in random_inputs(100 * step + lane, 8, 600, skew=True))
                results.append((exchange(ctx, logits[ctx.rank], ends[ctx.rank], k, n, lane=lane), logits, ends))
        torch.cuda.synchronize()
        for ids, logits, ends in results:
            wrong += wrong_rows(ids, logits, ends, k)
    return int(wrong)


def test_two_lanes_on_two_streams_at_once(gpus: RankPool) -> None:
    assert gpus.run(two_lanes_on_two_streams, 50) == [0] * W


def one_rank_ahead(ctx: RankContext, steps: int) -> int:
    k, n = 128, 80
    vllm_topkx.reserve(ctx.group, rows=32, topk=k, local_topk=n)
    warm_up(ctx, k, n, 4)
    results = []
    for step in range(steps):
        logits, ends = (t.to(ctx.device) for t in random_inputs(step, 6, 600, skew=True))
        torch.cuda.synchronize()
        if step % W == ctx.rank:
            time.sleep(0.002)  # the other rank's kernel waits, having pushed a whole call ahead
        results.append((exchange(ctx, logits[ctx.rank], ends[ctx.rank], k, n), logits, ends))
    return sum(int(wrong_rows(ids, logits, ends, k)) for ids, logits, ends in results)


def test_one_rank_a_call_ahead_at_every_step(gpus: RankPool) -> None:
    assert gpus.run(one_rank_ahead, 100) == [0] * W


def compiled_chain(ctx: RankContext) -> tuple[int, bool]:
    """The all-gather form under torch.compile with the pass, and in a CUDA graph."""
    from torch.distributed._functional_collectives import all_gather_tensor

    k, n, lane = 128, 80, 0
    vllm_topkx.reserve(ctx.group, rows=32, topk=k, local_topk=n)
    warm_up(ctx, k, n, 4)
    shape = {"rank": ctx.rank, "topk": k, "local_topk": n, "interleave": 1}

    def merge(logits: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        words = ops.local_topk_words(logits, ends, n)
        gathered = all_gather_tensor(words, 0, ctx.group).view(W, -1, words.shape[1])
        rows, valid, ids, saturation = ops.topk_select(gathered, layout="fp32", **shape)
        out = ops.topk_rescue(
            gathered, saturation, rows, valid, ids, logits, ends, group=ctx.group_name, lane=lane, **shape
        )
        return out[2]

    options = vllm_topkx.compile_options()
    compiled = torch.compile(merge, options=options, fullgraph=True)
    logits, ends = (t.to(ctx.device) for t in random_inputs(9, 4, 600, skew=True))
    mine = (logits[ctx.rank].contiguous(), ends[ctx.rank].contiguous())
    results = [merge(*mine), compiled(*mine)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compiled(*mine)
    graph.replay()
    results.append(captured)
    wrong = sum(int(wrong_rows(ids, logits, ends, k)) for ids in results)
    return wrong, options["post_grad_custom_post_pass"].rewritten == 1


def test_the_rewritten_chain_under_torch_compile_and_in_a_graph(gpus: RankPool) -> None:
    assert gpus.run(compiled_chain) == [(0, True)] * W


def refusals_under_capture(ctx: RankContext) -> dict[str, str]:
    k, n = 128, 80
    vllm_topkx.reserve(ctx.group, rows=32, topk=k, local_topk=n)
    warm_up(ctx, k, n, 4)
    logits, ends = (t.to(ctx.device)[ctx.rank] for t in random_inputs(0, 4, 600))
    messages = {}

    def attempt(name: str, call) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except TopkxError as error:
            messages[name] = str(error)
        torch.cuda.synchronize()

    attempt("reserve", lambda: vllm_topkx.reserve(ctx.group, rows=64, topk=k, local_topk=n))
    attempt("not compiled", lambda: ops.local_topk_words(logits, ends, 77))
    return messages


def test_what_capture_refuses(gpus: RankPool) -> None:
    for messages in gpus.run(refusals_under_capture):
        assert "reserve the exchange before you capture" in messages["reserve"]
        assert "capture" in messages["not compiled"] and "compile" in messages["not compiled"]


# set-up and failure


def failing_setup(ctx: RankContext) -> str:
    from vllm_topkx.ops.cute import exchange as cute_exchange

    original = cute_exchange.SymmetricMemoryExchange._allocate
    if ctx.rank == 1:

        def broken(self, *args, **kwargs):
            raise RuntimeError("no peer access in this test")

        cute_exchange.SymmetricMemoryExchange._allocate = broken
    try:
        vllm_topkx.reserve(ctx.group, rows=4, topk=64, local_topk=40, lane=9)
    except TopkxError as error:
        return str(error)
    finally:
        cute_exchange.SymmetricMemoryExchange._allocate = original
    return "accepted"


def test_a_rank_that_cannot_set_up_stops_all_ranks(gpus: RankPool) -> None:
    messages = gpus.run(failing_setup)
    assert len(set(messages)) == 1
    assert "rank 1" in messages[0] and "no peer access in this test" in messages[0]


def world_and_subgroup(ctx: RankContext) -> int:
    """Groups of two ranks each, as DCP 2 in a tensor parallel group of W, and all together."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, W, 2)]
    inner = RankContext(ctx.rank % 2, 2, pairs[ctx.rank // 2], ctx.device)
    wrong = 0
    for context in (inner, ctx, inner):
        wrong += many_random_rows(context, 128, 80, 8, 3, True)
    return wrong


def test_an_exchange_on_one_group_and_then_on_another(gpus: RankPool) -> None:
    assert gpus.run(world_and_subgroup) == [0] * W


def silent_peer(ctx: RankContext, kind: str, note: Path) -> None:
    os.environ["VLLM_TOPKX_TIMEOUT_S"] = "1"
    k, n = 128, 80
    vllm_topkx.reserve(ctx.group, rows=8, topk=k, local_topk=n)
    logits, ends = (t.to(ctx.device)[ctx.rank] for t in random_inputs(0, 8, 600))
    exchange(ctx, logits, ends, k, n)
    torch.cuda.synchronize()
    start = time.monotonic()
    if ctx.rank == 1:
        if kind == "killed":
            os.kill(os.getpid(), 9)
        if kind == "fewer rows":
            exchange(ctx, logits[:3], ends[:3], k, n)
            torch.cuda.synchronize()
        time.sleep(3)
        return
    try:
        with exchanges.find_exchange(ctx.group_name, ctx.device, n, 0).explained():
            exchange(ctx, logits, ends, k, n)
            torch.cuda.synchronize()
    except ExchangeTimeoutError as error:
        note.write_text(json.dumps([error.row, error.source_rank, error.epoch, error.round, time.monotonic() - start]))


@pytest.mark.parametrize("kind", ["never pushes", "fewer rows", "killed"])
def test_a_silent_peer_is_named_within_the_limit(own_gpus: RankPool, kind: str, tmp_path: Path) -> None:
    note = tmp_path / "error.json"
    if kind == "killed":
        with pytest.raises(RankError, match=r"rank 1: died"):
            own_gpus.run(silent_peer, kind, note)
    else:
        own_gpus.run(silent_peer, kind, note)
    row, source, epoch, round_, seconds = json.loads(note.read_text())
    assert (source, epoch, round_) == (1, 2, 1)
    assert row in (range(3, 8) if kind == "fewer rows" else range(8))
    assert 0.9 < seconds < 2.5
