"""Graphs to rewrite, and their text: what the pass tests are written with."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from vllm_topkx.fx_passes import ExchangeMergePass, aot_eager
from vllm_topkx.fx_passes.nodes import topkx_call
from vllm_topkx.ops import exchange as exchanges

W, K, N, T, L = 2, 8, 4, 5, 40
R = 2 * N  # words of a row, layout fp32
Gather = Callable[[torch.Tensor], torch.Tensor]


class StubExchange(exchanges.TopkExchange):
    """An exchange that passes find and nothing can run on."""

    def close(self) -> None:
        pass


@contextlib.contextmanager
def fake_group(world_size: int = W) -> Iterator[str]:
    """The name of a group of ``world_size`` ranks, of which this process is rank 0 and the only one."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield dist.group.WORLD.group_name
    finally:
        exchanges._exchanges.clear()
        dist.destroy_process_group()


def stub_exchange(
    rows: int = 64, topk: int = K, local_topk: int = N, layout: str = "fp32", lane: int = 0, group: Any = None
) -> StubExchange:
    """Enters an exchange into the registry, as ``reserve()`` would."""
    group, device = group or dist.group.WORLD, torch.device("cpu")
    stub = StubExchange(group, device, lane, exchanges.ExchangeSettings(rows, topk, local_topk, layout), 1.0)
    exchanges._exchanges[exchanges._Name(group.group_name, device, local_topk, lane)] = stub
    return stub


def inputs(dynamic_rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[T, L]`` and row ends; with ``dynamic_rows`` the row count is symbolic, up to that many."""
    logits, ends = torch.zeros(T, L), torch.full((T,), L, dtype=torch.int32)
    if dynamic_rows is not None:
        for tensor in (logits, ends):
            torch._dynamo.mark_dynamic(tensor, 0, min=2, max=dynamic_rows)
    return logits, ends


class _Traced(Exception):
    """Ends a trace before anything runs."""


def trace(function: Callable[..., Any], *args: Any, dynamo: bool = False) -> fx.GraphModule:
    """The graph of ``function`` as Dynamo makes it, or as AOTAutograd gives it to a compiler."""
    traced: list[fx.GraphModule] = []

    def take(graph: fx.Graph) -> None:
        traced.append(graph.owning_module)
        raise _Traced

    def take_dynamo(gm: fx.GraphModule, _: Any) -> None:
        take(gm.graph)

    torch._dynamo.reset()
    backend = take_dynamo if dynamo else functools.partial(aot_eager, graph_pass=take)
    with contextlib.suppress(_Traced, torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    (gm,) = traced
    return gm


def text(gm: fx.GraphModule) -> str:
    """The calls of a graph, one a line, ``name = op(arguments)``; arguments that are defaults left out."""
    gm.graph.lint()
    names = {node: node.name.removesuffix("_default") for node in gm.graph.nodes}

    def show(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(show, value)) + "]"
        return repr(value) if isinstance(value, str) else str(value)

    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        args, kwargs = [show(a) for a in node.args], dict(node.kwargs)
        op, call = getattr(node.target, "__name__", str(node.target)), topkx_call(node)
        if call is not None:
            op = ("functionalized " if call.functionalized else "") + call.name.removeprefix("topkx::")
            schema = call.op._schema.arguments
            args = [show(call.args[a.name]) for a in schema if not a.has_default_value()]
            optional = [a for a in schema if a.has_default_value()]
            kwargs = {a.name: call.args[a.name] for a in optional if call.args[a.name] != a.default_value}
        elif str(node.target) == "aten.empty.memory_format":
            kwargs = {}
        args += [f"{name}={show(value)}" for name, value in kwargs.items()]
        if node.op == "output":
            lines.append("return " + show(node.args[0]))
        elif op == "getitem":
            lines.append(f"{names[node]} = {args[0]}[{args[1]}]")
        else:
            lines.append(f"{names[node]} = {op.removesuffix('.default')}({', '.join(args)})")
    return "\n".join(lines) + "\n"


# The all-gather form, and what the pass makes of it


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def all_gather(words: torch.Tensor, dim: int = 0) -> torch.Tensor:
    gathered = funcol.all_gather_tensor(words, 0, dist.group.WORLD)
    # What all_gather_tensor itself does for other dimensions, into which Dynamo of torch 2.11 cannot trace.
    return gathered if dim == 0 else torch.cat(torch.chunk(gathered, W, dim=0), dim=dim)


def by_rows(words: torch.Tensor) -> torch.Tensor:
    return all_gather(words).view(W, -1, R)


def merge(logits, row_ends, group, gather: Gather = by_rows, topk=K, local_topk=N, rank=0, rescue=True, lane=0, **kv):
    """The NCCL form; returns rows, valid, ids."""
    words = torch.ops.topkx.local_topk_words(logits, row_ends, local_topk)
    gathered = gather(words)
    rows, valid, ids, saturation = torch.ops.topkx.topk_select(gathered, rank, topk, local_topk, 1, "fp32", **kv)
    if not rescue:
        return rows, valid, ids
    spec = (group, rank, topk, local_topk, 1)
    return torch.ops.topkx.topk_rescue(gathered, saturation, rows, valid, ids, logits, row_ends, *spec, **kv, lane=lane)


def ids_of(group: str, gather: Gather = by_rows, **options) -> Callable[..., torch.Tensor]:
    return lambda logits, row_ends: merge(logits, row_ends, group, gather, **options)[2]


def rewrite(gm: fx.GraphModule, **options) -> tuple[str, ExchangeMergePass]:
    """The graph after the pass, which must be the same after a second one."""
    merge_pass = ExchangeMergePass(**options)
    merge_pass(gm.graph)
    after = text(gm)
    ExchangeMergePass(**options)(gm.graph)
    assert text(gm) == after
    return after, merge_pass


def reason_of(gm: fx.GraphModule, **options) -> str:
    """The one reason that the pass leaves the one chain of a graph alone."""
    before = text(gm)
    after, merge_pass = rewrite(gm, **options)
    assert after == before and merge_pass.rewritten == 0
    assert list(merge_pass.left_alone.values()) == [1]
    return next(iter(merge_pass.left_alone))
