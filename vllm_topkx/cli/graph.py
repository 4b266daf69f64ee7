"""``vllm-topkx graph``: the FX graph of a function before and after the exchange pass."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..ops.errors import TopkxError
from ..ranks import RankContext, RankError, RankPool
from . import one_line
from .graph_text import Recording, graph_text, marked
from .progress import progress

MESSAGE = 400  # characters shown of an error of the user's code

_EPILOG = """\
FUNCTION takes no arguments and returns (callable or module, tuple of example inputs). It
runs on every rank of a process group; reserve the exchange in it, else its chains are
left alone. The callable is compiled by Inductor and called once; the graphs are rank 0's,
where Inductor runs custom post-grad passes. Ranks have a GPU each where there are enough.
Exit code: 0, or 2 when MODULE:FUNCTION cannot be found, run or compiled.

example: with step.py in the current folder,

  import torch, vllm_topkx, torch.distributed as dist
  from vllm_topkx.ops.nccl.form import merge_all_gather

  def build():
      name, rank, ranks = dist.group.WORLD.group_name, dist.get_rank(), dist.get_world_size()
      n = vllm_topkx.reserve(name, rows=8, topk=512).settings.local_topk

      def step(logits, row_ends):
          words = torch.ops.topkx.local_topk_words(logits, row_ends, n)
          return merge_all_gather(words, logits, row_ends, name, rank, ranks, 512, n, 64)[2]

      return step, (torch.randn(8, 4096), torch.full((8,), 4096, dtype=torch.int32))

  vllm-topkx graph step:build
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("target", metavar="MODULE:FUNCTION")
    parser.add_argument("--ranks", metavar="W", type=int, default=2, help="processes to run it on, 1..16; default 2")


def run(args: argparse.Namespace) -> int:
    module, colon, function = args.target.partition(":")
    if not (module and colon and function):
        raise TopkxError(f"{args.target!r}: must be MODULE:FUNCTION, such as step:build")
    if not 1 <= args.ranks <= 16:
        raise TopkxError(f"--ranks {args.ranks}: must be 1..16")
    recording = record(module, function, args.ranks)
    for number, (before, after) in enumerate(recording.graphs, 1):
        print(f"graph {number} of {len(recording.graphs)}, before the pass:\n{marked('-', before, after)}\n")
        print(f"after:\n{marked('+', after, before)}\n")
    left = sum(recording.left_alone.values())
    print(f"{recording.rewritten} chains rewritten to exchanges, {left} left alone")
    for reason, count in recording.left_alone.items():
        print(f"  {count}: {reason}")
    return 0


def record(module: str, function: str, ranks: int) -> Recording:
    """Compiles and calls ``module:function`` on ``ranks`` processes; rank 0's recording.

    Raises:
        TopkxError: it cannot be imported, run or compiled.
    """
    device_type = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    with progress("compiling", ranks) as advance, RankPool(ranks, preload=[__name__], device_type=device_type) as pool:
        try:
            recordings = pool.run(_record_on_rank, module, function)
        except RankError as error:
            if isinstance(error.error, TopkxError):
                raise error.error from None
            raise
        advance(ranks)
    return recordings[0]


def _record_on_rank(context: RankContext, module: str, function: str) -> Recording:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from ..fx_passes.exchange_merge import ExchangeMergePass

    logging.getLogger("vllm_topkx").setLevel(logging.ERROR)  # chains left alone are in the report
    merge, recording = ExchangeMergePass(), Recording()

    class Record(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            before = graph_text(graph)
            merge(graph)
            recording.graphs.append((before, graph_text(graph)))

        def uuid(self) -> None:
            return None  # a graph from a cache would not come by here

    call, inputs = _build(module, function)
    options = {"post_grad_custom_post_pass": Record(), "fx_graph_cache": False, "compile_threads": 1}
    try:
        torch.compile(call, options=options)(*inputs)
    except Exception as error:
        raise TopkxError(f"{module}:{function}: cannot be compiled and run: {_describe(error)}") from None
    recording.rewritten, recording.left_alone = merge.rewritten, merge.left_alone
    return recording


def _build(module: str, function: str) -> tuple[Callable[..., Any], tuple]:
    """What the user's function returns, checked."""
    target = f"{module}:{function}"
    sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:
        raise TopkxError(f"{target}: cannot import {module}: {_describe(error)}") from None
    if not callable(found):
        raise TopkxError(f"{target}: module {module} has no function {function}")
    try:
        built = found()
    except Exception as error:
        raise TopkxError(f"{target}: {function}() raised {_describe(error)}") from None
    match built:
        case (call, tuple() | list() as inputs) if callable(call):
            return call, tuple(inputs)
    raise TopkxError(f"{target}: {function}() must return (callable, tuple of example inputs)")


def _describe(error: Exception) -> str:
    text = one_line(error)
    return f"{type(error).__name__}: {text if len(text) <= MESSAGE else text[:MESSAGE] + ' ...'}"
