"""The plugin in vLLM 0.33.0's own compile stack: VllmBackend and support_torch_compile, on two real ranks."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from wrapping import wrapped

import vllm_topkx
from vllm_topkx.cli import vllm_cpu
from vllm_topkx.cli.demo import recorded
from vllm_topkx.cli.graph_text import Recording
from vllm_topkx.ops.reference import reference_topk, same_sets
from vllm_topkx.ranks import RankContext, RankPool

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

W, L, K, N, INTERLEAVE, ROWS = 2, 40, 16, 10, 4, 64
#: Options of the configuration: the graph whole, split by Dynamo (vLLM's default), split by Inductor.
MODES = {"unsplit": {"splitting_ops": []}, "piecewise": {}, "partition": {"graph_partition": True}}
DYNAMIC = {"x": 0, "row_ends": 0}


class Merge(nn.Module):
    """A merge in all-gather form behind an op at which vLLM splits; ``form`` is the all-gather's.

    In form ``"around"``, there is such an op between the all-gather and its use, too.
    """

    def __init__(self, form: str, rank: int, group: str, local_topk: int) -> None:
        super().__init__()
        self.form, self.rank, self.group, self.local_topk = form, rank, group, local_topk

    def forward(self, x: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
        logits = torch.ops.topkx_test.attention(x)
        words = torch.ops.topkx.local_topk_words(logits, row_ends, self.local_topk)
        late = torch.ops.topkx_test.attention(x) if self.form == "around" else None
        if self.form != "c10d":
            gathered = torch.ops.vllm.all_gather(words, 1, W, self.group).view(-1, W, words.shape[1]).movedim(1, 0)
        else:
            gathered = torch.ops._c10d_functional.all_gather_into_tensor(words, W, self.group)
            gathered = torch.ops._c10d_functional.wait_tensor(gathered).view(W, -1, words.shape[1])
        merge = (self.rank, K, self.local_topk, INTERLEAVE)
        rows, valid, ids, saturation = torch.ops.topkx.topk_select(gathered, *merge, "fp32")
        args = (gathered, saturation, rows, valid, ids, logits, row_ends, self.group, *merge)
        ids = torch.ops.topkx.topk_rescue(*args)[2]
        return ids if late is None else torch.where(late.amax(1, keepdim=True).isnan(), -1, ids)


class NoMerge(nn.Module):
    """What a model is without DCP."""

    def forward(self, x: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
        return torch.ops.topkx.local_topk_words(torch.ops.topkx_test.attention(x), row_ends, K)


@dataclass
class Outcome:
    """Of compiling a model and calling it with steps of changing size."""

    recording: Recording
    outputs: list[np.ndarray]
    exchanged: bool
    from_disk: bool
    group: str


def scores(call: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and row ends of a call; rank 1 holds all of row 0's best."""
    rng, rows = np.random.default_rng(call), 3 + 5 * call
    logits = rng.standard_normal((W, rows, L)).astype(np.float32).round(1)
    logits[1, 0] += 100
    return logits, np.maximum(rng.integers(0, L + 1, (W, rows)), (np.arange(rows) == 0) * L).astype(np.int32)


# On the ranks


def start(ctx: RankContext, folder: str) -> None:
    """vLLM's groups, without the plugin."""
    assert "torch._inductor.config" not in sys.modules  # it reads the environment once
    # A folder a rank: else the slower one finds what the other cached, where ranks compile the same graph.
    os.environ.update(vllm_cpu.environment(f"{folder}/{ctx.rank}"))
    vllm_cpu.set_up(ctx.rank, W)
    global library
    library = torch.library.Library("topkx_test", "DEF")
    library.define("attention(Tensor x) -> Tensor")
    library.impl("attention", torch.clone, "CompositeExplicitAutograd")
    torch.library.register_fake("topkx_test::attention", torch.empty_like, lib=library)


def load_plugin(ctx: RankContext) -> tuple[str, list[bool]]:
    """The entry point that vLLM finds; and for each of three loads whether it changed what vLLM runs."""
    from vllm import envs, plugins
    from vllm.compilation.backends import VllmBackend

    from vllm_topkx.ops import groups

    def state() -> tuple:
        factor = envs.environment_variables.get("VLLM_TOPKX_CACHE_KEY")
        return VllmBackend.configure_post_pass, factor, len(groups._resolvers), len(sys.meta_path)

    changes = []
    for _ in range(3):
        before = state()
        plugins.plugins_loaded = False
        plugins.load_general_plugins()
        changes.append(state() != before)
    found = plugins.load_plugins_by_group(plugins.DEFAULT_PLUGINS_GROUP)["topkx"]
    vllm_topkx.reserve(vllm_cpu.GROUP, rows=ROWS, topk=K, local_topk=N, device="cpu")
    vllm_topkx.reserve(vllm_cpu.GROUP, rows=ROWS, topk=K, local_topk=K, device="cpu")
    return f"{found.__module__}:{found.__name__}", changes


def compile_and_run(ctx: RankContext, mode: str, form: str, local_topk: int = N) -> Outcome:
    from vllm.distributed.parallel_state import get_dcp_group

    from vllm_topkx.ops.exchange import find_exchange

    torch._dynamo.reset()
    config = vllm_cpu.make_config(ctx.rank, W, ROWS, **MODES[mode])
    if mode != "unsplit":
        config.compilation_config.splitting_ops.append("topkx_test::attention")
    group = get_dcp_group().device_group.group_name if form == "c10d" else vllm_cpu.GROUP
    if form == "none":
        module = vllm_cpu.compiled(NoMerge, DYNAMIC, config)
    else:
        options = {"form": form, "rank": ctx.rank, "group": group, "local_topk": local_topk}
        module = vllm_cpu.compiled(Merge, DYNAMIC, config, **options)
    exchange = find_exchange(vllm_cpu.GROUP, ctx.device, local_topk, 0)
    epoch = None if exchange is None else int(exchange.epoch[0])
    outputs = []
    with recorded() as recording:
        for call in range(3):
            inputs = [torch.from_numpy(array[ctx.rank]) for array in scores(call)]
            outputs.append(module(*inputs).numpy())
    exchanged = exchange is not None and int(exchange.epoch[0]) == epoch + 3
    return Outcome(recording, outputs, exchanged, module.was_aot_compile_fn_loaded_from_disk, group)


def run_with_caches(ctx: RankContext) -> Outcome:
    """vLLM and Inductor may save compiled graphs, and use saved ones."""
    from torch._inductor import config

    with patch.dict(os.environ, VLLM_DISABLE_COMPILE_CACHE="0"), config.patch(force_disable_caches=False):
        return compile_and_run(ctx, "unsplit", "vllm", K)  # N = K: runs without an exchange, too


# In the parent


@dataclass
class Ranks:
    pool: RankPool
    without_plugin: list[list[Outcome]]  # the caches' first and second use, by rank
    entry_point: str
    changes: list[bool]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks of vLLM: the plugin is loaded after a compile without it."""
    with RankPool(W) as pool:
        pool.run(start, str(tmp_path_factory.mktemp("vllm")))
        without_plugin = [pool.run(run_with_caches) for _ in range(2)]
        loaded = pool.run(load_plugin)
        assert loaded[0] == loaded[1]
        yield Ranks(pool, without_plugin, *loaded[0])


def is_exact(outcomes: list[Outcome]) -> bool:
    """Whether all ranks have the reference's ids in every row of every call."""
    ids = [np.stack(calls) for calls in zip(*(outcome.outputs for outcome in outcomes), strict=True)]
    return all(same_sets(found, reference_topk(*scores(call), K, INTERLEAVE)).all() for call, found in enumerate(ids))


def rewritten_graph(outcomes: list[Outcome]) -> tuple[str, str]:
    """The graph of rank 0 that has the chain, before and after; checks that it became an exchange, and an exact one."""
    for outcome in outcomes:
        assert outcome.recording.rewritten == 1
        assert not outcome.recording.left_alone
        assert outcome.exchanged
    assert is_exact(outcomes)
    ((before, after),) = [graphs for graphs in outcomes[0].recording.graphs if "topk_select" in graphs[0]]
    assert "topkx.exchange_merge(" in after
    assert "all_gather" not in after
    return before, after


def rewrite(outcomes: list[Outcome], context: int) -> str:
    """What changed in :func:`rewritten_graph`, with ``context`` nodes around it, in lines that fit into this file."""
    # torch names groups by the order in which they are made.
    graphs = [graph.replace(repr(outcomes[0].group), "GROUP").splitlines() for graph in rewritten_graph(outcomes)]
    lines = list(difflib.unified_diff(*graphs, n=context, lineterm=""))[3:]
    return wrapped(lines)


def test_the_plugin_is_found_and_loads_once(ranks: Ranks) -> None:
    assert ranks.entry_point == "vllm_topkx.plugin:register"
    assert ranks.changes == [True, False, False]


def test_a_graph_cached_without_the_plugin_is_not_used_with_it(ranks: Ranks) -> None:
    first, second = ranks.without_plugin
    for outcome in (*first, *second):
        assert outcome.recording == Recording()
        assert not outcome.exchanged
    assert [outcome.from_disk for outcome in (*first, *second)] == [False, False, True, True]  # the cache works
    first, second = [ranks.pool.run(run_with_caches) for _ in range(2)]
    assert is_exact(first) and is_exact(second)
    assert all(outcome.exchanged for outcome in (*first, *second))
    assert [outcome.from_disk for outcome in (*first, *second)] == [False, False, True, True]


def test_unsplit_graph_with_vllms_all_gather(ranks: Ranks) -> None:
    outcomes = ranks.pool.run(compile_and_run, "unsplit", "vllm")
    assert len(outcomes[0].recording.graphs) == 1  # the pass runs once, however often the plugin was loaded
    assert_expected_inline(
        rewrite(outcomes, context=99),
        """\
 arg0_1: f32[s77, 40] = input
 arg1_1: s77 = input
 arg2_1: i32[s53] = input
 arg3_1: s53 = input
 attention: f32[s77, 40] = topkx_test.attention(arg0_1)
 local_topk_words: i32[s77, 20] = topkx.local_topk_words(attention, arg2_1, 10)
-all_gather: i32[s77, 40] = vllm.all_gather(local_topk_words, 1, 2, GROUP)
-view: i32[s77, 2, 20] = aten.reshape(all_gather, [-1, 2, 20])
-permute: i32[2, s77, 20] = aten.permute(view, [1, 0, 2])
-topk_select: (i32[0, 16], i32[0], i32[s77, 16], i32[s77]) = topkx.topk_select(permute, 0, 16, 10, 4, 'fp32')
-getitem: i32[0, 16] = topk_select[0]
-getitem_1: i32[0] = topk_select[1]
-getitem_2: i32[s77, 16] = topk_select[2]
-getitem_3: i32[s77] = topk_select[3]
-auto_functionalized: (i32[0, 16], i32[0], i32[s77, 16], NoneType) =
     auto_functionalized(topkx.topk_rescue.default, gathered=permute, saturation=getitem_3, rows=getitem,
     valid=getitem_1, ids=getitem_2, logits=attention, row_ends=arg2_1, group=GROUP, rank=0, topk=16,
     local_topk=10, interleave=4, block_table=None, req_id=None, block_size=1, block_stride=1, lane=0,
     order=None)
-getitem_6: i32[s77, 16] = auto_functionalized[2]
-return (getitem_6,)
+exchange_merge: (i32[0, 16], i32[0], i32[s77, 16]) = topkx.exchange_merge(local_topk_words, attention,
     arg2_1, GROUP, 2, 16, 10, 4)
+getitem_8: i32[s77, 16] = exchange_merge[2]
+return (getitem_8,)""",
    )


def test_unsplit_graph_with_functional_collectives(ranks: Ranks) -> None:
    outcomes = ranks.pool.run(compile_and_run, "unsplit", "c10d")
    assert_expected_inline(
        rewrite(outcomes, context=1),
        """\
 local_topk_words: i32[s77, 20] = topkx.local_topk_words(attention, arg2_1, 10)
-all_gather_into_tensor: i32[2*s77, 20] = _c10d_functional.all_gather_into_tensor(local_topk_words, 2, GROUP)
-wait_tensor: i32[2*s77, 20] = _c10d_functional.wait_tensor(all_gather_into_tensor)
-view: i32[2, s77, 20] = aten.reshape(wait_tensor, [2, -1, 20])
-topk_select: (i32[0, 16], i32[0], i32[s77, 16], i32[s77]) = topkx.topk_select(view, 0, 16, 10, 4, 'fp32')
-getitem: i32[0, 16] = topk_select[0]
-getitem_1: i32[0] = topk_select[1]
-getitem_2: i32[s77, 16] = topk_select[2]
-getitem_3: i32[s77] = topk_select[3]
-auto_functionalized: (i32[0, 16], i32[0], i32[s77, 16], NoneType) =
     auto_functionalized(topkx.topk_rescue.default, gathered=view, saturation=getitem_3, rows=getitem,
     valid=getitem_1, ids=getitem_2, logits=attention, row_ends=arg2_1, group=GROUP, rank=0, topk=16,
     local_topk=10, interleave=4, block_table=None, req_id=None, block_size=1, block_stride=1, lane=0,
     order=None)
-getitem_6: i32[s77, 16] = auto_functionalized[2]
-return (getitem_6,)
+exchange_merge: (i32[0, 16], i32[0], i32[s77, 16]) = topkx.exchange_merge(local_topk_words, attention,
     arg2_1, GROUP, 2, 16, 10, 4)
+getitem_8: i32[s77, 16] = exchange_merge[2]
+return (getitem_8,)""",
    )


@pytest.mark.parametrize("mode", ["piecewise", "partition"])
def test_split_graphs(ranks: Ranks, mode: str) -> None:
    outcomes = ranks.pool.run(compile_and_run, mode, "vllm")
    before, _ = rewritten_graph(outcomes)
    assert "topkx_test.attention" in before  # the passes run before either splits
    # Of what vLLM splits, the passes meet the pieces again.
    assert len(outcomes[0].recording.graphs) == (2 if mode == "piecewise" else 1)


def test_a_chain_around_a_splitting_op(ranks: Ranks) -> None:
    """No piece has all of it."""
    outcomes = ranks.pool.run(compile_and_run, "piecewise", "around")
    before, _ = rewritten_graph(outcomes)
    assert before.count("topkx_test.attention(") == 2


def test_a_model_without_the_chain_is_unchanged(ranks: Ranks) -> None:
    for rank, outcome in enumerate(ranks.pool.run(compile_and_run, "unsplit", "none")):
        ((before, after),) = outcome.recording.graphs
        assert before == after
        assert outcome.recording == Recording([(before, after)])
        for call, words in enumerate(outcome.outputs):
            inputs = [torch.from_numpy(array[rank]) for array in scores(call)]
            assert np.array_equal(words, torch.ops.topkx.local_topk_words(*inputs, K).numpy())
