"""``vllm-topkx bench passes``: how long ``ExchangeMergePass`` takes, and that it is linear in the graph."""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..ops import exchange as exchanges
from ..ops.errors import TopkxError
from .dump import writable
from .machine import cpu_name, versions
from .progress import progress

W, ROWS, L, K, N, INTERLEAVE = 4, 8, 4096, 512, 192, 64
#: Parts of the wanted graph that are measured too, smallest first; the whole one has the most repeats.
PARTS = (1 / 8, 1 / 4, 1 / 2, 1, 2)
REPEATS = 7
NODES_A_CHAIN = 32  # at least: 13 are the chain's own

_EPILOG = """\
Builds graphs of elementwise nodes and all-gather chains, and times the pass on fresh
copies: median of 7. Needs no GPU and no peers.

example:
  vllm-topkx bench passes --nodes 5000 --chains 60 --json passes.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("--nodes", metavar="N", type=int, default=5000, help="nodes of the graph; default 5000")
    parser.add_argument("--chains", metavar="C", type=int, default=60, help="all-gather chains in it; default 60")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there, too")


@dataclass(frozen=True)
class Timing:
    """One graph: its size before the pass, chains rewritten, and the pass's time."""

    nodes: int
    chains: int
    rewritten: int
    milliseconds: float
    microseconds_per_node: float


def run(args: argparse.Namespace) -> int:
    most = args.nodes // NODES_A_CHAIN
    if not 1 <= args.chains <= most:
        raise TopkxError(f"--chains {args.chains}: must be 1..{most} for {args.nodes} nodes")
    with writable(args.json) as file:
        with progress("graphs", len(PARTS)) as advance, stub_exchange() as group:
            timings = []
            for part in PARTS:
                timings.append(measure(round(args.nodes * part), max(1, round(args.chains * part)), group))
                advance(1)
        machine = {"cpu": cpu_name(), **versions()}
        if file is not None:
            file.write_text(json.dumps({"machine": machine, "passes": [asdict(t) for t in timings]}, indent=2) + "\n")
    _print(machine, timings, timings[PARTS.index(1)])
    return 0


def measure(nodes: int, chains: int, group: str) -> Timing:
    """Median time of the pass on copies of a graph."""
    from ..fx_passes.exchange_merge import ExchangeMergePass

    build = graph_builder(nodes, chains, group)
    seconds, rewritten = [], 0
    for _ in range(REPEATS):
        graph, merge = build(), ExchangeMergePass()
        count = len(graph.nodes)
        start = time.perf_counter()
        merge(graph)
        seconds.append(time.perf_counter() - start)
        rewritten = merge.rewritten
    median = statistics.median(seconds)
    return Timing(count, chains, rewritten, round(1e3 * median, 3), round(1e6 * median / count, 3))


def graph_builder(nodes: int, chains: int, group: str) -> Callable[[], fx.Graph]:
    """A function that makes the same new graph of about ``nodes`` nodes each time.

    Elementwise nodes with a chain ``local_topk_words``, all-gather, wait, view, ``topk_select``,
    ``topk_rescue`` every so often, as a model's layers have; values are fake tensors, made once.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        score, ends = torch.empty(ROWS, L), torch.empty(ROWS, dtype=torch.int32)
    values: dict[str, Any] = {}
    ops = torch.ops

    def build() -> fx.Graph:
        graph = fx.Graph()

        def add(name: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            node = graph.call_function(target, args, kwargs)
            if name not in values:  # the value of its like in the first chain
                fakes = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
                values[name] = target(*fakes[0], **fakes[1])
            node.meta["val"] = values[name]
            return node

        def outputs(name: str, node: fx.Node, count: int) -> list[fx.Node]:
            return [add(f"{name}{i}", operator.getitem, node, i) for i in range(count)]

        def chain(logits: fx.Node) -> fx.Node:
            words = add("words", ops.topkx.local_topk_words.default, logits, row_ends, N)
            gathered = add("gathered", ops._c10d_functional.all_gather_into_tensor.default, words, W, group)
            gathered = add("waited", ops._c10d_functional.wait_tensor.default, gathered)
            shape = [W, ROWS, words.meta["val"].shape[-1]]
            gathered = add("viewed", ops.aten.reshape.default, gathered, shape)
            select = add("select", ops.topkx.topk_select.default, gathered, 0, K, N, INTERLEAVE, "fp32")
            rows, valid, ids, saturation = outputs("select", select, 4)
            rescue = add(
                "rescue", ops.topkx.topk_rescue.default, gathered, saturation, rows, valid, ids, logits, row_ends,
                group, 0, K, N, INTERLEAVE,
            )  # fmt: skip
            return outputs("rescue", rescue, 3)[2]

        x, row_ends = graph.placeholder("x"), graph.placeholder("row_ends")
        x.meta["val"], row_ends.meta["val"] = score, ends
        results = []
        fillers = max(1, (nodes - chains * 13 - 3) // chains)
        for _ in range(chains):
            for step in range(fillers):
                name = ("relu", "sigmoid", "neg", "abs")[step % 4]
                x = add(name, getattr(ops.aten, name).default, x)
            results.append(chain(x))
        graph.output((x, *results))
        return graph

    return build


@contextmanager
def stub_exchange() -> Iterator[str]:
    """A group of W ranks and its exchange, without peers: enough for the pass; yields the group's name.

    Raises:
        TopkxError: this process is in a process group already.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Stub(exchanges.TopkExchange):
        def close(self) -> None:
            pass

    if dist.is_initialized():
        raise TopkxError("bench passes makes a process group of its own: run it outside of torchrun")
    dist.init_process_group("fake", rank=0, world_size=W, store=FakeStore())
    group = dist.group.WORLD
    cpu = torch.device("cpu")
    name = exchanges._Name(group.group_name, cpu, N, 0)
    stub = Stub(group, cpu, 0, exchanges.ExchangeSettings(ROWS, K, N, "fp32"), timeout_s=1.0)
    exchanges._exchanges[name] = stub
    try:
        yield group.group_name
    finally:
        del exchanges._exchanges[name]
        dist.destroy_process_group()


def _print(machine: dict[str, str | None], timings: list[Timing], whole: Timing) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("nodes", "chains", "rewritten", "ms", "us a node"):
        table.add_column(column, justify="right")
    for t in timings:
        milliseconds, per_node = f"{t.milliseconds:.2f}", f"{t.microseconds_per_node:.2f}"
        table.add_row(str(t.nodes), str(t.chains), str(t.rewritten), milliseconds, per_node)
    print(", ".join(f"{name} {value or '-'}" for name, value in machine.items()))
    print(f"ExchangeMergePass: {whole.milliseconds:.1f} ms for {whole.nodes} nodes with {whole.chains} chains")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
