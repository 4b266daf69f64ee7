"""vLLM's own ``_merge_dcp_topk_global`` and ours on the same buffers, on two GPUs, with vLLM's groups."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from vllm_topkx import plugin
from vllm_topkx.plugin import merge, reservation
from vllm_topkx.ranks import RankContext, RankPool


def missing() -> str | None:
    """What this machine lacks."""
    if torch.cuda.device_count() < 2:
        return "needs two CUDA GPUs"
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    try:
        from vllm.platforms import current_platform
    except Exception as error:  # an import of vLLM runs much code of others
        return f"vLLM cannot be imported: {error}"
    return None if current_platform.is_cuda() else "vLLM finds no CUDA platform (a part of it is missing)"


REASON = missing()
pytestmark = [pytest.mark.gpu, pytest.mark.gpu2, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
W, ROWS, INTERLEAVE = 2, 48, 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(W, device_type="cuda") as ranks:
        ranks.run(start)
        yield ranks


def start(ctx: RankContext) -> None:
    os.environ.update(VLLM_TOPKX="1", VLLM_TOPKX_MAX_ROWS=str(ROWS), VLLM_HOST_IP="127.0.0.1")
    plugin.register()
    from vllm import config as c
    from vllm.distributed import parallel_state

    parallel = c.ParallelConfig(
        tensor_parallel_size=W, decode_context_parallel_size=W, distributed_executor_backend="external_launcher"
    )
    with c.set_current_vllm_config(c.VllmConfig(parallel_config=parallel)):
        parallel_state.init_distributed_environment(W, ctx.rank, "env://", ctx.rank, backend="nccl")
        parallel_state.initialize_model_parallel(W, decode_context_model_parallel_size=W, backend="nccl")


def inputs(ctx: RankContext, rows: int, topk: int, prefill: bool, seed: int) -> tuple[torch.Tensor, ...]:
    """Logits with many ties, this rank's top-K of rows of very different lengths, and their first columns."""
    generator = torch.Generator().manual_seed(seed * W + ctx.rank)
    columns = 3 * topk
    logits = torch.randn(rows, columns, generator=generator).mul(100).round().div(100)
    starts = torch.randint(0, topk, (rows,), generator=generator, dtype=torch.int32) * int(prefill)
    ends = torch.randint(0, columns - int(starts.max()) + 1, (rows,), generator=generator)
    indices = torch.full((rows, topk), -1, dtype=torch.int32)
    for row, (start_, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        best = logits[row, start_ : start_ + end].topk(min(topk, end)).indices
        indices[row, : len(best)] = best.int()
    return tuple(tensor.to(ctx.device) for tensor in (logits, indices, starts))


def differing(ctx: RankContext, topk: int, rows: int, prefill: bool, graph: bool) -> tuple[int, int, int]:
    """Rows in which the two functions select other ids; rows that have any; and merges that took the exchange."""
    import vllm.model_executor.layers.sparse_attn_indexer as source
    from vllm.distributed.parallel_state import get_dcp_group

    coordinator = get_dcp_group()
    name = coordinator.unique_name, topk
    if name not in reservation.plans:
        wanted = reservation._Wanted(W, topk, INTERLEAVE, 3 * topk, ROWS, 1)
        reservation.plans[name] = reservation._plan(coordinator, wanted)
    ours = source._merge_dcp_topk_global
    before = merge.calls["exchange"]
    logits, indices, starts = inputs(ctx, rows, topk, prefill, 0)
    merged = {}
    for which, function in (("ours", ours), ("vLLM's", merge.original_of(ours))):
        buffer = torch.empty_like(indices)

        def call(function: Callable[..., None] = function, buffer: torch.Tensor = buffer) -> None:
            buffer.copy_(indices)
            function(logits, buffer, topk, ctx.rank, W, INTERLEAVE, row_starts=starts if prefill else None)

        call()
        merged[which] = buffer, call
    if graph:
        graphs = [captured(coordinator, call) for _, call in merged.values()]
        for tensor, fresh in zip((logits, indices, starts), inputs(ctx, rows, topk, prefill, 1), strict=True):
            tensor.copy_(fresh)
        for one in graphs:
            one.replay()
    sets = [buffer.sort(dim=1).values for buffer, _ in merged.values()]
    found = [int((sets[0] != sets[1]).any(1).sum()), int((sets[0] >= 0).any(1).sum())]
    return *found, merge.calls["exchange"] - before


def captured(coordinator, call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with coordinator.graph_capture() as context, torch.cuda.graph(graph, stream=context.stream):
        call()
    return graph


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("topk", [512, 1024, 2048])
def test_the_same_sets_as_vllms_own_merge(ranks: RankPool, topk: int, prefill: bool, graph: bool) -> None:
    for rows in (1, 8, ROWS):
        for other, some, taken in ranks.run(differing, topk, rows, prefill, graph):
            assert other == 0
            assert some >= rows // 2
            assert taken == 1 + graph
