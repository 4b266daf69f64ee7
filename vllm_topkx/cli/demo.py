"""``vllm-topkx demo``: a small DSA model under vLLM's own compile stack, each row checked."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from ..ops import ExchangeTimeoutError, TopkExchange, TopkxError, reserve
from ..ops.reference import same_sets
from ..ranks import RankContext, RankError, RankPool
from ..settings import Settings
from . import demo_model as model
from . import vllm_cpu
from .graph_text import Recording, graph_text, marked
from .progress import progress
from .vllm_hooks import plugin_problem

_EPILOG = """\
Needs vLLM 0.33.0 and a C++ compiler, and no GPU: each rank is a process, and the
exchange goes through shared memory. Times are of this machine's CPU; they say nothing
about GPUs.

Exit code: 0 when the chain was rewritten and every row of every rank is the dense
reference's, 1 when not, 2 when it cannot run.

example:
  vllm-topkx demo --ranks 4 --steps 40
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("--ranks", metavar="W", type=int, default=4, help="processes to run on, 2..16; default 4")
    parser.add_argument("--steps", metavar="S", type=int, default=40, help="decode steps, of five kinds; default 40")


@dataclass(frozen=True)
class Answer:
    """What a step gave on a rank, and how.

    Attributes:
        ids, rows, valid: the model's outputs.
        seconds: from a barrier on.
        rescued: rows that took round 2.
        exchanged: whether the rows were merged by the exchange, as its epochs tell.
    """

    ids: np.ndarray
    rows: np.ndarray
    valid: np.ndarray
    seconds: float
    rescued: int
    exchanged: bool


@dataclass
class Tally:
    """The steps of one kind."""

    seconds: list[float] = field(default_factory=list)
    rows: int = 0
    exact: int = 0
    rescued: int = 0
    fallbacks: int = 0

    def add(self, answers: list[Answer], step: model.Step) -> None:
        """Checks the answers of all ranks to a step."""
        self.seconds.append(max(answer.seconds for answer in answers))
        self.rows += len(step.req_id)
        self.exact += int(exact_rows(answers, step).sum())
        self.rescued += answers[0].rescued
        self.fallbacks += not all(answer.exchanged for answer in answers)


def run(args: argparse.Namespace) -> int:
    _check(args)
    with tempfile.TemporaryDirectory(prefix="topkx-demo-") as folder:
        os.environ.update(vllm_cpu.environment(folder))  # the rank processes inherit it
        if problem := plugin_problem(Settings.from_env().mode):
            print(f"NOT REWRITTEN: {problem}")
            return 1
        with _stage("importing vLLM, once for all ranks"):
            pool = RankPool(args.ranks, preload=[__name__, vllm_cpu.PRELOAD])
        with pool:
            try:
                with _stage(f"compiling the model with vLLM on {args.ranks} ranks"):
                    recordings = pool.run(compile_on_rank)
                _print_graphs(recordings[0])
                tallies = decode(pool, args.ranks, args.steps)
            except RankError as error:
                if isinstance(error.error, (TopkxError, ExchangeTimeoutError)):
                    raise error.error from None
                raise
    _print_table(tallies)
    return _conclude(recordings, tallies, args.ranks)


def _check(args: argparse.Namespace) -> None:
    if not 2 <= args.ranks <= 16:
        raise TopkxError(f"--ranks {args.ranks}: must be 2..16")
    if args.steps < 1:
        raise TopkxError(f"--steps {args.steps}: must be 1 or more")
    if importlib.util.find_spec("vllm") is None:
        raise TopkxError("vLLM is not installed: pip install 'vllm-topkx[vllm]'")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise TopkxError(f"Inductor needs a C++ compiler, and there is no {compiler}: install g++, or set CXX")


@contextmanager
def _stage(what: str) -> Iterator[None]:
    """Says what goes on while a step of unknown length runs: a spinner, or a line where there is no terminal."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(f"{what} ..."):
            yield
    else:
        print(f"{what} ...", file=sys.stderr, flush=True)
        yield


# On the ranks


@dataclass(frozen=True)
class _Rank:
    indexer: Callable[..., tuple[torch.Tensor, ...]]
    exchange: TopkExchange


_rank: _Rank


def compile_on_rank(context: RankContext) -> Recording:
    """Joins vLLM's groups, reserves the exchange and compiles the model by a first step."""
    global _rank
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # as every process of vLLM does
    config = vllm_cpu.set_up(context.rank, context.world_size, max_rows=model.MAX_ROWS)
    exchange = reserve(vllm_cpu.GROUP, model.MAX_ROWS, model.TOPK, device=context.device)
    place = {"rank": context.rank, "world_size": context.world_size}
    local_topk = exchange.settings.local_topk
    _rank = _Rank(vllm_cpu.compiled(model.Indexer, model.DYNAMIC, config, **place, local_topk=local_topk), exchange)
    # Of a step with one row, the compiled graph would be for one row only.
    step = model.make_step(model.KINDS.index(model.SPECULATIVE), context.world_size)
    with recorded() as recording:
        _rank.indexer(*model.shard(step, **place))
    return recording


@contextmanager
def recorded() -> Iterator[Recording]:
    """Records what every ``ExchangeMergePass`` of this process does, whoever runs it."""
    from ..fx_passes import ExchangeMergePass

    recording, original = Recording(), ExchangeMergePass.__call__

    def record(self: ExchangeMergePass, graph: torch.fx.Graph) -> None:
        before, rewritten, left_alone = graph_text(graph), self.rewritten, self.left_alone.copy()
        original(self, graph)
        recording.graphs.append((before, graph_text(graph)))
        recording.rewritten += self.rewritten - rewritten
        recording.left_alone += self.left_alone - left_alone

    ExchangeMergePass.__call__ = record
    try:
        yield recording
    finally:
        ExchangeMergePass.__call__ = original


def step_on_rank(context: RankContext, number: int) -> Answer:
    """Runs decode step ``number``."""
    inputs = model.shard(model.make_step(number, context.world_size), context.rank, context.world_size)
    exchange, rows = _rank.exchange, len(inputs[0])
    epoch, list_epoch = exchange.epoch.clone(), exchange.list_epoch.clone()
    dist.barrier(context.group)
    started = time.perf_counter()
    outputs = _rank.indexer(*inputs)
    seconds = time.perf_counter() - started
    rescued = int((exchange.list_epoch != list_epoch).any(0).sum())
    exchanged = bool((exchange.epoch[:rows] != epoch[:rows]).all())
    return Answer(*(output.numpy() for output in outputs), seconds, rescued, exchanged)


# In the parent


def decode(pool: RankPool, ranks: int, steps: int) -> dict[str, Tally]:
    """Runs the steps and checks them; tallies by kind."""
    tallies = {kind: Tally() for kind in model.KINDS[:steps]}
    with progress("decode steps", steps) as advance:
        for number in range(steps):
            step = model.make_step(number, ranks)
            tallies[step.kind].add(pool.run(step_on_rank, number), step)
            advance(1)
    return tallies


def exact_rows(answers: list[Answer], step: model.Step) -> np.ndarray:
    """bool ``[T]``: every rank has the reference's ids, in one order, and its own part of them as KV rows."""
    reference = model.reference(step)
    ids = np.stack([answer.ids for answer in answers])
    exact = (same_sets(ids, reference) & (ids == ids[0]).all(-1)).all(0)
    for rank, answer in enumerate(answers):
        for t, expected in enumerate(model.kv_rows(reference, step, rank, len(answers))):
            own, rest = np.split(answer.rows[t], [len(expected)])
            exact[t] &= answer.valid[t] == len(expected) and np.array_equal(np.sort(own), expected)
            exact[t] &= (rest == -1).all()
    return exact


def _print_graphs(recording: Recording) -> None:
    on_terminal = sys.stdout.isatty()
    # The pass meets the pieces of a graph that vLLM splits again.
    changed = [(before, after) for before, after in recording.graphs if before != after]
    for before, after in changed or recording.graphs:
        print(f"vLLM's graph on rank 0 before the pass ({len(before.splitlines())} nodes):\n")
        print(marked("-", before, after, on_terminal))
        print(f"\nafter it ({len(after.splitlines())} nodes):\n")
        print(marked("+", after, before, on_terminal))
        print(flush=True)


def _print_table(tallies: dict[str, Tally]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("step kind", title="decode steps against the dense reference", title_justify="left")
    for column in ("steps", "rows", "exact", "rescued", "fallbacks", "median ms"):
        table.add_column(column, justify="right")
    for kind, tally in tallies.items():
        numbers = (len(tally.seconds), tally.rows, tally.exact, tally.rescued, tally.fallbacks)
        style = None if tally.exact == tally.rows else "bold red"
        table.add_row(kind, *map(str, numbers), f"{statistics.median(tally.seconds) * 1e3:.2f}", style=style)
    Console().print(table)
    print("exact: the same on all ranks as a stable sort of the unsharded scores, ids and KV rows.")
    print("rescued: rows that took round 2. fallbacks: steps that kept vLLM's all-gather.")


def _conclude(recordings: list[Recording], tallies: dict[str, Tally], ranks: int) -> int:
    rows, exact = (sum(getattr(tally, name) for tally in tallies.values()) for name in ("rows", "exact"))
    if exact < rows:
        print(f"MISMATCH: {rows - exact} of {rows} rows differ from the reference")
        return 1
    fallbacks = sum(tally.fallbacks for tally in tallies.values())
    if fallbacks or not all(recording.rewritten for recording in recordings):
        print(f"NOT REWRITTEN: all {rows} rows are exact, but the all-gather stayed: {_why_not(recordings)}")
        return 1
    left = sum(recordings[0].left_alone.values())
    print(
        f"OK: all {rows} rows are exact on all {ranks} ranks; "
        f"{recordings[0].rewritten} chain rewritten to an exchange, {left} left alone"
    )
    return 0


def _why_not(recordings: list[Recording]) -> str:
    reasons = dict.fromkeys(reason for recording in recordings for reason in recording.left_alone)
    return "; ".join(reasons) or "the plugin's pass met no chain"
