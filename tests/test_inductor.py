"""Compiled user code on two real ranks: the results, what Inductor makes of it, and that it keeps the order."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed._functional_collectives as funcol

import vllm_topkx
from vllm_topkx.fx_passes import ExchangeMergePass, aot_eager, compile_options
from vllm_topkx.ops.exchange import TopkExchange
from vllm_topkx.ops.layouts import packed_row_words
from vllm_topkx.ops.reference import reference_topk
from vllm_topkx.ranks import RankContext, RankPool

W, K, N, L, ROWS, INTERLEAVE = 2, 16, 12, 64, 6, 2
ROW_COUNTS = (4, ROWS, 2)
R = packed_row_words(N, "fp32")
BLOCK = 8


@contextmanager
def compiling(ctx: RankContext, lane: int) -> Iterator[TopkExchange]:
    """An exchange whose ranks wait for each other's compiler, and compilers that start from nothing."""
    with mock.patch.dict(os.environ, VLLM_TOPKX_TIMEOUT_S="200"):
        exchange = vllm_topkx.reserve(ctx.group, rows=ROWS, topk=K, local_topk=N, device="cpu", lane=lane)
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
        yield exchange
    torch._dynamo.reset()


def scores(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits ``[W, rows, L]`` and row ends; in row 1 one rank has all that belongs, so that it is rescued."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((W, rows, L)).astype(np.float32)
    logits[seed % W, 1] += 100
    return logits, rng.integers(L // 2, L + 1, (W, rows)).astype(np.int32)


def sorted_ids(ids: torch.Tensor) -> list[list[int]]:
    return ids.sort(dim=-1).values.tolist()


def expected(logits: np.ndarray, ends: np.ndarray) -> list[list[int]]:
    return np.sort(reference_topk(logits, ends, K, INTERLEAVE), axis=-1).tolist()


# The all-gather form that a user writes


def user_merge(logits, row_ends, block_table, req_id, group, rank, lane):
    words = torch.ops.topkx.local_topk_words(logits, row_ends, N)
    gathered = funcol.all_gather_tensor(words, 0, group).view(W, -1, R)
    kv = {"block_table": block_table, "req_id": req_id, "block_size": BLOCK, "block_stride": BLOCK}
    rows, valid, ids, saturation = torch.ops.topkx.topk_select(gathered, rank, K, N, INTERLEAVE, "fp32", **kv)
    first = gathered, saturation, rows, valid, ids, logits, row_ends, group.group_name
    rows, valid, ids = torch.ops.topkx.topk_rescue(*first, rank, K, N, INTERLEAVE, **kv, lane=lane)
    return rows, valid, ids + 0


def run_row_counts(ctx: RankContext, function: Callable) -> list[list]:
    """KV rows, their count and sorted ids of calls of several row counts, which one graph serves."""
    results = []
    for rows in ROW_COUNTS:
        logits, ends = (torch.from_numpy(a[ctx.rank]) for a in scores(rows, rows))
        table = torch.arange(2 * L // BLOCK, dtype=torch.int32).view(2, -1).flip(1)
        request = torch.arange(rows, dtype=torch.int32) % 2
        for tensor in (logits, ends, request):
            torch._dynamo.mark_dynamic(tensor, 0, min=2, max=ROWS)
        kv_rows, valid, ids = function(logits, ends, table, request, ctx.group, ctx.rank, 20)
        results.append([kv_rows.tolist(), valid.tolist(), sorted_ids(ids)])
    return results


def compiled_user_code(ctx: RankContext) -> dict[str, Any]:
    merge_pass, options = ExchangeMergePass(), compile_options()
    backend = functools.partial(aot_eager, graph_pass=merge_pass)
    ways: dict[str, Callable] = {
        "eager": user_merge,
        "aot_eager": torch.compile(user_merge, backend=backend, fullgraph=True),
        "inductor": torch.compile(user_merge, options=options, fullgraph=True),
    }
    report: dict[str, Any] = {"calls": []}
    with compiling(ctx, lane=20) as exchange:
        for way, function in ways.items():
            before = exchange.epoch[0].item()
            report[way], code = torch._inductor.utils.run_and_get_code(run_row_counts, ctx, function)
            report["calls"].append(exchange.epoch[0].item() - before)
    report["rewritten"] = merge_pass.rewritten, options["post_grad_custom_post_pass"].rewritten
    report["code"] = "\n".join(code)
    return report


def test_compiled_user_code(pool: RankPool) -> None:
    for report in pool.run(compiled_user_code, world_size=W):
        assert [ids for _, _, ids in report["eager"]] == [expected(*scores(rows, rows)) for rows in ROW_COUNTS]
        assert report["aot_eager"] == report["eager"]
        assert report["inductor"] == report["eager"]
        # The compiled ones exchange; the form that was written all-gathers.
        assert report["calls"] == [0, 3, 3]
        assert report["rewritten"] == (1, 1)
        assert "exchange_merge" in report["code"]
        assert "all_gather" not in report["code"] and "topk_select" not in report["code"]


# The order of exchanges


def merge(logits: torch.Tensor, row_ends: torch.Tensor, group: str, lane: int) -> torch.Tensor:
    words = torch.ops.topkx.local_topk_words(logits, row_ends, N)
    return torch.ops.topkx.exchange_merge(words, logits, row_ends, group, W, K, N, INTERLEAVE, lane=lane)[2]


def four_merges(base, row_ends, group, lane):
    """Merges whose order Inductor would like to change, of which two are equal, and one is not used."""
    late = base.sin()
    # Running the merge of `late` first would free it before `early` is made, which needs its sum.
    early = (base + late.sum() * 0).exp()
    a = merge(early, row_ends, group, lane)
    b = merge(late, row_ends, group, lane)
    merge(late, row_ends, group, lane)
    same_as_a = merge(early, row_ends, group, lane)
    return b + 0, a + 0, same_as_a + 0


def unused_merge(base, row_ends, group, lane):
    merge(base, row_ends, group, lane)
    return base + 0


def one_rank_compiles(ctx: RankContext, backend: str) -> dict[str, Any]:
    report: dict[str, Any] = {}
    with compiling(ctx, lane=21) as exchange:
        base, ends = (torch.from_numpy(a[ctx.rank]) for a in scores(1, ROWS))
        function, unused = four_merges, unused_merge
        if ctx.rank == 0:
            how = {"options": compile_options()} if backend == "inductor" else {"backend": aot_eager}
            function, unused = (torch.compile(f, fullgraph=True, **how) for f in (four_merges, unused_merge))
        before = exchange.epoch.clone()
        unused(base, ends, ctx.group_name, 21)
        report["unused calls"] = (exchange.epoch - before).tolist()
        before = exchange.epoch.clone()
        out, code = torch._inductor.utils.run_and_get_code(function, base, ends, ctx.group_name, 21)
        report["ids"] = [sorted_ids(ids) for ids in out]
        report["calls"] = (exchange.epoch - before).tolist()
        report["code"] = "\n".join(code)
    return report


def check_four_merges(pool: RankPool, backend: str) -> str:
    reports = pool.run(one_rank_compiles, backend, world_size=W)
    base, ends = scores(1, ROWS)
    late = expected(torch.from_numpy(base).sin().numpy(), ends)
    early = expected(torch.from_numpy(base).exp().numpy(), ends)
    for report in reports:
        assert report["ids"] == [late, early, early]
        assert report["calls"] == [4] * ROWS
        assert report["unused calls"] == [1] * ROWS
    return reports[0]["code"]


def test_inductor_keeps_the_order(pool: RankPool) -> None:
    code = check_four_merges(pool, "inductor")
    assert code.count("torch.ops.topkx.exchange_merge.default(") == 4


def test_aot_eager_keeps_the_order(pool: RankPool) -> None:
    check_four_merges(pool, "aot_eager")
