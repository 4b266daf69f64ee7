"""``vllm-topkx bench``: the exchange against vLLM's own merge; other benchmarks are modules ``bench_NAME``."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from . import add_command
from .bench_plan import Plan, add_output_arguments, add_plan_arguments
from .bench_record import Results
from .dump import writable
from .progress import progress

BENCHMARKS = {
    "passes": "time the exchange pass on graphs of growing size",
    "local": "time the local top-N against torch's and vLLM's",
}
_EPILOG = """\
Measures vLLM's merge, the all-gather forms and the exchange in one process group and
one run: CUDA graphs of back-to-back calls on fresh scores in rotating buffers, medians
of replays that all ranks start together; what the last replay computed is checked.
Needs two GPUs or more. --backend loopback measures on one GPU what a merge of W ranks
computes, against vLLM's select on the same candidates.

Exit code: 0 when every result is right, 1 when one is not, 2 on bad input or no GPU.

examples:
  vllm-topkx bench --quick
  vllm-topkx bench --json bench.json --plot bench.png
  vllm-topkx bench --systems vllm,words:N,floor:N --topk 2048 --scores random,skewed
  vllm-topkx bench --backend loopback --ranks 8
example of the others:
  vllm-topkx bench passes --nodes 5000 --chains 60
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    add_plan_arguments(parser)
    add_output_arguments(parser)
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", title="other benchmarks")
    for name, summary in BENCHMARKS.items():
        add_command(commands, name, summary, importlib.import_module(f".bench_{name}", __package__))


def run(args: argparse.Namespace) -> int:
    plan = Plan.of(args)
    with reported(args, Results("bench", {}, plan.settings(), plan.known)) as results:
        with progress("configurations", plan.steps) as advance:
            if plan.backend == "cuda":
                from .bench_ranks import measure_on_gpus as measure
            else:
                from .bench_loopback import measure_loopback as measure
            results.note("N is " + "; ".join(f"{n} for {of}" for of, n in plan.settings()["local_topk"].items()))
            measure(plan, results, advance)
    return 1 if results.wrong else 0


@contextmanager
def reported(args: argparse.Namespace, results: Results) -> Iterator[Results]:
    """The block fills ``results``; they are then printed, and written where ``args`` says."""
    from .bench_machine import machine
    from .bench_plot import draw, require_matplotlib
    from .bench_table import print_results

    if args.plot is not None:
        require_matplotlib()
    with writable(args.json) as json_file, writable(args.plot) as plot_file:
        results.machine = machine()
        yield results
        print_results(results)
        if json_file is not None:
            json_file.write_text(results.to_json())
        if plot_file is not None:
            draw(results, plot_file, args.plot.suffix[1:])
