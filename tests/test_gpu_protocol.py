"""What the protocol promises of the machine, on GPUs: words that come bit by bit, early launch, blocking launches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gpu_calls import W, enough_gpus, random_inputs, wrong_rows
from merging import expected

import vllm_topkx
from vllm_topkx.ops.cpu import select as cpu
from vllm_topkx.ops.cpu.ll import tag_words
from vllm_topkx.ops.layouts import FP32
from vllm_topkx.ops.spec import MergeSpec
from vllm_topkx.ranks import RankContext, RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu2,
    enough_gpus,
]

ops = torch.ops.topkx
TESTS = Path(__file__).parent
MILLISECOND = 2_000_000  # cycles, or a little more


@pytest.fixture(scope="module")
def gpus() -> Iterator[RankPool]:
    with RankPool(W, device_type="cuda") as ranks:
        yield ranks


# the words of one warp in two halves

#: Halves (8 bytes, a word and its epoch) that a warp stores: 32 LL pairs. The third warp's come late in part.
WARP = range(2 * 64, 3 * 64)
#: What comes early, and what comes a millisecond later, of a row's halves.
SPLITS = {
    "threads": ([slice(0, WARP.start + 32), slice(WARP.stop, None)], slice(WARP.start + 32, WARP.stop)),
    "halves of pairs": (
        [slice(0, WARP.start), slice(WARP.stop, None), slice(WARP.start, WARP.stop, 2)],
        slice(WARP.start + 1, WARP.stop, 2),
    ),
}


def words_in_two_halves(ctx: RankContext, world_size: int, k: int, n: int, dtype: torch.dtype) -> list[str]:
    """Merges of ranks 0..W-2 on one GPU; what rank W-1 would store is copied there. What went wrong.

    Between the copies, the places of the late words hold those of two calls before.
    """
    from vllm_topkx.ops.cute.launch import prepare_exchange
    from vllm_topkx.ops.cute.loopback import Loopback

    rows, columns, problems = 4, 3000, []
    loopback = Loopback(world_size, rows, k, n, dtype)
    kernels, side = loopback._streams[:-1], torch.cuda.Stream()
    ends = torch.full((rows,), columns, dtype=torch.int32)
    for call in range(9):
        early, late = SPLITS["threads" if call % 2 else "halves of pairs"]
        random = torch.Generator().manual_seed(call)
        logits = [torch.randn(rows, columns, generator=random).to(dtype) for _ in range(world_size)]
        words = [cpu.local_topk_words(of_rank, ends, n) for of_rank in logits]
        spec = loopback.spec(0, 1)
        _, saturation = cpu.select_words(torch.stack(words), spec, None, emit_ids=False)
        assert not saturation.any()  # what is copied has no rescue lists
        want = expected(words, words, spec, None).ids

        epoch = call + 1
        halves = tag_words(words[-1].numpy().view(np.uint32), np.full(rows, epoch, dtype=np.uint32))
        sent = torch.from_numpy(halves.view(np.int64)).to(ctx.device)
        count = 2 * world_size * rows * sent.shape[1]
        slots = [b.view(torch.int64)[:count].view(2, world_size, rows, -1) for b in loopback._buffers[:-1]]
        targets = [of_rank[epoch & 1, world_size - 1] for of_rank in slots]

        def store(target: torch.Tensor, which: slice, sent: torch.Tensor = sent) -> None:
            # An elementwise kernel stores 8 bytes at once; a memory copy need not.
            torch.bitwise_or(sent[:, which], 0, out=target[:, which])

        inputs = [[t.to(ctx.device) for t in (words[r], logits[r], ends)] for r in range(world_size - 1)]
        launches = [
            prepare_exchange(loopback.exchanges[r], *inputs[r], loopback.spec(r, 1), None, True)
            for r in range(world_size - 1)
        ]
        second, merged = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()

        def launch_all(launches: list = launches, merged: torch.cuda.Event = merged) -> None:
            for stream, launch in zip(kernels, launches, strict=True):
                with torch.cuda.stream(stream):
                    launch.run()
            merged.record(kernels[0])

        if call:
            launch_all()
        with torch.cuda.stream(side):
            for target in targets[1:]:
                store(target, slice(None))
            for which in early:
                store(targets[0], which)
            torch.cuda._sleep(MILLISECOND)
            second.record()
            store(targets[0], late)
        if call == 0:  # loads the code of all that may not wait for a merge
            torch.cuda.synchronize()
            launch_all()
        loopback.synchronize()
        if call and second.elapsed_time(merged) < 0:
            problems.append(f"call {call}: the merge ended before the last words were stored")
        for rank, launch in enumerate(launches):
            if not torch.equal(launch.result.ids.cpu(), want):
                problems.append(f"call {call}: wrong ids on rank {rank}")
    return problems


@pytest.mark.parametrize(
    "world_size, k, n, dtype",
    [(2, 512, 320, torch.float32), (2, 512, 320, torch.bfloat16), (8, 2048, 2048, torch.float32)],
)
def test_the_words_of_a_warp_in_two_halves_a_millisecond_apart(
    gpus: RankPool, world_size: int, k: int, n: int, dtype: torch.dtype
) -> None:
    assert gpus.run(words_in_two_halves, world_size, k, n, dtype) == [[]] * W  # each rank for itself


# a kernel that reads as early as it may


def read_early(ctx: RankContext, in_place: bool, graphed: bool) -> tuple[int, int, float]:
    """Rows read wrongly, rows merged wrongly, and the longest time that the reader was there too early, in us."""
    from early_reader import Reader

    from vllm_topkx.ops.cute.device import architecture
    from vllm_topkx.ops.cute.launch import prepare_exchange, prepare_merge_dcp_topk

    k, n, rows, columns, rounds = 128, 80, 8, 600, 20
    exchange = vllm_topkx.reserve(ctx.group, rows=32, topk=k, local_topk=n)
    spec = MergeSpec(ctx.rank, W, k, n, 1, FP32)
    reader = Reader(k).build(f"--gpu-arch {architecture()}")
    logits = torch.zeros(rows, columns, device=ctx.device)
    ends = torch.full((rows,), columns, dtype=torch.int32, device=ctx.device)
    words = torch.zeros(rows, 2 * n, dtype=torch.int32, device=ctx.device)
    local, ids, copy = (torch.full((rows, k), -7, dtype=torch.int32, device=ctx.device) for _ in range(3))
    times = torch.zeros(rows, 2, dtype=torch.int64, device=ctx.device)
    if in_place:
        launch = prepare_merge_dcp_topk(exchange, logits, ids, None, spec)
    else:
        launch = prepare_exchange(exchange, words, logits, ends, spec, None, True)
        ids = launch.result.ids

    def step() -> None:
        torch.bitwise_or(local, 0, out=ids)  # junk, or what the merge replaces; by a kernel, as all that is captured
        if ctx.rank == 1:
            torch.cuda._sleep(MILLISECOND)
        launch.run()
        reader(ids, copy, times)

    def refresh(seed: int) -> torch.Tensor:
        scores, _ = random_inputs(seed, rows, columns, skew=seed % 2 == 1)
        scores = scores.to(ctx.device)
        logits.copy_(scores[ctx.rank])
        words.copy_(ops.local_topk_words(logits, ends, n))
        if in_place:
            local.copy_(logits.topk(k).indices)
        return scores

    refresh(0)
    step()
    torch.cuda.synchronize()
    dist.barrier(ctx.group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if graphed:
        with torch.cuda.graph(graph):
            step()
    read, merged, early_us = 0, 0, 0.0
    for seed in range(rounds):
        scores = refresh(seed)
        torch.cuda.synchronize()
        graph.replay() if graphed else step()
        exchange.synchronize()
        read += int(wrong_rows(copy, scores, ends.expand(W, -1), k))
        merged += int(wrong_rows(ids, scores, ends.expand(W, -1), k))
        early_us = max(early_us, float((times[:, 1] - times[:, 0]).max()) / 1000)
    return read, merged, early_us


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_dependent_kernel_that_is_launched_early_reads_final_ids(
    gpus: RankPool, in_place: bool, graphed: bool
) -> None:
    found = gpus.run(read_early, in_place, graphed)
    print(found)
    assert [(read, merged) for read, merged, _ in found] == [(0, 0)] * W
    # It was there while one rank waited for the other, mostly rank 0, a millisecond; in a graph the driver decides.
    assert graphed or max(early_us for _, _, early_us in found) > 200


# launches that block


def test_launches_that_block() -> None:
    """Two lanes are not among them: each rank then waits in its first lane, which is to be the same on all."""
    names = [
        "test_hostile_rows_are_exact[33-5-64-False]",
        "test_vllms_contract_in_place[512-320]",
        "test_one_rank_a_call_ahead_at_every_step",
        "test_epochs_wrap_through_zero",
    ]
    line = [sys.executable, "-m", "pytest", "-q", *(f"{TESTS}/test_gpu_nvlink.py::{name}" for name in names)]
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=240, cwd=TESTS.parent)
    assert done.returncode == 0 and f"{len(names)} passed" in done.stdout, done.stdout + done.stderr
