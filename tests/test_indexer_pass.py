"""IndexerPass on graphs of Dynamo and AOTAutograd, with an op that stands for vLLM's; and how ours is defined."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from expecttest import assert_expected_inline
from fx_helpers import trace
from torch import fx
from wrapping import wrapped

from vllm_topkx import TopkxError
from vllm_topkx.cli.graph_text import graph_text
from vllm_topkx.fx_passes import IndexerPass, cache_key, compile_options, left_alone
from vllm_topkx.plugin import compilation, indexer, merge

NAME, T, K = "sparse_attn_indexer", 3, 8


def sparse_attn_indexer(
    scores: torch.Tensor,
    topk_indices_buffer: torch.Tensor,
    layer: str,
    dcp_rank: int = 0,
    dcp_world_size: int = 1,
    candidate_blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As vLLM's function: writes to its buffer, and returns it."""
    topk_indices_buffer[: len(scores)] = scores.argsort(descending=True)[:, :K]
    return topk_indices_buffer


def define(library: torch.library.Library, function: Callable[..., torch.Tensor], *written: str) -> None:
    """Registers ``function`` as vLLM registers its ops."""
    library.define(NAME + torch.library.infer_schema(function, mutates_args=written))
    library.impl(NAME, function, "CompositeExplicitAutograd")
    library._register_fake(NAME, lambda scores, topk_indices_buffer, *rest, **more: topk_indices_buffer)


def module_of(function: Callable[..., torch.Tensor], replaced: bool = True) -> ModuleType:
    """As vLLM's module, whose merge the plugin replaced, or not."""
    module = ModuleType("vllm.topkx_indexer_host")
    setattr(module, NAME, function)
    module._merge_dcp_topk_global = functools.partial(print)
    if replaced:
        module._merge_dcp_topk_global.topkx_original = print
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """vLLM's op is installed, ours is not defined yet."""
    monkeypatch.setattr(left_alone, "_logged", set())
    monkeypatch.setattr(compilation, "_said", set())
    monkeypatch.setattr(indexer, "_library", None)
    with torch.library._scoped_library("vllm", "FRAGMENT") as library:
        define(library, sparse_attn_indexer, "topk_indices_buffer", "candidate_blocks")
        yield module_of(sparse_attn_indexer)
    if indexer._library is not None:
        indexer._library._destroy()


@pytest.fixture
def defined(installed: ModuleType) -> ModuleType:
    indexer.define_op(installed)
    return installed


# The op


def test_the_op_is_as_the_installed_one(defined: ModuleType) -> None:
    ours, theirs = torch.ops.topkx.sparse_attn_indexer.default, torch.ops.vllm.sparse_attn_indexer.default
    assert str(ours._schema).removeprefix("topkx") == str(theirs._schema).removeprefix("vllm")
    assert ours.tags == theirs.tags
    assert_expected_inline(
        str(ours._schema),
        """topkx::sparse_attn_indexer(Tensor scores, Tensor(a1!) topk_indices_buffer, str layer, SymInt dcp_rank=0, SymInt dcp_world_size=1, Tensor(a5!)? candidate_blocks=None) -> Tensor""",  # noqa: E501
    )
    scores, buffer = torch.randn(T, 20), torch.zeros(T, K, dtype=torch.int64)
    for more in ((), (0, 2), (0, 2, None)):
        assert ours(scores, buffer, "a", *more) is buffer
        assert torch.equal(buffer, scores.argsort(descending=True)[:, :K])
        buffer.zero_()
    defined.sparse_attn_indexer = lambda *args, **kwargs: scores  # what the module calls now
    assert ours(scores, buffer, "a") is scores
    indexer.define_op(defined)  # again


def other_default(
    scores: torch.Tensor,
    topk_indices_buffer: torch.Tensor,
    layer: str,
    dcp_rank: int = 0,
    dcp_world_size: int = 2,
    candidate_blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    return topk_indices_buffer


def test_another_function_than_the_installed_ops(installed: ModuleType) -> None:
    with pytest.raises(TopkxError, match=r"the schema of vllm\.sparse_attn_indexer\.default is not that of"):
        indexer.define_op(module_of(other_default))
    assert not hasattr(torch.ops.topkx, NAME)


def test_no_op_where_the_merge_is_still_vllms(installed: ModuleType) -> None:
    indexer.define_op(module_of(sparse_attn_indexer, replaced=False))
    assert not hasattr(torch.ops.topkx, NAME)


def test_no_op_without_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_said", set())
    monkeypatch.setattr(indexer, "_library", None)
    with pytest.raises(TopkxError, match="there is no sparse_attn_indexer to define"):
        indexer.define_op(module_of(sparse_attn_indexer))


# Before and after


def two_layers(scores: torch.Tensor, buffer: torch.Tensor, world_size: int = 2) -> torch.Tensor:
    op = torch.ops.vllm.sparse_attn_indexer
    op(scores, buffer, "a", 1, world_size)
    first = buffer[: scores.shape[0]] * 2
    second = op(-scores, buffer.clone(), "b", dcp_world_size=world_size, candidate_blocks=None)
    return first + second[: scores.shape[0]]


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(T, 20, generator=torch.Generator().manual_seed(0)), torch.zeros(T + 2, K, dtype=torch.int64)


def graph_of(world_size: int = 2, dynamo: bool = False) -> fx.Graph:
    return trace(functools.partial(two_layers, world_size=world_size), *arguments(), dynamo=dynamo).graph


def rewrite(graph: fx.Graph) -> IndexerPass:
    """Runs the pass, twice: only targets change."""
    before = graph_text(graph)
    indexer_pass = IndexerPass()
    for _ in range(2):
        indexer_pass(graph)
        graph.lint()
        after = graph_text(graph)
        assert after.replace("topkx.", "vllm.") == before.replace("= sparse_attn_", "= vllm.sparse_attn_")
    return indexer_pass


def test_dynamo_graph(defined: ModuleType) -> None:
    graph = graph_of(dynamo=True)
    assert rewrite(graph).rewritten == 2
    assert_expected_inline(
        graph_text(graph),
        """\
l_args_0_: f32[3, 20] = input
l_args_1_: i64[5, 8] = input
sparse_attn_indexer: i64[5, 8] = topkx.sparse_attn_indexer(l_args_0_, l_args_1_, 'a', 1, 2)
getitem: i64[3, 8] = l_args_1_[slice(None, 3, None)]
first: i64[3, 8] = mul(getitem, 2)
neg: f32[3, 20] = neg(l_args_0_)
clone: i64[5, 8] = .clone(l_args_1_)
second: i64[5, 8] = topkx.sparse_attn_indexer(neg, clone, 'b', dcp_world_size=2, candidate_blocks=None)
getitem_1: i64[3, 8] = second[slice(None, 3, None)]
add: i64[3, 8] = add(first, getitem_1)
return (add,)""",
    )


@pytest.mark.parametrize("v2", [True, False], ids=["v2", "v1"])
def test_functional_graph(defined: ModuleType, v2: bool) -> None:
    """V1 is what vLLM configures."""
    with torch._inductor.config.patch(enable_auto_functionalized_v2=v2):
        graph = graph_of()
    keys = [set(node.meta) for node in graph.nodes]
    assert rewrite(graph).rewritten == 2
    assert [set(node.meta) for node in graph.nodes] == keys
    assert graph_text(graph).count("(topkx.sparse_attn_indexer.default, scores=") == 2
    if not v2:
        assert_expected_inline(
            wrapped(graph_text(graph).splitlines()),
            """\
arg0_1: f32[3, 20] = input
arg1_1: i64[5, 8] = input
auto_functionalized: (i64[5, 8], i64[5, 8], NoneType) = auto_functionalized(topkx.sparse_attn_indexer.default,
     scores=arg0_1, topk_indices_buffer=arg1_1, layer='a', dcp_rank=1, dcp_world_size=2,
     candidate_blocks=None)
getitem_1: i64[5, 8] = auto_functionalized[1]
slice_2: i64[3, 8] = aten.slice.Tensor(getitem_1, 0, 0, 3)
mul: i64[3, 8] = aten.mul.Tensor(slice_2, 2)
neg: f32[3, 20] = aten.neg(arg0_1)
clone: i64[5, 8] = aten.clone(getitem_1)
auto_functionalized_1: (i64[5, 8], i64[5, 8], NoneType) =
     auto_functionalized(topkx.sparse_attn_indexer.default, scores=neg, topk_indices_buffer=clone, layer='b',
     dcp_rank=0, dcp_world_size=2, candidate_blocks=None)
getitem_4: i64[5, 8] = auto_functionalized_1[1]
slice_3: i64[3, 8] = aten.slice.Tensor(getitem_4, 0, 0, 3)
add: i64[3, 8] = aten.add.Tensor(mul, slice_3)
return (getitem_1, add)""",
        )


def test_symbolic_rows(defined: ModuleType) -> None:
    scores, buffer = arguments()
    torch._dynamo.mark_dynamic(scores, 0)
    assert rewrite(trace(two_layers, scores, buffer).graph).rewritten == 2


# What is left alone


def untouched(graph: fx.Graph) -> IndexerPass:
    before, indexer_pass = graph_text(graph), IndexerPass()
    indexer_pass(graph)
    assert graph_text(graph) == before
    assert indexer_pass.rewritten == 0
    return indexer_pass


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    records = [record for record in caplog.records if record.name.startswith("vllm_topkx")]
    return [(record.levelname, record.getMessage()) for record in records]


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "functional"])
def test_one_rank(defined: ModuleType, dynamo: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="vllm_topkx"):
        assert not untouched(graph_of(world_size=1, dynamo=dynamo)).left_alone
    assert not said(caplog)


def test_more_ranks_than_an_exchange_takes(defined: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    graph = graph_of(world_size=17, dynamo=True)
    for _ in range(2):
        ((reason, count),) = untouched(graph).left_alone.items()
        assert (reason, count) == ("it merges over 17 ranks, an exchange joins 2 to 16", 2)
    assert said(caplog) == [
        ("WARNING", f"{name} stays vllm::sparse_attn_indexer: {reason}") for name in (NAME, "second")
    ]


def test_a_world_size_that_is_not_constant(defined: ModuleType) -> None:
    graph = graph_of(dynamo=True)
    scores, node = next(iter(graph.nodes)), next(node for node in graph.nodes if node.name == NAME)
    node.args = (*node.args[:4], scores)
    indexer_pass = IndexerPass()
    indexer_pass(graph)
    assert (indexer_pass.rewritten, indexer_pass.left_alone) == (1, {"its dcp_world_size is not a constant": 1})


@pytest.mark.parametrize("why", ["VLLM_TOPKX=0", "topkx::sparse_attn_indexer is not defined"])
def test_off(
    installed: ModuleType, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "VLLM_TOPKX=0":
        indexer.define_op(installed)
        monkeypatch.setenv("VLLM_TOPKX", "0")
    with caplog.at_level(logging.DEBUG, logger="vllm_topkx"):
        assert not untouched(graph_of(dynamo=True)).left_alone
    assert said(caplog) == [("DEBUG", f"indexers stay vllm::sparse_attn_indexer: {why}")]


def contents(node: fx.Node) -> tuple:
    return node.op, node.target, node.type, len(node.users), id(node.meta.get("example_value"))


def test_a_pass_that_fails_in_vllm(defined: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    """The graph is what it was, but for names; and there is one warning."""

    def fail(graph: fx.Graph) -> None:
        IndexerPass()(graph)
        first, second, *_ = (node for node in graph.nodes if node.op == "call_function")
        first.args = (second,)
        raise KeyError("no such luck")

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            graph = graph_of(dynamo=True)
            before = list(map(contents, graph.nodes))
            compilation._run_or_leave(fail, graph)
            graph.lint()
            assert list(map(contents, graph.nodes)) == before
    (record,) = [record for record in caplog.records if record.name == "vllm.topkx"]
    assert "vllm-topkx leaves a graph as vLLM made it, after an error: KeyError: 'no such luck'" in record.getMessage()


# As a pass of Inductor


def test_under_inductor(defined: ModuleType) -> None:
    """A user's own code: what eager gives, and the code that vLLM's op gives."""
    codes = []
    for options in (compile_options(IndexerPass()), None):
        torch._dynamo.reset()
        function = torch.compile(two_layers, fullgraph=True, options=options)
        (scores, buffer), (_, expected_buffer) = arguments(), arguments()
        with (
            torch._inductor.config.patch({"force_disable_caches": True, "cpp.vec_isa_ok": False}),
            # The op returns what it mutates, as vLLM's does: torch warns, but raises where $CI is set.
            torch._functorch.config.patch(error_on_custom_op_aliasing=False),
        ):
            found, (code,) = torch._inductor.utils.run_and_get_code(function, scores, buffer)
        assert torch.equal(found, two_layers(scores, expected_buffer))
        assert torch.equal(buffer, expected_buffer)
        codes.append(code.partition("# AOT ID: ")[2].partition("\n")[2])
    assert codes[0].count("torch.ops.topkx.sparse_attn_indexer.default(") == 2
    assert codes[0].replace("topkx", "vllm").splitlines() == codes[1].splitlines()


def test_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one with other settings, another version, or a change in any source that makes the graph."""
    uuids = [IndexerPass().uuid()]
    assert IndexerPass().uuid() == uuids[0]
    for variable in ("VLLM_TOPKX_MAX_ROWS", "VLLM_TOPKX_LOCAL_TOPK"):
        monkeypatch.setenv(variable, "48")
        uuids.append(IndexerPass().uuid())
    monkeypatch.setattr(cache_key, "__version__", "0.0.0")
    uuids.append(IndexerPass().uuid())
    read_bytes = Path.read_bytes
    for source in (compilation, indexer, merge, left_alone, cache_key):
        changed = Path(source.__file__).resolve()
        monkeypatch.setattr(
            Path, "read_bytes", lambda path, changed=changed: read_bytes(path) + b"#" * (path.resolve() == changed)
        )
        cache_key._source_hash.cache_clear()
        uuids.append(IndexerPass().uuid())
    cache_key._source_hash.cache_clear()
    assert len(set(uuids)) == len(uuids)
