"""Graphs that look like the all-gather form and are not, or not all of it: what the pass does, and what it says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
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

from vllm_topkx.fx_passes import ExchangeMergePass, aot_eager

ops = torch.ops.topkx


@pytest.fixture
def group() -> Iterator[str]:
    """A group of W ranks with exchanges for K and N, and for N = K."""
    with fake_group() as name:
        stub_exchange()
        stub_exchange(local_topk=K)
        yield name


def not_understood(node: str, op: str) -> str:
    return f"the order of the gathered words is not understood at {node} = {op}"


def select_all(gathered: torch.Tensor, group: str = "", rank: int = 0) -> torch.Tensor:
    """The ids of a chain with N = K, which needs no rescue."""
    return ops.topk_select(gathered, rank, K, K, 1, "fp32")[2]


# Swapped arguments


def rescue_with(group: str, **swapped: str | int) -> Callable:
    """The form with KV rows whose rescue gets, for the arguments in ``swapped``, another's value or a number."""

    def function(logits, row_ends, table, request, other_table, other):
        kv = {"block_table": table, "req_id": request, "block_size": 4, "block_stride": 8}
        gathered = by_rows(ops.local_topk_words(logits, row_ends, N))
        rows, valid, ids, saturation = ops.topk_select(gathered, 0, K, N, 1, "fp32", **kv)
        args = {"gathered": gathered, "saturation": saturation, "rows": rows, "valid": valid, "ids": ids}
        args |= {"logits": logits, "row_ends": row_ends, "group": group, "rank": 0, "topk": K, "local_topk": N}
        args |= {"interleave": 1, **kv}
        values = {"other": other, "other_table": other_table, **args}
        return ops.topk_rescue(**args | {name: values.get(value, value) for name, value in swapped.items()})

    return function


OTHER = "topk_rescue gets other {0} than topk_select gives"
DIFFER = "topk_rescue and topk_select differ in {0}"
SWAPPED = {
    "rows and ids": ({"rows": "ids", "ids": "rows"}, OTHER.format("rows")),
    "rows twice": ({"ids": "rows"}, OTHER.format("ids")),
    "valid and saturation": ({"valid": "saturation", "saturation": "valid"}, OTHER.format("valid")),
    "saturation of something else": (
        {"saturation": "other"},
        "local_topk < topk without topk_rescue is not exact, the exchange would be",
    ),
    "row ends and requests": (
        {"row_ends": "req_id", "req_id": "row_ends"},
        DIFFER.format("req_id"),
    ),
    "row ends": ({"row_ends": "other"}, "topk_rescue re-reads other row_ends than the words are from"),
    "block table": ({"block_table": "other_table"}, DIFFER.format("block_table")),
    "block stride": ({"block_stride": 4}, DIFFER.format("block_stride")),
    "block size": ({"block_size": 8}, DIFFER.format("block_size")),
}


@pytest.mark.parametrize("dynamo", [False, True], ids=["functional", "dynamo"])
@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_arguments(group: str, name: str, dynamo: bool) -> None:
    swapped, reason = SWAPPED[name]
    gm = trace(rescue_with(group, **swapped), *inputs(), ints(2, L), ints(T), ints(2, L), ints(T), dynamo=dynamo)
    assert reason_of(gm) == reason


def test_nothing_swapped(group: str) -> None:
    gm = trace(rescue_with(group), *inputs(), ints(2, L), ints(T), ints(2, L), ints(T))
    assert rewrite(gm)[1].rewritten == 1


def test_fewer_words_read_than_sent(group: str) -> None:
    """Rows of 3 and of 4 candidates have the same padded size."""
    words_of_four = lambda logits, ends: by_rows(ops.local_topk_words(logits, ends, N))  # noqa: E731
    gm = trace(lambda *args: ops.topk_select(words_of_four(*args), 0, 3, 3, 1, "fp32")[2], *inputs())
    assert reason_of(gm) == "topk_select and the words differ in local_topk"


# Wrong dtypes

AS_OTHER_DTYPES: dict[str, tuple[Gather, str]] = {
    "as floats": (
        lambda words: all_gather(words.view(torch.float32)).view(torch.int32).view(W, -1, R),
        not_understood("view", "aten::view"),
    ),
    "as int64": (
        lambda words: all_gather(words.long()).int().view(W, -1, R),
        not_understood("_to_copy_1", "aten::_to_copy"),
    ),
    "as bytes": (
        lambda words: all_gather(words.view(torch.uint8)).view(torch.int32).view(W, -1, R),
        not_understood("view", "aten::view"),
    ),
}


@pytest.mark.parametrize("name", AS_OTHER_DTYPES)
def test_words_gathered_as_another_dtype(group: str, name: str) -> None:
    gather, reason = AS_OTHER_DTYPES[name]
    assert reason_of(trace(ids_of(group, gather), *inputs())) == reason


@pytest.mark.parametrize("dynamo", [False, True], ids=["functional", "dynamo"])
def test_words_read_in_the_other_layout(group: str, dynamo: bool) -> None:
    """A row of one candidate takes as many words in both layouts."""
    stub_exchange(topk=1, local_topk=1)

    def function(logits, row_ends):
        gathered = all_gather(ops.local_topk_words(logits, row_ends, 1)).view(W, -1, 4)
        return ops.topk_select(gathered, 0, 1, 1, 1, "fp32")[2]

    logits, ends = inputs()
    assert rewrite(trace(function, logits, ends, dynamo=dynamo))[1].rewritten == 1
    gm = trace(function, logits.bfloat16(), ends, dynamo=dynamo)
    assert reason_of(gm) == "topk_select reads words in layout fp32, these are bf16"


# Writes in the middle of a chain, in graphs from Dynamo, which are not functional

torch.library.define("topkx_bad_graphs::clear", "(Tensor(a!) x) -> ()")
torch.library.register_fake("topkx_bad_graphs::clear", lambda x: None)


def set_item(x: torch.Tensor) -> None:
    x[0] = 1


def add_in_place(x: torch.Tensor) -> None:
    x += 1


def write_out(x: torch.Tensor) -> None:
    torch.add(x, 1, out=x)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "zero_": torch.Tensor.zero_,
    "setitem": set_item,
    "iadd": add_in_place,
    "clear": torch.ops.topkx_bad_graphs.clear,
    "out": write_out,
}


@pytest.mark.parametrize("name", WRITES)
def test_words_that_are_written_to(group: str, name: str) -> None:
    def gather(words: torch.Tensor) -> torch.Tensor:
        gathered = by_rows(words)
        WRITES[name](words)
        return gathered

    gm = trace(ids_of(group, gather), *inputs(), dynamo=True)
    assert reason_of(gm).endswith(" may change the words in place")


@pytest.mark.parametrize("name", WRITES)
def test_a_block_table_that_is_written_to_between_select_and_rescue(group: str, name: str) -> None:
    def function(logits, row_ends, table, request):
        kv = {"block_table": table, "req_id": request, "block_size": 4, "block_stride": 8}
        gathered = by_rows(ops.local_topk_words(logits, row_ends, N))
        rows, valid, ids, saturation = ops.topk_select(gathered, 0, K, N, 1, "fp32", **kv)
        WRITES[name](table)
        args = (gathered, saturation, rows, valid, ids, logits, row_ends, group, 0, K, N, 1)
        return ops.topk_rescue(*args, **kv)

    args = (*inputs(), ints(2, L), ints(T))
    assert "between topk_select and topk_rescue may change" in reason_of(trace(function, *args, dynamo=True))
    functional = rewrite(trace(function, *args))[1]  # where the rescue reads a new tensor
    assert dict(functional.left_alone) == {"topk_rescue and topk_select differ in block_table": 1}


def test_logits_that_are_written_to(group: str) -> None:
    """The exchange takes the rescue's place, so it re-reads the scores that the rescue would."""

    def function(logits, row_ends):
        scores = logits + 1

        def gather(words: torch.Tensor) -> torch.Tensor:
            scores.neg_()
            return by_rows(words)

        ids = merge(scores, row_ends, group, gather)[2]
        scores.zero_()
        return ids, scores

    assert_expected_inline(
        rewrite(trace(function, *inputs(), dynamo=True))[0],
        """\
scores = add(l_logits_, 1)
words = local_topk_words(scores, l_row_ends_, 4)
neg_ = neg_(scores)
exchange_merge = exchange_merge(words, scores, l_row_ends_, '0', 2, 8, 4, 1)
getitem_7 = exchange_merge[2]
zero_ = zero_(scores)
return [getitem_7, scores]
""",
    )


# Graph breaks, nested functions, autocast, export


@pytest.mark.parametrize("place", ["before the all-gather", "after it"])
def test_a_graph_break_in_the_middle(group: str, place: str) -> None:
    def gather(words: torch.Tensor) -> torch.Tensor:
        if place == "before the all-gather":
            torch._dynamo.graph_break()
        gathered = all_gather(words)
        if place == "after it":
            torch._dynamo.graph_break()
        return gathered.view(W, -1, 2 * K)

    torch._dynamo.reset()
    merge_pass = ExchangeMergePass()
    function = ids_of(group, gather, local_topk=K, rescue=False)
    torch.compile(function, backend=functools.partial(aot_eager, graph_pass=merge_pass))(*inputs())
    assert merge_pass.rewritten == 0
    assert dict(merge_pass.left_alone) == {not_understood("arg0_1", "placeholder"): 1}


def test_nested_functions(group: str) -> None:
    """Closures and functions of functions are one graph by the time that the pass sees it."""

    def outer(select: Callable) -> Callable:
        def inner(gather: Gather) -> Callable:
            def words_to_ids(words: torch.Tensor) -> torch.Tensor:
                return select(gather(words))

            return words_to_ids

        return inner

    words_to_ids = outer(select_all)(lambda words: all_gather(words).view(W, -1, 2 * K))
    function = torch.compile(lambda *args: words_to_ids(ops.local_topk_words(*args, K)))
    assert rewrite(trace(lambda *args: function(*args) + 0, *inputs()))[1].rewritten == 1


@torch.compiler.nested_compile_region
def region(logits: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
    return select_all(all_gather(ops.local_topk_words(logits, row_ends, K)).view(W, -1, 2 * K))


def test_a_nested_region_is_a_graph_of_its_own(group: str) -> None:
    """Compilers run the pass on it, too; a chain that crosses its border is left alone."""
    gm = trace(lambda logits, ends: region(logits, ends) + region(logits + 1, ends), *inputs())
    before = text(gm)
    after, merge_pass = rewrite(gm)
    assert after == before and merge_pass.rewritten == 0 and not merge_pass.left_alone
    (inner,) = [module for module in gm.modules() if module is not gm]
    after, merge_pass = rewrite(inner)
    assert merge_pass.rewritten == 1 and "all_gather" not in after


@pytest.mark.parametrize("dynamo", [False, True], ids=["functional", "dynamo"])
def test_autocast(group: str, dynamo: bool) -> None:
    """The scores of a matrix product under autocast are bfloat16; the chain is inside the region, or only they are."""
    stub_exchange(layout="bf16", lane=1)

    def function(x, weight, row_ends):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = x @ weight
            words = ops.local_topk_words(scores, row_ends, N)
            gathered = all_gather(words).view(W, T, R)
            rows, valid, ids, saturation = ops.topk_select(gathered, 0, K, N, 1, "bf16")
            args = (gathered, saturation, rows, valid, ids, scores, row_ends, group, 0, K, N, 1)
            inside = ops.topk_rescue(*args, lane=1)[2]
        return inside, merge(scores.float(), row_ends, group)[2]

    gm = trace(function, torch.zeros(T, 3), torch.zeros(3, L), inputs()[1], dynamo=dynamo)
    after, merge_pass = rewrite(gm)
    assert merge_pass.rewritten == 2 and "all_gather" not in after
    if dynamo:
        names = [line.split(" ")[0] for line in after.splitlines()]
        assert names.index("_enter_autocast") < names.index("exchange_merge") < names.index("_exit_autocast")


class Chain(torch.nn.Module):
    def __init__(self, group: str, gather: Gather) -> None:
        super().__init__()
        self.group, self.gather = group, gather

    def forward(self, logits: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
        return merge(logits, row_ends, self.group, self.gather)[2]


@pytest.mark.parametrize("strict", [False, True])
def test_export(group: str, strict: bool) -> None:
    """Each form of an exported program: as a module, with its ATen ops, and decomposed (its rescue functionalized)."""
    for gather, rewritten in ((by_rows, 1), (lambda words: by_rows(words).flip(0), 0)):
        program = torch.export.export(Chain(group, gather), inputs(), strict=strict)
        for gm in (program.module(), program.graph_module, program.run_decompositions().graph_module):
            after, merge_pass = rewrite(gm)
            assert (merge_pass.rewritten, sum(merge_pass.left_alone.values())) == (rewritten, 1 - rewritten)
            assert ("exchange_merge" in after) == bool(rewritten)


# Groups


def test_more_ranks_than_the_group_has(group: str) -> None:
    def function(logits, row_ends):
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(
            ops.local_topk_words(logits, row_ends, K), 4, group
        )
        return select_all(torch.ops._c10d_functional.wait_tensor(gathered).view(4, -1, 2 * K))

    assert reason_of(trace(function, *inputs())) == "group '0' has 2 ranks, but the call is for world size 4"


def test_another_group_of_as_many_ranks(group: str) -> None:
    """Without a rescue the group is the all-gather's, and that one has no exchange."""
    other = dist.new_group([0, 1])

    def gather(words: torch.Tensor) -> torch.Tensor:
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(words, W, other.group_name)
        return torch.ops._c10d_functional.wait_tensor(gathered).view(W, -1, 2 * K)

    gm = trace(ids_of(group, gather, local_topk=K, rescue=False), *inputs())
    assert reason_of(gm).startswith(f"no exchange is reserved for group {other.group_name!r}")
    stub_exchange(local_topk=K, group=other)
    after, merge_pass = rewrite(gm)
    assert (
        merge_pass.rewritten == 1 and f"exchange_merge(local_topk_words, arg0_1, arg1_1, {other.group_name!r}" in after
    )


def test_a_lane_without_an_exchange(group: str) -> None:
    """With N = K a rescue runs without an exchange, so that only the pass can notice."""
    gather = lambda words: all_gather(words).view(W, -1, 2 * K)  # noqa: E731
    gm = trace(ids_of(group, gather, local_topk=K, lane=3), *inputs())
    assert "local_topk 8, lane 3" in reason_of(gm)


# Words that are used twice


def all_words(words: torch.Tensor) -> torch.Tensor:
    return all_gather(words).view(W, -1, 2 * K)


def test_the_same_words_gathered_twice(group: str) -> None:
    def function(logits, row_ends):
        words = ops.local_topk_words(logits, row_ends, K)
        return select_all(all_words(words)), select_all(all_words(words))

    assert_expected_inline(
        rewrite(trace(function, *inputs()))[0],
        """\
order = empty.memory_format([1])
local_topk_words = local_topk_words(arg0_1, arg1_1, 8)
exchange_merge = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 8, 1, order=order)
getitem_8 = exchange_merge[2]
exchange_merge_1 = exchange_merge(local_topk_words, arg0_1, arg1_1, '0', 2, 8, 8, 1, order=order)
getitem_9 = exchange_merge_1[2]
return [getitem_8, getitem_9]
""",
    )


def test_one_all_gather_for_two_selects(group: str) -> None:
    def function(logits, row_ends):
        gathered = all_words(ops.local_topk_words(logits, row_ends, K))
        return select_all(gathered), select_all(gathered)

    gm = trace(function, *inputs())
    before = text(gm)
    after, merge_pass = rewrite(gm)
    reason = "view on the way from the words to topk_select is also used by ['{}']"
    assert after == before
    assert dict(merge_pass.left_alone) == {reason.format("topk_select_1"): 1, reason.format("topk_select"): 1}


MIXED: dict[str, tuple[Gather, str]] = {
    "pieces of two all-gathers": (
        lambda words: torch.stack([all_gather(words).chunk(W)[0], all_gather(words).chunk(W)[1]]),
        not_understood("stack", "aten::stack"),
    ),
    "an all-gather of an all-gather": (
        lambda words: all_gather(all_gather(words))[: W * T].view(W, -1, 2 * K),
        not_understood("slice_1", "aten::slice"),
    ),
    "own words in place of gathered ones": (
        lambda words: torch.stack([words, all_gather(words).chunk(W)[1]]),
        not_understood("stack", "aten::stack"),
    ),
    "words of two ops": (
        lambda words: torch.stack([all_gather(words).chunk(W)[0], all_gather(words + 0).chunk(W)[1]]),
        not_understood("add", "aten::add"),
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_words_of_more_than_one_all_gather(group: str, name: str) -> None:
    gather, reason = MIXED[name]
    gm = trace(ids_of(group, gather, local_topk=K, rescue=False), *inputs())
    assert reason_of(gm) == reason
