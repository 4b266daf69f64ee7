"""vLLM's indexer op in graphs that vLLM 0.33.0 compiles, on two real ranks: real layers, op, metadata and merge."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from indexed_model import DYNAMIC, ROWS, UNTOUCHED, Indexed, K, L, decode_step, indexer_arguments
from wrapping import wrapped

from vllm_topkx import plugin
from vllm_topkx.cli import vllm_cpu
from vllm_topkx.cli.graph_text import graph_text
from vllm_topkx.ops.reference import reference_topk, same_sets
from vllm_topkx.plugin import merge
from vllm_topkx.ranks import RankContext, RankPool

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

W, N, CALLS = 2, 40, 2
#: Options of the configuration: the graph whole, split by Dynamo (vLLM's default), split by Inductor.
MODES = {"unsplit": {"splitting_ops": []}, "piecewise": {}, "partition": {"graph_partition": True}}


@dataclass
class Outcome:
    """Of compiling the model and calling it with steps of changing size.

    Attributes:
        graphs: what the pass met as text, before and after it.
        pieces: the graphs that vLLM split, and which of them are for a splitting op.
        partitions: ops at which Inductor was told to partition.
        code: what Inductor generated.
        ids, eager: the model's outputs and buffer, compiled and not.
        merges: of the compiled model, by what became of them.
    """

    graphs: list[tuple[str, str]] = field(default_factory=list)
    pieces: list[tuple[bool, str]] = field(default_factory=list)
    partitions: set[str] = field(default_factory=set)
    code: list[str] = field(default_factory=list)
    ids: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    eager: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    merges: Counter[str] = field(default_factory=Counter)


def step(call: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and row ends by rank; rank 1 holds all of row 0's best."""
    rng, rows = np.random.default_rng(call), 3 + 4 * call
    scores = rng.standard_normal((W, rows, L)).astype(np.float32).round(1)
    scores[1, 0] *= 100
    return scores, np.maximum(rng.integers(0, L + 1, (W, rows)), (np.arange(rows) == 0) * L).astype(np.int32)


# On the ranks


def start(ctx: RankContext, folder: str) -> None:
    """vLLM's groups under the plugin."""
    limits = {"VLLM_TOPKX_MAX_ROWS": str(ROWS), "VLLM_TOPKX_LOCAL_TOPK": str(N)}
    os.environ.update(vllm_cpu.environment(f"{folder}/{ctx.rank}") | limits)
    plugin.register()
    vllm_cpu.set_up(ctx.rank, W)


@contextmanager
def recorded(run_pass: Callable[[Any, torch.fx.Graph], None] | None) -> Iterator[Outcome]:
    """What the pass, vLLM's split and Inductor's scheduler do in this process; ``run_pass`` in place of the pass."""
    from torch._inductor.scheduler import Scheduler
    from vllm.compilation import backends

    from vllm_topkx.fx_passes import IndexerPass

    outcome, run = Outcome(), run_pass or IndexerPass.__call__
    split, should_partition = backends.split_graph, Scheduler.should_partition

    def record_pass(self: IndexerPass, graph: torch.fx.Graph) -> None:
        before = graph_text(graph)
        run(self, graph)
        outcome.graphs.append((before, graph_text(graph)))

    def record_split(*args):
        split_gm, pieces = split(*args)
        outcome.pieces += [(piece.is_splitting_graph, graph_text(piece.graph.graph)) for piece in pieces]
        return split_gm, pieces

    def record_partition(self, node, *args, **kwargs):
        reason = should_partition(self, node, *args, **kwargs)
        custom, _, op = str(reason).partition(": ")
        outcome.partitions |= {op} if custom == "custom partition op" else set()
        return reason

    with (
        patch.object(IndexerPass, "__call__", record_pass),
        patch.object(backends, "split_graph", record_split),
        patch.object(Scheduler, "should_partition", record_partition),
    ):
        yield outcome


def leave(self: Any, graph: torch.fx.Graph) -> None:
    """A pass that does nothing: vLLM's own op stays."""


def fail(self: Any, graph: torch.fx.Graph) -> None:
    """A pass that leaves a broken graph."""
    node = next(node for node in graph.nodes if node.op == "call_function")
    node.args = (graph.output(node),)
    raise KeyError("no such luck")


def compile_and_run(
    ctx: RankContext, mode: str, world_size: int | None = None, mutated: str = "buffer", run_pass: Any = None
) -> Outcome:
    from torch._inductor import config as inductor_config
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    config = vllm_cpu.make_config(ctx.rank, W, ROWS, **MODES[mode])
    module = vllm_cpu.compiled(Indexed, DYNAMIC, config, world_size=world_size, mutated=mutated)
    with recorded(run_pass) as outcome, inductor_config.patch(force_disable_caches=True):
        for call in range(CALLS):
            scores, ends = (array[ctx.rank] for array in step(call))
            inputs = torch.from_numpy(scores), torch.full((ROWS, K), UNTOUCHED, dtype=torch.int32)
            for results, function in ((outcome.ids, module), (outcome.eager, module.forward)):
                module.buffer.fill_(UNTOUCHED)
                before = merge.calls.copy()
                with decode_step(ends):
                    ids, code = run_and_get_code(function, *inputs)
                results.append((ids.numpy(), module.buffer.numpy().copy()))
                outcome.code += code
                if function is module:
                    outcome.merges += merge.calls - before
            assert torch.all(inputs[1] == UNTOUCHED)
    return outcome


def call_eagerly(ctx: RankContext) -> list[Counter[str]]:
    """What became of the merges of vLLM's op and of its function, which eager models call by name."""
    from vllm.model_executor.layers import sparse_attn_indexer as source
    from vllm.models.deepseek_v32 import attention

    assert attention.sparse_attn_indexer is source.sparse_attn_indexer
    merges = []
    for function in (torch.ops.vllm.sparse_attn_indexer, attention.sparse_attn_indexer):
        scores, ends = (array[ctx.rank] for array in step(0))
        arguments = indexer_arguments(torch.from_numpy(scores), ctx.rank, W)
        before = merge.calls.copy()
        with decode_step(ends):
            ids = function(**arguments)[: len(ends)]
        assert same_sets(ids.numpy(), reference_topk(*step(0), K, interleave=1)).all()
        merges.append(merge.calls - before)
    return merges


# In the parent


Compiled = Callable[..., list[Outcome]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool(W) as pool:
        pool.run(start, str(tmp_path_factory.mktemp("vllm")))
        yield pool


@pytest.fixture(scope="module")
def compiled(ranks: RankPool) -> Compiled:
    """:func:`compile_and_run`, once for each set of arguments."""

    @functools.cache
    def run(mode: str, **options: Any) -> list[Outcome]:
        return ranks.run(functools.partial(compile_and_run, **options), mode)

    return run


def check(outcomes: list[Outcome]) -> None:
    """Every rank has the reference's ids of both layers, from the exchange, and eagerly the same."""
    for outcome in outcomes:
        assert outcome.merges == {"exchange": 2 * CALLS}
        for compiled, eager in zip(outcome.ids, outcome.eager, strict=True):
            assert all(np.array_equal(*pair) for pair in zip(compiled, eager, strict=True))
        for call, (ids, _) in enumerate(outcome.ids):
            scores, ends = step(call)
            for layer, sign in enumerate((1, -1)):
                assert same_sets(ids[layer], reference_topk(sign * scores, ends, K, interleave=1)).all()


def changes(outcome: Outcome) -> str:
    """What the pass changed in the only graph that it met with vLLM's indexer."""
    ((before, after),) = [graphs for graphs in outcome.graphs if graphs[0] != graphs[1]]
    return wrapped(list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:])


def pieces(outcome: Outcome) -> str:
    """The ops of vLLM's pieces."""
    lines = []
    for splits, text in outcome.pieces:
        ops = ", ".join(re.findall(r" = ([\w.]+)\(", text))
        lines.append(f"split at {ops}" if splits else ops)
    return "\n".join(lines)


def test_piecewise_graph(compiled: Compiled) -> None:
    outcomes = compiled("piecewise")
    check(outcomes)
    assert_expected_inline(
        changes(outcomes[0]),
        """\
@@ -13 +13 @@
-sparse_attn_indexer: i32[32, 64] = vllm.sparse_attn_indexer(l_scores_, synthetic_local_tmp_0_,
     l_self_layers_0_k_cache_kv_cache, q_values, None, None, l_self_weights, 128, 'ue8m0', 64, 1, 150, 150,
     l_self_layers_0_topk_indices_buffer, True, False, False, synthetic_local_tmp_2_, False, 0, 2, 1, False,
     candidate_blocks=None, candidate_block_size=0, candidate_write=False, topk_backend='auto')
+sparse_attn_indexer: i32[32, 64] = topkx.sparse_attn_indexer(l_scores_, synthetic_local_tmp_0_,
     l_self_layers_0_k_cache_kv_cache, q_values, None, None, l_self_weights, 128, 'ue8m0', 64, 1, 150, 150,
     l_self_layers_0_topk_indices_buffer, True, False, False, synthetic_local_tmp_2_, False, 0, 2, 1, False,
     candidate_blocks=None, candidate_block_size=0, candidate_write=False, topk_backend='auto')
@@ -18 +18 @@
-sparse_attn_indexer_1: i32[32, 64] = vllm.sparse_attn_indexer(l_scores_, synthetic_local_tmp_4_,
     l_self_layers_1_k_cache_kv_cache, q_values_1, None, None, l_self_weights, 128, 'ue8m0', 64, 1, 150, 150,
     l_self_layers_0_topk_indices_buffer, True, False, False, synthetic_local_tmp_6_, False, 0, 2, 1, False,
     candidate_blocks=None, candidate_block_size=0, candidate_write=False, topk_backend='auto')
+sparse_attn_indexer_1: i32[32, 64] = topkx.sparse_attn_indexer(l_scores_, synthetic_local_tmp_4_,
     l_self_layers_1_k_cache_kv_cache, q_values_1, None, None, l_self_weights, 128, 'ue8m0', 64, 1, 150, 150,
     l_self_layers_0_topk_indices_buffer, True, False, False, synthetic_local_tmp_6_, False, 0, 2, 1, False,
     candidate_blocks=None, candidate_block_size=0, candidate_write=False, topk_backend='auto')""",
    )
    assert_expected_inline(
        pieces(outcomes[0]),
        """\
mul, .unsqueeze
split at topkx.sparse_attn_indexer
.long, mul, .unsqueeze
split at topkx.sparse_attn_indexer
.long, stack""",
    )


def test_unsplit_graph(compiled: Compiled) -> None:
    outcomes = compiled("unsplit")
    check(outcomes)
    assert_expected_inline(
        changes(outcomes[0]),
        """\
@@ -12 +12 @@
-auto_functionalized: (i32[32, 64], i32[32, 64], NoneType) =
     auto_functionalized(vllm.sparse_attn_indexer.default, hidden_states=arg0_1, k_cache_prefix=arg2_1,
     kv_cache=arg3_1, q_quant=unsqueeze, q_scale=None, k=None, weights=arg4_1, quant_block_size=128,
     scale_fmt='ue8m0', topk_tokens=64, head_dim=1, max_model_len=150, total_seq_lens=150,
     topk_indices_buffer=arg5_1, skip_k_cache_insert=True, use_pcp=False, pcp_shard_decode_requests=False,
     dense_mha_metadata_layer_name=arg6_1, use_fp4_cache=False, dcp_rank=0, dcp_world_size=2,
     cp_kv_cache_interleave_size=1, skip_topk_buffer_clear=False, candidate_blocks=None,
     candidate_block_size=0, candidate_write=False, topk_backend='auto')
+auto_functionalized: (i32[32, 64], i32[32, 64], NoneType) =
     auto_functionalized(topkx.sparse_attn_indexer.default, hidden_states=arg0_1, k_cache_prefix=arg2_1,
     kv_cache=arg3_1, q_quant=unsqueeze, q_scale=None, k=None, weights=arg4_1, quant_block_size=128,
     scale_fmt='ue8m0', topk_tokens=64, head_dim=1, max_model_len=150, total_seq_lens=150,
     topk_indices_buffer=arg5_1, skip_k_cache_insert=True, use_pcp=False, pcp_shard_decode_requests=False,
     dense_mha_metadata_layer_name=arg6_1, use_fp4_cache=False, dcp_rank=0, dcp_world_size=2,
     cp_kv_cache_interleave_size=1, skip_topk_buffer_clear=False, candidate_blocks=None,
     candidate_block_size=0, candidate_write=False, topk_backend='auto')
@@ -16 +16 @@
-auto_functionalized_1: (i32[32, 64], i32[32, 64], NoneType) =
     auto_functionalized(vllm.sparse_attn_indexer.default, hidden_states=arg0_1, k_cache_prefix=arg7_1,
     kv_cache=arg8_1, q_quant=unsqueeze_1, q_scale=None, k=None, weights=arg4_1, quant_block_size=128,
     scale_fmt='ue8m0', topk_tokens=64, head_dim=1, max_model_len=150, total_seq_lens=150,
     topk_indices_buffer=getitem_1, skip_k_cache_insert=True, use_pcp=False, pcp_shard_decode_requests=False,
     dense_mha_metadata_layer_name=arg9_1, use_fp4_cache=False, dcp_rank=0, dcp_world_size=2,
     cp_kv_cache_interleave_size=1, skip_topk_buffer_clear=False, candidate_blocks=None,
     candidate_block_size=0, candidate_write=False, topk_backend='auto')
+auto_functionalized_1: (i32[32, 64], i32[32, 64], NoneType) =
     auto_functionalized(topkx.sparse_attn_indexer.default, hidden_states=arg0_1, k_cache_prefix=arg7_1,
     kv_cache=arg8_1, q_quant=unsqueeze_1, q_scale=None, k=None, weights=arg4_1, quant_block_size=128,
     scale_fmt='ue8m0', topk_tokens=64, head_dim=1, max_model_len=150, total_seq_lens=150,
     topk_indices_buffer=getitem_1, skip_k_cache_insert=True, use_pcp=False, pcp_shard_decode_requests=False,
     dense_mha_metadata_layer_name=arg9_1, use_fp4_cache=False, dcp_rank=0, dcp_world_size=2,
     cp_kv_cache_interleave_size=1, skip_topk_buffer_clear=False, candidate_blocks=None,
     candidate_block_size=0, candidate_write=False, topk_backend='auto')""",
    )
    assert len(outcomes[0].pieces) == 1 and not outcomes[0].partitions


def test_partitioned_graph(compiled: Compiled) -> None:
    outcomes = compiled("partition")
    check(outcomes)
    assert changes(outcomes[0]) == changes(compiled("unsplit")[0])
    assert len(outcomes[0].pieces) == 1
    assert outcomes[0].partitions == {"topkx::sparse_attn_indexer.default"}


@pytest.mark.parametrize("mode", ["piecewise", "unsplit"])
@pytest.mark.parametrize("mutated", ["slice", "clone"])
def test_what_else_may_be_mutated(compiled: Compiled, mode: str, mutated: str) -> None:
    outcomes = compiled(mode, mutated=mutated)
    check(outcomes)
    assert "topkx.sparse_attn_indexer" in changes(outcomes[0])


@pytest.mark.parametrize("mutated", ["buffer", "slice", "clone"])
def test_inductor_makes_the_same_code_as_of_vllms_op(compiled: Compiled, mutated: str) -> None:
    """So there is no copy that vLLM's op would not have."""
    codes = []
    for run_pass, name in ((None, "topkx"), (leave, "vllm")):
        (code,) = compiled("unsplit", mutated=mutated, run_pass=run_pass)[0].code
        assert f"torch.ops.{name}.sparse_attn_indexer" in code
        codes.append(code.partition("# AOT ID: ")[2].partition("\n")[2].replace("topkx", "vllm"))
    assert codes[0].splitlines() == codes[1].splitlines()


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_changes_nothing(compiled: Compiled, mode: str) -> None:
    for outcome in compiled(mode, world_size=1):
        assert any("sparse_attn_indexer" in before for before, _ in outcome.graphs)
        assert all(before == after for before, after in outcome.graphs)
        assert "topkx" not in str((outcome.pieces, outcome.partitions, outcome.code))
        assert not outcome.merges


@pytest.mark.parametrize("mode", ["piecewise", "unsplit"])
def test_a_pass_that_fails_leaves_vllms_graph(compiled: Compiled, mode: str) -> None:
    outcomes = compiled(mode, run_pass=fail)
    check(outcomes)
    assert "topkx" not in str((outcomes[0].pieces, outcomes[0].code))


def test_the_eager_call_site_reaches_the_exchange(ranks: RankPool) -> None:
    """vLLM's op and the function that eager models call."""
    assert ranks.run(call_eagerly) == [[{"exchange": 1}] * 2] * W
