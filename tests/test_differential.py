"""Random small programs of merges, right and wrong ones, give the same compiled with the pass, without, and eagerly."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

import vllm_topkx
from vllm_topkx.fx_passes import ExchangeMergePass, aot_eager, compile_options
from vllm_topkx.fx_passes.nodes import op_name
from vllm_topkx.ops.exchange import TopkExchange
from vllm_topkx.ops.layouts import layout_of
from vllm_topkx.ranks import RankContext, RankPool

W, K, N, L, ROWS, INTERLEAVE, BLOCK = 2, 16, 12, 64, 6, 2, 8
ops, comm = torch.ops.topkx, torch.ops._c10d_functional
LANES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True)
class Groups:
    """The group of the exchanges, and another of the same ranks."""

    rank: int
    main: str
    other: str


def gather_rows(words: torch.Tensor, group: str) -> torch.Tensor:
    return comm.wait_tensor(comm.all_gather_into_tensor(words, W, group))


#: Right and wrong ways from the words to ``[W, T, R]``.
GATHERS: dict[str, Callable[[torch.Tensor, Groups], torch.Tensor]] = {
    "view": lambda words, g: gather_rows(words, g.main).view(W, *words.shape),
    "chunk and cat": lambda words, g: (
        torch.cat(gather_rows(words, g.main).chunk(W), 1).view(-1, W, words.shape[1]).transpose(0, 1)
    ),
    "transposed": lambda words, g: (
        gather_rows(words.t().contiguous(), g.main).view(W, words.shape[1], -1).permute(0, 2, 1)
    ),
    "ranks swapped": lambda words, g: torch.stack(gather_rows(words, g.main).chunk(W)[::-1]),
    "one rank twice": lambda words, g: torch.stack([gather_rows(words, g.main).chunk(W)[0]] * W),
    "rows turned": lambda words, g: gather_rows(words, g.main).view(W, *words.shape).flip(1),
    "two all-gathers": lambda words, g: torch.stack([gather_rows(words, g.main).chunk(W)[r] for r in range(W)]),
    "as int64": lambda words, g: gather_rows(words.long(), g.main).int().view(W, *words.shape),
    "another group": lambda words, g: gather_rows(words, g.other).view(W, *words.shape),
    "graph break": lambda words, g: broken(gather_rows(words, g.main)).view(W, *words.shape),
}


def broken(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x


#: What a rescue gets: its arguments by name, changed.
RESCUES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "its own": lambda args: {},
    "other scores": lambda args: {"logits": -args["logits"]},
    "other row ends": lambda args: {"row_ends": args["row_ends"] // 2},
    "rows and ids swapped": lambda args: {"rows": args["ids"], "ids": args["rows"]},
    "valid and saturation swapped": lambda args: {"valid": args["saturation"] + 0},
    "another stride": lambda args: {"block_stride": args["block_stride"] + 8},
    "a changed table": lambda args: {"block_table": args["block_table"].add_(1)},
}


@dataclass(frozen=True)
class Piece:
    """One merge.

    Attributes:
        scores: ``"input"``, ``"autocast"`` (bfloat16), or ``"last"``: what depends on the merge before.
        local_topk: N or K.
        gather: of ``GATHERS``.
        rescue: of ``RESCUES``, or ``"none"``.
        again: the words are those of the merge before.
        wrapped: in a function of a function.
        write: what is written to in the middle: ``"words"``, ``"scores"``, or ``""``.
        shown: outputs of the program beside the ids.
    """

    scores: str
    local_topk: int
    gather: str
    rescue: str
    again: bool
    wrapped: bool
    write: str
    shown: tuple[str, ...]


SHOWN = ["rows", "valid", "saturation", "gathered", "words", "first"]
ANY_PIECE = st.builds(
    Piece,
    scores=st.sampled_from(["input", "autocast", "last"]),
    local_topk=st.sampled_from([N, K]),
    gather=st.sampled_from(list(GATHERS)),
    rescue=st.sampled_from(["its own", "none", *RESCUES]),
    again=st.booleans(),
    wrapped=st.booleans(),
    write=st.sampled_from(["", "", "words", "scores"]),
    shown=st.lists(st.sampled_from(SHOWN), max_size=2).map(tuple),
)
RIGHT_PIECE = st.builds(
    Piece,
    scores=st.sampled_from(["input", "autocast", "last"]),
    local_topk=st.sampled_from([N, K]),
    gather=st.sampled_from(["view", "chunk and cat", "transposed"]),
    rescue=st.just("its own"),
    again=st.booleans(),
    wrapped=st.booleans(),
    write=st.just(""),
    shown=st.lists(st.sampled_from(["rows", "valid", "words"]), max_size=2).map(tuple),
)


def merge(piece: Piece, words, scores, row_ends, table, request, groups: Groups) -> dict[str, torch.Tensor]:
    gathered = GATHERS[piece.gather](words, groups)
    if piece.write == "words":
        words.copy_(words.roll(1, 0))  # words still, of other rows
    if piece.write == "scores":
        scores.neg_()
    kv = {"block_table": table, "req_id": request, "block_size": BLOCK, "block_stride": BLOCK}
    numbers = (groups.rank, K, piece.local_topk, INTERLEAVE)
    rows, valid, ids, saturation = ops.topk_select(gathered, *numbers, layout_of(scores.dtype).name, **kv)
    out = {"rows": rows, "valid": valid, "ids": ids, "saturation": saturation, "gathered": gathered, "words": words}
    out["first"] = ids
    if piece.rescue == "none":
        return out
    args = {"gathered": gathered, "saturation": saturation, "rows": rows, "valid": valid, "ids": ids}
    args |= {"logits": scores, "row_ends": row_ends, "group": groups.main, "rank": groups.rank, "topk": K}
    args |= {"local_topk": piece.local_topk, "interleave": INTERLEAVE, "lane": LANES[scores.dtype], **kv}
    rows, valid, ids = ops.topk_rescue(**args | RESCUES[piece.rescue](args))
    return out | {"rows": rows, "valid": valid, "ids": ids}


def program(pieces: tuple[Piece, ...], groups: Groups, logits, row_ends, table, request, weight) -> list[torch.Tensor]:
    shown: list[torch.Tensor] = []
    words = scores = last = None
    for piece in pieces:
        if not piece.again or words is None or last.local_topk != piece.local_topk:
            scores = logits + 0
            if piece.scores == "autocast":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    scores = logits @ weight
            elif piece.scores == "last" and shown:
                scores = logits * (shown[0] % 3 - 1).sum(-1, keepdim=True)
            words = ops.local_topk_words(scores, row_ends, piece.local_topk)

        def wrapped(function: Callable, *args: Any) -> dict[str, torch.Tensor]:
            return function(*args)

        args = (piece, words, scores, row_ends, table, request, groups)
        out = wrapped(merge, *args) if piece.wrapped else merge(*args)
        shown = [out["ids"] + 0, *shown, *(out[name] + 0 for name in piece.shown)]
        last = piece
    return shown


class CountingPass:
    """The pass, and how many selects it was shown."""

    def __init__(self) -> None:
        self.merge, self.selects = ExchangeMergePass(), 0

    def __call__(self, graph: fx.Graph) -> None:
        self.selects += sum(op_name(node) == "topkx::topk_select" for node in graph.nodes)
        self.merge(graph)
        graph.lint()


def inputs(rank: int) -> list[torch.Tensor]:
    """Of one rank; in half of the rows one rank has all that belongs."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((W, ROWS, L)).astype(np.float32).round(1)
    logits[0, ::2] += 10
    ends = rng.integers(L // 2, L + 1, (W, ROWS)).astype(np.int32)
    table = torch.arange(2 * L // BLOCK, dtype=torch.int32).view(2, -1).flip(1)
    request = torch.arange(ROWS, dtype=torch.int32) % 2
    return [torch.from_numpy(logits[rank]), torch.from_numpy(ends[rank]), table, request, torch.eye(L)]


@contextmanager
def reserved(ctx: RankContext) -> Iterator[dict[tuple, TopkExchange]]:
    """Exchanges for both dtypes and both N, on ranks that wait for each other's compiler; no others."""
    vllm_topkx.release_all()
    with mock.patch.dict(os.environ, VLLM_TOPKX_TIMEOUT_S="200"):
        yield {
            (dtype, n): vllm_topkx.reserve(ctx.group, ROWS, K, local_topk=n, dtype=dtype, lane=lane, device="cpu")
            for dtype, lane in LANES.items()
            for n in (N, K)
        }
    vllm_topkx.release_all()


def run_ways(ctx: RankContext, pieces: tuple[Piece, ...]) -> dict[str, Any]:
    """The program's outputs eagerly, compiled without the pass, and with it; and what the pass did."""
    other = dist.new_group(list(range(W)), use_local_synchronization=True)
    groups, counting = Groups(ctx.rank, ctx.group_name, other.group_name), CountingPass()
    ways: dict[str, Callable] = {
        "eager": program,
        "without": torch.compile(program, backend=functools.partial(aot_eager, graph_pass=lambda graph: None)),
        "with": torch.compile(program, backend=functools.partial(aot_eager, graph_pass=counting)),
    }
    report: dict[str, Any] = {}
    try:
        with reserved(ctx):
            for way, function in ways.items():
                torch._dynamo.reset()
                report[way] = [out.tolist() for out in function(pieces, groups, *inputs(ctx.rank))]
    finally:
        dist.destroy_process_group(other)
    report["counts"] = counting.selects, counting.merge.rewritten, counting.merge.left_alone
    return report


def check(pool: RankPool, *pieces: Piece) -> tuple[int, Counter[str]]:
    """Chains that the pass rewrote, and why it left others alone."""
    reports = pool.run(run_ways, pieces, world_size=W)
    for report in reports:
        assert report["without"] == report["eager"]
        assert report["with"] == report["eager"]
        selects, rewritten, left_alone = report["counts"]
        assert rewritten + left_alone.total() == selects
        assert report["counts"] == reports[0]["counts"]
    return rewritten, left_alone


RIGHT = Piece("input", N, "view", "its own", again=False, wrapped=False, write="", shown=())
#: Each gather and each rescue once, beside a right one.
EVERY = [replace(RIGHT, gather=gather) for gather in GATHERS] + [replace(RIGHT, rescue=rescue) for rescue in RESCUES]


@pytest.mark.parametrize("first", range(0, len(EVERY), 3))
def test_every_gather_and_rescue(pool: RankPool, first: int) -> None:
    pieces = EVERY[first : first + 3]
    rewritten, left_alone = check(pool, *pieces, RIGHT)
    # After a break in a loop Dynamo compiles the merges alone, whose words then come from outside.
    assert rewritten or "graph break" in {piece.gather for piece in pieces}
    assert left_alone or first == 0


@settings(max_examples=12, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(pieces=st.lists(RIGHT_PIECE | ANY_PIECE, min_size=1, max_size=3))
def test_programs(pool: RankPool, pieces: list[Piece]) -> None:
    check(pool, *pieces)


@torch.compiler.nested_compile_region
def region(logits: torch.Tensor, row_ends: torch.Tensor, groups: Groups) -> torch.Tensor:
    words = ops.local_topk_words(logits, row_ends, N)
    gathered = gather_rows(words, groups.main).view(W, *words.shape)
    rows, valid, ids, saturation = ops.topk_select(gathered, groups.rank, K, N, INTERLEAVE, "fp32")
    args = (gathered, saturation, rows, valid, ids, logits, row_ends, groups.main, groups.rank, K, N, INTERLEAVE)
    return ops.topk_rescue(*args)[2] + 0


def two_regions(logits: torch.Tensor, row_ends: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    return region(logits, row_ends, groups), region(-logits, row_ends, groups)


def run_regions(ctx: RankContext) -> dict[str, Any]:
    args, merge_pass, options = inputs(ctx.rank)[:2], ExchangeMergePass(), compile_options()
    ways: dict[str, Callable] = {
        "eager": two_regions,
        "aot_eager": torch.compile(two_regions, backend=functools.partial(aot_eager, graph_pass=merge_pass)),
        "inductor": torch.compile(two_regions, options=options),
    }
    report: dict[str, Any] = {"calls": []}
    config = torch._inductor.config.patch(force_disable_caches=True, compile_threads=1)
    with reserved(ctx) as exchanges, config:
        epoch = exchanges[torch.float32, N].epoch
        for way, function in ways.items():
            torch._dynamo.reset()
            before = epoch[0].item()
            report[way] = [ids.tolist() for ids in function(*args, Groups(ctx.rank, ctx.group_name, ""))]
            report["calls"].append(epoch[0].item() - before)
    report["rewritten"] = merge_pass.rewritten, options["post_grad_custom_post_pass"].rewritten
    return report


def test_nested_regions(pool: RankPool) -> None:
    """Two calls of one region: a graph of its own, which is rewritten once and exchanges twice."""
    for report in pool.run(run_regions, world_size=W):
        assert report["aot_eager"] == report["eager"]
        assert report["inductor"] == report["eager"]
        assert report["calls"] == [0, 2, 2]
        assert report["rewritten"] == (1, 1)
