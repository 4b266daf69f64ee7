# ruff: noqa: E501  (graphs are shown as they are printed, one node a line)
"""The exchange pass on graphs: what it rewrites, to what, and what it leaves alone and why."""

from __future__ import annotations

import copy
import importlib.util
import logging
import operator
import pickle
from collections.abc import Callable, Iterator

import fx_helpers
import hypothesis
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from expecttest import assert_expected_inline
from fx_helpers import (
    Gather,
    K,
    L,
    N,
    R,
    T,
    W,
    all_gather,
    by_rows,
    fake_group,
    ids_of,
    inputs,
    ints,
    merge,
    reason_of,
    rewrite,
    stub_exchange,
    text,
    trace,
)
from hypothesis import strategies
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from vllm_topkx.fx_passes import ExchangeMergePass, PassSequence, compile_options, left_alone
from vllm_topkx.fx_passes.gather_layout import LayoutTracker, UnknownLayoutError
from vllm_topkx.fx_passes.nodes import topkx_call
from vllm_topkx.ops.errors import TopkxError

ops = torch.ops.topkx
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A group of W ranks with an exchange for K, N reserved."""
    monkeypatch.setattr(left_alone, "_logged", set())
    with fake_group() as name:
        stub_exchange()
        yield name


# Before and after


def test_functional_graph(group: str) -> None:
    """What AOTAutograd gives Inductor: the rescue, whose schema is mutable, is functionalized."""
    gm = trace(ids_of(group), *inputs())
    assert_expected_inline(
        text(gm),
        """\
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
all_gather_into_tensor = all_gather_into_tensor(local_topk_words, 2, '0')
wait_tensor = wait_tensor(all_gather_into_tensor)
view = view(wait_tensor, [2, -1, 8])
topk_select = topk_select(view, 0, 8, 4, 1, 'fp32')
getitem = topk_select[0]
getitem_1 = topk_select[1]
getitem_2 = topk_select[2]
getitem_3 = topk_select[3]
auto_functionalized_v2 = functionalized topk_rescue(view, getitem_3, getitem, getitem_1, getitem_2, arg0_1, arg1_1, '0', 0, 8, 4, 1)
getitem_6 = auto_functionalized_v2[2]
return [getitem_6]
""",
    )
    assert_expected_inline(
        rewrite(gm)[0],
        """\
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
exchange_merge = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1)
getitem_7 = exchange_merge[2]
return [getitem_7]
""",
    )


def test_functionalized_as_in_vllm(group: str) -> None:
    """vLLM turns the second version of auto-functionalization off."""
    with torch._inductor.config.patch(enable_auto_functionalized_v2=False):
        gm = trace(ids_of(group), *inputs())
    assert torch.ops.higher_order.auto_functionalized in {node.target for node in gm.graph.nodes}
    assert_expected_inline(
        rewrite(gm)[0],
        """\
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
exchange_merge = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1)
getitem_8 = exchange_merge[2]
return [getitem_8]
""",
    )


def test_dynamo_graph(group: str) -> None:
    gm = trace(ids_of(group, lambda words: all_gather(words, 1).view(T, W, R).permute(1, 0, 2)), *inputs(), dynamo=True)
    assert_expected_inline(
        text(gm),
        """\
words = local_topk_words(l_logits_, l_row_ends_, 4)
tensor = all_gather_into_tensor(words, 2, '0')
res = wait_tensor(tensor)
chunk = chunk(res, 2, dim=0)
getitem = chunk[0]
getitem_1 = chunk[1]
cat = cat([getitem, getitem_1], dim=1)
view = view(cat, 5, 2, 8)
gathered = permute(view, 1, 0, 2)
topk_select = topk_select(gathered, 0, 8, 4, 1, 'fp32')
rows = topk_select[0]
valid = topk_select[1]
ids = topk_select[2]
saturation = topk_select[3]
topk_rescue = topk_rescue(gathered, saturation, rows, valid, ids, l_logits_, l_row_ends_, '0', 0, 8, 4, 1)
getitem_8 = topk_rescue[2]
return [getitem_8]
""",
    )
    assert_expected_inline(
        rewrite(gm)[0],
        """\
words = local_topk_words(l_logits_, l_row_ends_, 4)
exchange_merge = exchange_merge(words, l_logits_, l_row_ends_, '0', 2, 8, 4, 1)
getitem_9 = exchange_merge[2]
return [getitem_9]
""",
    )


def test_split_and_cat(group: str) -> None:
    """How ``all_gather_tensor`` with ``gather_dim=1`` comes out."""
    gm = trace(ids_of(group, lambda words: all_gather(words, 1).view(T, W, R).permute(1, 0, 2)), *inputs())
    assert_expected_inline(
        text(gm),
        """\
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
all_gather_into_tensor = all_gather_into_tensor(local_topk_words, 2, '0')
wait_tensor = wait_tensor(all_gather_into_tensor)
split = split.Tensor(wait_tensor, 5)
getitem = split[0]
getitem_1 = split[1]
cat = cat([getitem, getitem_1], 1)
view = view(cat, [5, 2, 8])
permute = permute(view, [1, 0, 2])
topk_select = topk_select(permute, 0, 8, 4, 1, 'fp32')
getitem_2 = topk_select[0]
getitem_3 = topk_select[1]
getitem_4 = topk_select[2]
getitem_5 = topk_select[3]
auto_functionalized_v2 = functionalized topk_rescue(permute, getitem_5, getitem_2, getitem_3, getitem_4, arg0_1, arg1_1, '0', 0, 8, 4, 1)
getitem_8 = auto_functionalized_v2[2]
return [getitem_8]
""",
    )
    assert_expected_inline(
        rewrite(gm)[0],
        """\
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
exchange_merge = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1)
getitem_9 = exchange_merge[2]
return [getitem_9]
""",
    )


def test_kv_rows_without_ids(group: str) -> None:
    """Nobody uses the ids, so they are not written; both other outputs keep their users."""

    def kv_rows(logits, row_ends, table, request):
        kv = {"block_table": table, "req_id": request, "block_size": 4, "block_stride": 8}
        rows, valid, _ = merge(logits, row_ends, group, **kv)
        return rows + 1, valid, rows

    gm = trace(kv_rows, *inputs(), ints(2, L), ints(T))
    assert_expected_inline(
        rewrite(gm)[0],
        """\
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
exchange_merge = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1, block_table=arg2_1, req_id=arg3_1, block_size=4, block_stride=8, emit_ids=False)
getitem_7 = exchange_merge[0]
getitem_8 = exchange_merge[1]
add = add.Tensor(getitem_7, 1)
return [add, getitem_8, getitem_7]
""",
    )


def test_all_candidates_need_no_rescue(group: str) -> None:
    stub_exchange(local_topk=K)
    gm = trace(ids_of(group, lambda words: all_gather(words).view(W, T, -1), local_topk=K, rescue=False), *inputs())
    assert_expected_inline(
        rewrite(gm)[0],
        """\
local_topk_words = local_topk_words(arg0_1, arg1_1, 8)
exchange_merge = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 8, 1)
getitem_4 = exchange_merge[2]
return [getitem_4]
""",
    )


def test_two_chains_are_ordered(group: str) -> None:
    def two(logits, row_ends):
        return merge(logits, row_ends, group)[2], merge(logits + 1, row_ends, group)[2]

    gm = trace(two, *inputs())
    after, merge_pass = rewrite(gm)
    assert_expected_inline(
        after,
        """\
order = empty.memory_format([1])
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
exchange_merge = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1, order=order)
getitem_14 = exchange_merge[2]
add = add.Tensor(arg0_1, 1)
local_topk_words_1 = local_topk_words(add, arg1_1, 4)
exchange_merge_1 = exchange_merge(local_topk_words_1, add, arg1_1, '0', 2, 8, 4, 1, order=order)
getitem_15 = exchange_merge_1[2]
return [getitem_14, getitem_15]
""",
    )
    assert merge_pass.rewritten == 2


def test_a_chain_may_take_what_another_gives(group: str) -> None:
    def chained(logits, row_ends, table, request):
        kv = {"block_table": table, "req_id": request, "block_size": 4, "block_stride": 4}
        _, valid, _ = merge(logits, row_ends, group, **kv)
        _, valid, _ = merge(logits, valid, group, **kv)
        words = ops.local_topk_words(logits, valid, N)
        return ops.exchange_merge(words, logits, valid, group, W, K, N, 1)[2]

    gm = trace(chained, *inputs(), ints(2, L), ints(T))
    assert_expected_inline(
        rewrite(gm)[0],
        """\
order = empty.memory_format([1])
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
exchange_merge = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1, block_table=arg2_1, req_id=arg3_1, block_size=4, block_stride=4, emit_ids=False, order=order)
getitem_17 = exchange_merge[1]
local_topk_words_1 = local_topk_words(arg0_1, getitem_17, 4)
exchange_merge_1 = exchange_merge(local_topk_words_1, arg0_1, getitem_17, '0', 2, 8, 4, 1, block_table=arg2_1, req_id=arg3_1, block_size=4, block_stride=4, emit_ids=False, order=order)
getitem_18 = exchange_merge_1[1]
local_topk_words_2 = local_topk_words(arg0_1, getitem_18, 4)
exchange_merge_2 = exchange_merge(local_topk_words_2, arg0_1, getitem_18, '0', 2, 8, 4, 1, order=order)
getitem_19 = exchange_merge_2[2]
return [getitem_19]
""",
    )


def test_ops_that_a_user_calls_are_ordered(group: str) -> None:
    """An order tensor of the user's, which does not reach all of them, is replaced; its other users stay."""

    def calls(logits, row_ends):
        words, mine = ops.local_topk_words(logits, row_ends, N), torch.zeros(1)
        merges = [ops.exchange_merge(words, logits, row_ends, group, W, K, N, 1, order=order) for order in (mine, None)]
        return merges[0][2], merges[1][2], mine

    gm = trace(calls, *inputs())
    assert_expected_inline(
        text(gm),
        """\
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
zeros = zeros([1], device=cpu, pin_memory=False)
auto_functionalized_v2 = functionalized exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1, order=zeros)
getitem_2 = auto_functionalized_v2[2]
getitem_3 = auto_functionalized_v2[3]
auto_functionalized_v2_1 = functionalized exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1)
getitem_6 = auto_functionalized_v2_1[2]
return [getitem_2, getitem_6, getitem_3]
""",
    )
    assert_expected_inline(
        rewrite(gm)[0],
        """\
order = empty.memory_format([1])
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
zeros = zeros([1], device=cpu, pin_memory=False)
exchange_merge = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1, order=order)
getitem_7 = exchange_merge[2]
exchange_merge_1 = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1, order=order)
getitem_8 = exchange_merge_1[2]
return [getitem_7, getitem_8, zeros]
""",
    )
    gm = trace(calls, *inputs(), dynamo=True)
    assert_expected_inline(
        rewrite(gm)[0],
        """\
order = empty.memory_format([1])
words = local_topk_words(l_logits_, l_row_ends_, 4)
mine = zeros(1)
exchange_merge = exchange_merge(words, l_logits_, l_row_ends_, '0', 2, 8, 4, 1, order=order)
getitem_2 = exchange_merge[2]
exchange_merge_1 = exchange_merge(words, l_logits_, l_row_ends_, '0', 2, 8, 4, 1, order=order)
getitem_5 = exchange_merge_1[2]
return [getitem_2, getitem_5, mine]
""",
    )


def test_an_order_of_the_user_becomes_the_one_of_the_graph(group: str) -> None:
    def calls(logits, row_ends):
        words, order = ops.local_topk_words(logits, row_ends, N), torch.zeros(1)
        return [ops.exchange_merge(words, logits, row_ends, group, W, K, N, 1, order=order)[2] for _ in range(2)]

    assert_expected_inline(
        rewrite(trace(calls, *inputs()))[0],
        """\
order = empty.memory_format([1])
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
exchange_merge = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1, order=order)
getitem_8 = exchange_merge[2]
exchange_merge_1 = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1, order=order)
getitem_9 = exchange_merge_1[2]
return [getitem_8, getitem_9]
""",
    )
    gm = trace(calls, *inputs(), dynamo=True)  # where all name the same one, nothing is to do
    before = text(gm)
    assert rewrite(gm)[0] == before


def test_a_chain_left_alone_is_ordered_too(group: str) -> None:
    def two(logits, row_ends):
        return merge(logits, row_ends, group)[2], merge(logits, row_ends, group, lambda words: by_rows(words) + 0)[2]

    gm = trace(two, *inputs())
    after, merge_pass = rewrite(gm)
    assert_expected_inline(
        after,
        """\
order = empty.memory_format([1])
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
exchange_merge = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1, order=order)
getitem_14 = exchange_merge[2]
local_topk_words_1 = local_topk_words(arg0_1, arg1_1, 4)
all_gather_into_tensor_1 = all_gather_into_tensor(local_topk_words_1, 2, '0')
wait_tensor_1 = wait_tensor(all_gather_into_tensor_1)
view_1 = view(wait_tensor_1, [2, -1, 8])
add = add.Tensor(view_1, 0)
topk_select_1 = topk_select(add, 0, 8, 4, 1, 'fp32')
getitem_7 = topk_select_1[0]
getitem_8 = topk_select_1[1]
getitem_9 = topk_select_1[2]
getitem_10 = topk_select_1[3]
topk_rescue = topk_rescue(add, getitem_10, getitem_7, getitem_8, getitem_9, arg0_1, arg1_1, '0', 0, 8, 4, 1, order=order)
getitem_15 = topk_rescue[2]
return [getitem_14, getitem_15]
""",
    )
    assert merge_pass.rewritten == 1


def test_unused_outputs_are_not_dropped(group: str) -> None:
    def unused(logits, row_ends):
        merge(logits, row_ends, group)
        return logits + 1

    gm = trace(unused, *inputs())
    rewrite(gm)
    gm.graph.eliminate_dead_code()
    assert_expected_inline(
        text(gm),
        """\
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
exchange_merge = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1)
add = add.Tensor(arg0_1, 1)
return [add]
""",
    )


def test_values_are_those_of_the_op(group: str) -> None:
    """``meta["val"]`` of what the pass writes is what the op's fake implementation gives."""

    def two(logits, row_ends):
        return merge(logits, row_ends, group)[2], merge(logits + 1, row_ends, group)[1]

    gm = trace(two, *inputs(dynamic_rows=64))
    rewrite(gm)
    merges = [node for node in gm.graph.nodes if (call := topkx_call(node)) and call.name == "topkx::exchange_merge"]
    assert len(merges) == 2
    for node in merges:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with node.args[0].meta["val"].fake_mode:
            values = node.target(*args, **kwargs)
        for got, wanted in zip(node.meta["val"], values, strict=True):
            assert (str(got.shape), got.dtype, got.device) == (str(wanted.shape), wanted.dtype, wanted.device)
        for getitem in (user for user in node.users):
            assert getitem.meta["val"] is node.meta["val"][getitem.args[1]]


# The order of the words

REORDERED: dict[str, Gather] = {
    "view": lambda words: all_gather(words).view(W, T, R),
    "reshape and clone": lambda words: all_gather(words).reshape(W, -1, R).clone().contiguous(),
    "unflatten": lambda words: all_gather(words).unflatten(0, (W, T)),
    "flat": lambda words: all_gather(words.flatten()).view(W, T, R),
    "unsqueezed first": lambda words: all_gather(words.unsqueeze(0)),
    "unsqueezed and squeezed": lambda words: all_gather(words.unsqueeze(0)).unsqueeze(2).squeeze(2),
    "transposed twice": lambda words: all_gather(words.t().contiguous()).view(W, R, T).transpose(-1, -2),
    "dim 1, movedim": lambda words: all_gather(words, 1).reshape(T, W, R).movedim(1, 0),
    "dim 1, unflatten, swapaxes": lambda words: all_gather(words, 1).unflatten(1, (W, R)).swapaxes(0, 1),
    "chunk and stack": lambda words: torch.stack(all_gather(words).chunk(W)),
    "split and stack, dim 1": lambda words: torch.stack(all_gather(words).split(T), 1).permute(1, 0, 2),
    "split sizes and cat": lambda words: torch.cat(all_gather(words).split([T] * W), 0).view(W, T, R),
    "pieces viewed": lambda words: torch.cat([piece.view(1, T, R) for piece in all_gather(words).chunk(W)]),
}


@pytest.mark.parametrize("dynamo", [False, True], ids=["functional", "dynamo"])
@pytest.mark.parametrize("name", REORDERED)
def test_reordered(group: str, name: str, dynamo: bool) -> None:
    after, merge_pass = rewrite(trace(ids_of(group, REORDERED[name]), *inputs(), dynamo=dynamo))
    assert merge_pass.rewritten == 1, merge_pass.left_alone
    assert "all_gather" not in after


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("dynamo", [False, True], ids=["functional", "dynamo"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_vllm_all_gather(group: str, dim: int, dynamo: bool) -> None:
    import vllm.distributed.parallel_state  # noqa: F401  (registers the op)

    def gather(words: torch.Tensor) -> torch.Tensor:
        gathered = torch.ops.vllm.all_gather(words, dim, world_size=W, group_name=group)
        return gathered.view(W, T, R) if dim == 0 else gathered.view(T, W, R).permute(1, 0, 2)

    after, merge_pass = rewrite(trace(ids_of(group, gather), *inputs(), dynamo=dynamo))
    assert merge_pass.rewritten == 1, merge_pass.left_alone
    assert "all_gather" not in after


@pytest.mark.parametrize("dynamo", [False, True], ids=["functional", "dynamo"])
def test_one_row(group: str, dynamo: bool) -> None:
    """With one row, rank and word may change places with it: an axis of size 1 has no order."""
    logits, ends = (tensor[:1] for tensor in inputs())
    gather = lambda words: all_gather(words).view(1, W, R).transpose(0, 1)  # noqa: E731
    assert rewrite(trace(ids_of(group, gather), logits, ends, dynamo=dynamo))[1].rewritten == 1


SIZES = (2, 2, 4)  # ranks, rows, words: shapes cannot tell the axes apart


@hypothesis.settings(deadline=None, max_examples=300, derandomize=True)
@hypothesis.given(strategies.data())
def test_only_the_right_order_is_accepted(data: strategies.DataObject) -> None:
    """Nodes whose values are real: what is taken for ``[W, T, R]`` holds each rank's words there."""
    ranks, rows, words = SIZES
    numbered = torch.arange(ranks * rows * words, dtype=torch.int32).view(ranks, rows, words)
    dim = data.draw(strategies.sampled_from((0, 1)))
    graph = fx.Graph()
    node = graph.call_function(ops.local_topk_words.default, (None, None, 2))
    node.meta["val"] = numbered[0]
    gathered = torch.cat(list(numbered), dim)
    node = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (node, ranks, "g"))
    node.meta["val"] = torch.cat(list(numbered), 0)
    tracker = LayoutTracker()
    if dim == 1:
        pieces = graph.call_function(torch.chunk, (node, ranks))
        pieces.meta["val"] = node.meta["val"].chunk(ranks)
        parts = [graph.call_function(operator.getitem, (pieces, rank)) for rank in range(ranks)]
        for rank, part in enumerate(parts):
            part.meta["val"] = pieces.meta["val"][rank]
        node = graph.call_function(torch.cat, (parts, 1))
        node.meta["val"] = gathered
    shapes = [(2, 2, 4), (2, 4, 2), (4, 2, 2), (4, 4), (2, 8), (8, 2), (16,), (2, 2, 2, 2), (2, 1, 8)]
    for _ in range(data.draw(strategies.integers(0, 4))):
        value = node.meta["val"]
        if data.draw(strategies.booleans()):
            name, args = "reshape", data.draw(strategies.sampled_from(shapes))
        else:
            name, args = "permute", data.draw(strategies.permutations(range(value.dim())))
        node = graph.call_method(name, (node, *args))
        node.meta["val"] = getattr(value, name)(*args)
    try:
        accepted = tracker(node).is_select_order()
    except UnknownLayoutError:
        accepted = False
    hypothesis.event(f"accepted: {accepted}")
    assert not accepted or torch.equal(node.meta["val"], numbered)


# Left alone


OTHER_ORDERS: dict[str, tuple[Gather, str]] = {
    "words before ranks": (
        lambda words: all_gather(words, 1).view(T, R, W).permute(2, 0, 1),
        "the order of the gathered words is not understood at view = aten::view",
    ),
    "pieces swapped": (
        lambda words: torch.stack(all_gather(words).chunk(W)[::-1]),
        "the order of the gathered words is not understood at stack = aten::stack",
    ),
    "one rank twice": (
        lambda words: torch.stack([all_gather(words).chunk(W)[0]] * W),
        "the order of the gathered words is not understood at stack = aten::stack",
    ),
    "flipped": (
        lambda words: by_rows(words).flip(0),
        "the order of the gathered words is not understood at flip = aten::flip",
    ),
    "not gathered": (
        lambda words: torch.stack([words] * W),
        "the order of the gathered words is not understood at stack = aten::stack",
    ),
    "gathered along words": (
        lambda words: all_gather(words, 1).view(T, W, R).expand(T, W, R).permute(1, 0, 2),
        "the order of the gathered words is not understood at expand = aten::expand",
    ),
    "made of something else": (
        lambda words: by_rows(words * 1),
        "the order of the gathered words is not understood at mul = aten::mul",
    ),
}


@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_other_orders(group: str, name: str) -> None:
    gather, reason = OTHER_ORDERS[name]
    assert reason_of(trace(ids_of(group, gather), *inputs())) == reason


def test_ranks_and_rows_that_are_as_many(group: str) -> None:
    """Sizes alone do not tell that rows and ranks changed places."""
    logits, ends = (tensor[:W] for tensor in inputs())
    gm = trace(ids_of(group, lambda words: by_rows(words).transpose(0, 1)), logits, ends)
    assert reason_of(gm) == ("topk_select gets the words as (('row',), ('rank',), ('word',)), not rank, row, word")


def with_part_used(group: str, part: str) -> Callable:
    """The NCCL form, of which a part is returned too."""

    def function(logits, row_ends):
        words = ops.local_topk_words(logits, row_ends, N)
        gathered = by_rows(words)
        rows, valid, ids, saturation = ops.topk_select(gathered, 0, K, N, 1, "fp32")
        spec = (group, 0, K, N, 1)
        out = ops.topk_rescue(gathered, saturation, rows, valid, ids, logits, row_ends, *spec)
        return out[2], {"words": words, "gathered": gathered, "ids": ids, "saturation": saturation}[part] + 0

    return function


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("gathered", "view on the way from the words to topk_select is also used by ['add']"),
        ("ids", "getitem_2, which topk_select gives, is also used by ['add']"),
        ("saturation", "getitem_3, which topk_select gives, is also used by ['add']"),
    ],
)
def test_another_user(group: str, part: str, reason: str) -> None:
    assert reason_of(trace(with_part_used(group, part), *inputs())) == reason


def test_words_may_have_another_user(group: str) -> None:
    gm = trace(with_part_used(group, "words"), *inputs())
    assert_expected_inline(
        rewrite(gm)[0],
        """\
local_topk_words = local_topk_words(arg0_1, arg1_1, 4)
exchange_merge = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 4, 1)
getitem_7 = exchange_merge[2]
add = add.Tensor(local_topk_words, 0)
return [getitem_7, add]
""",
    )


def test_words_that_are_changed(group: str) -> None:
    """In a Dynamo graph a tensor can be written to, by itself or by a view; the exchange would send other words."""

    def changing(change: Callable[[torch.Tensor], object]) -> Callable:
        def function(logits, row_ends):
            words = ops.local_topk_words(logits, row_ends, N)
            gathered = by_rows(words)
            change(words)
            rows, valid, ids, saturation = ops.topk_select(gathered, 0, K, N, 1, "fp32")
            spec = (group, 0, K, N, 1)
            return ops.topk_rescue(gathered, saturation, rows, valid, ids, logits, row_ends, *spec)[2]

        return function

    directly, by_view = changing(lambda words: words.zero_()), changing(lambda words: words[0].zero_())
    assert reason_of(trace(directly, *inputs(), dynamo=True)) == "zero_ may change the words in place"
    assert reason_of(trace(by_view, *inputs(), dynamo=True)) == "getitem may change the words in place"
    assert rewrite(trace(directly, *inputs()))[1].rewritten == 1  # a functional graph changes a copy


def other_rescue(group: str, **changed) -> Callable:
    """The NCCL form with a rescue that is not the select's; extra inputs take the place of an argument."""

    def function(logits, row_ends, *other):
        words = ops.local_topk_words(logits, row_ends, N)
        gathered = by_rows(words)
        rows, valid, ids, saturation = ops.topk_select(gathered, 0, K, N, 1, "fp32")
        args = {"gathered": gathered, "saturation": saturation, "rows": rows, "valid": valid, "ids": ids}
        args |= {"logits": logits, "row_ends": row_ends, "group": group, "rank": 0, "topk": K, "local_topk": N}
        args |= {"interleave": 1} | {name: other[0] if value is None else value for name, value in changed.items()}
        return ops.topk_rescue(**args)[2]

    return function


@pytest.mark.parametrize(
    ("name", "other", "reason"),
    [
        ("logits", torch.zeros(T, L), "topk_rescue re-reads other logits than the words are from"),
        ("row_ends", ints(T), "topk_rescue re-reads other row_ends than the words are from"),
        ("gathered", ints(W, T, R), "topk_rescue and topk_select differ in gathered"),
        ("ids", ints(T, K), "topk_rescue gets other ids than topk_select gives"),
    ],
)
def test_rescue_of_other_tensors(group: str, name: str, other: torch.Tensor, reason: str) -> None:
    assert reason_of(trace(other_rescue(group, **{name: None}), *inputs(), other)) == reason


def test_rescue_with_another_interleave(group: str) -> None:
    reason = reason_of(trace(other_rescue(group, interleave=2), *inputs()))
    assert reason == "topk_rescue and topk_select differ in interleave"


def test_two_rescues(group: str) -> None:
    def function(logits, row_ends):
        gathered = by_rows(ops.local_topk_words(logits, row_ends, N))
        rows, valid, ids, saturation = ops.topk_select(gathered, 0, K, N, 1, "fp32")
        args = (gathered, saturation, rows, valid, ids, logits, row_ends, group, 0, K, N, 1)
        return ops.topk_rescue(*args)[2], ops.topk_rescue(*args)[2]

    merge_pass = rewrite(trace(function, *inputs()))[1]
    assert dict(merge_pass.left_alone) == {"one topk_select has several topk_rescue": 1}


def test_fewer_candidates_without_rescue(group: str) -> None:
    reason = reason_of(trace(ids_of(group, rescue=False), *inputs()))
    assert reason == "local_topk < topk without topk_rescue is not exact, the exchange would be"


def test_another_group_than_the_all_gather(group: str) -> None:
    other = dist.new_group([0, 1])
    gm = trace(ids_of(group, lambda words: funcol.all_gather_tensor(words, 0, other).view(W, -1, R)), *inputs())
    assert reason_of(gm) == f"the all-gather is over group {other.group_name!r}, topk_rescue over {group!r}"


def test_another_rank(group: str) -> None:
    stub_exchange(local_topk=K)
    gather = lambda words: all_gather(words).view(W, T, -1)  # noqa: E731
    reason = reason_of(trace(ids_of(group, gather, local_topk=K, rescue=False, rank=1), *inputs()))
    assert reason == "topk_select is for rank 1, this process is rank 0"


def test_a_group_too_large_for_an_exchange() -> None:
    with fake_group(world_size=17) as name:
        gather = lambda words: all_gather(words).view(17, T, -1)  # noqa: E731
        reason = reason_of(trace(ids_of(name, gather, local_topk=K, rescue=False), *inputs()))
    assert reason.startswith("world size 17: an exchange joins 2 to 16 ranks")


def all_candidates(group: str) -> fx.GraphModule:
    """A chain that traces without an exchange."""
    gather = lambda words: all_gather(words).view(W, -1, 2 * K)  # noqa: E731
    return trace(ids_of(group, gather, local_topk=K, rescue=False), *inputs())


def test_no_exchange(group: str) -> None:
    assert reason_of(all_candidates(group)).startswith(
        "no exchange is reserved for group '0' on cpu with local_topk 8, lane 0: call vllm_topkx.reserve("
    )


def test_exchange_of_other_settings(group: str) -> None:
    stub_exchange(topk=2 * K, local_topk=K)
    assert "was reserved for topk 16 in layout fp32" in reason_of(all_candidates(group))
    stub_exchange(local_topk=K, layout="bf16")
    assert "was reserved for topk 8 in layout bf16" in reason_of(all_candidates(group))


def test_unusable_exchange(group: str) -> None:
    stub_exchange(local_topk=K).failure = TopkxError("it was closed")
    assert reason_of(all_candidates(group)) == "it was closed"


def test_unknown_group(group: str) -> None:
    stub_exchange(local_topk=K)
    gm = all_candidates(group)
    gather = next(node for node in gm.graph.nodes if "all_gather" in node.name)
    gather.args = (*gather.args[:2], "gone")
    assert reason_of(gm).startswith("group 'gone' is unknown or was destroyed")


def test_more_rows_than_reserved(group: str) -> None:
    stub_exchange(rows=T - 1, local_topk=K)
    assert reason_of(all_candidates(group)).startswith("5 rows: the exchange of group '0' has 4 reserved")


def test_switched_off(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TOPKX", "0")
    assert reason_of(trace(ids_of(group), *inputs())) == "VLLM_TOPKX=0"


def test_a_reason_is_logged_once(group: str, caplog: pytest.LogCaptureFixture) -> None:
    gm = trace(ids_of(group, lambda words: by_rows(words).flip(0)), *inputs())
    merge_pass = ExchangeMergePass()
    with caplog.at_level(logging.INFO, logger="vllm_topkx"):
        for _ in range(2):
            merge_pass(gm.graph)
    reason = "the order of the gathered words is not understood at flip = aten::flip"
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("vllm_topkx")]
    assert messages == [f"topk_select keeps its all-gather: {reason}"]
    assert merge_pass.left_alone == {reason: 2}


# Symbolic rows


@pytest.mark.parametrize("dynamo", [False, True], ids=["functional", "dynamo"])
def test_symbolic_rows(group: str, dynamo: bool) -> None:
    gm = trace(ids_of(group), *inputs(dynamic_rows=64), dynamo=dynamo)
    after, merge_pass = rewrite(gm)
    assert merge_pass.rewritten == 1, merge_pass.left_alone
    assert "all_gather" not in after


def test_symbolic_rows_in_split_and_cat(group: str) -> None:
    def gather(words: torch.Tensor) -> torch.Tensor:
        pieces = all_gather(words).split(words.shape[0])
        return torch.cat([pieces[0], pieces[1]], 1).view(-1, W, R).movedim(1, 0)

    gm = trace(ids_of(group, gather), *inputs(dynamic_rows=64))
    assert rewrite(gm)[1].rewritten == 1


def test_symbolic_rows_over_the_limit(group: str) -> None:
    """A bound of tracing and one of the caller: either may do."""
    function = ids_of(group)
    assert reason_of(trace(function, *inputs(dynamic_rows=65))).startswith("up to 65 rows, but the exchange has 64")
    assert reason_of(trace(function, *inputs(dynamic_rows=65)), max_rows=100).startswith("up to 65 rows")
    assert rewrite(trace(function, *inputs(dynamic_rows=65)), max_rows=64)[1].rewritten == 1
    assert rewrite(trace(function, *inputs(dynamic_rows=64)), max_rows=100)[1].rewritten == 1


def test_symbolic_rows_without_a_limit(group: str) -> None:
    logits, ends = inputs()
    for tensor in (logits, ends):
        torch._dynamo.mark_dynamic(tensor, 0)
    reason = reason_of(trace(ids_of(group), logits, ends))
    assert reason.startswith("up to any number of rows, but the exchange has 64 reserved: reserve more, or bound")


# As a pass of Inductor


def test_uuid(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the same decisions, another after a reservation or with another setting."""
    uuid = ExchangeMergePass().uuid()
    assert ExchangeMergePass().uuid() == uuid
    uuids = {uuid, ExchangeMergePass(max_rows=8).uuid()}
    stub_exchange(lane=1)
    uuids.add(ExchangeMergePass().uuid())
    monkeypatch.setenv("VLLM_TOPKX_MAX_ROWS", "8")
    uuids.add(ExchangeMergePass().uuid())
    assert len(uuids) == 4


def test_copies(group: str) -> None:
    """vLLM copies its configuration, Inductor pickles its own."""
    merge_pass = ExchangeMergePass(max_rows=8)
    for other in (copy.deepcopy(merge_pass), pickle.loads(pickle.dumps(merge_pass))):
        assert other.uuid() == merge_pass.uuid()


class Own(CustomGraphPass):
    """A user's pass, which must see the graph before the exchange pass."""

    def __call__(self, graph: fx.Graph) -> None:
        assert graph.find_nodes(op="call_function", target=ops.topk_select.default)

    def uuid(self) -> str:
        return "own"


def test_compile_options(group: str) -> None:
    (name, merge_pass), *more = compile_options().items()
    assert (name, type(merge_pass), more) == ("post_grad_custom_post_pass", ExchangeMergePass, [])
    with_own = compile_options(Own())[name]
    with torch._inductor.config.patch({name: Own()}):
        with_configured = compile_options()[name]
    for sequence in (with_own, with_configured):
        assert isinstance(sequence, PassSequence)
        assert sequence.uuid() == ("own", ExchangeMergePass().uuid())
        gm = trace(ids_of(group), *inputs())
        sequence(gm.graph)
        assert "topk_select" not in text(gm)
    assert compile_options(lambda graph: None)[name].uuid() is None  # not cached


def test_helpers_agree_with_the_layout() -> None:
    from vllm_topkx.ops.layouts import packed_row_words

    assert fx_helpers.R == packed_row_words(N, "fp32")
