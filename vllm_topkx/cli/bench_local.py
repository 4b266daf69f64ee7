"""``vllm-topkx bench local``: the local top-N of a rank's scores, against torch's and vLLM's."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..ops.checks import MAX_TOPK, require
from ..ops.errors import TopkxError
from ..ops.layouts import unpack_words
from .bench_case import SCORES, fill_scores
from .bench_check import Truth, worst
from .bench_plan import MOST_COLUMNS, add_output_arguments, names, require_gpus, whole_numbers
from .bench_record import LOCAL_SYSTEMS, UNCHECKED, Measurement, Panel, Results
from .bench_systems import Call, Output
from .bench_timing import Graphed
from .bench_vllm import local_topk_kernel
from .progress import progress

Tensor = torch.Tensor

ROWS, COLUMNS, TOPK = (1, 4, 16, 64), (4096, 8192, 16384, 32768, 65536, 131072), (2048,)
QUICK_ROWS, QUICK_COLUMNS = (1, 16), (4096, 16384, 131072)
CALLS, ROUNDS, REPLAYS, QUICK_REPLAYS = 20, 2, 20, 10
BUFFERS = 4
_EPILOG = """\
vLLM's kernels are compiled ones (vllm._C); where they are not installed, the report
says so. Results are checked; torch.topk breaks ties as it likes.

example:
  vllm-topkx bench local --rows 1,64 --columns 4096,131072 --json local.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    # Left out when not given, so that "bench --json FILE local" keeps the FILE.
    absent = argparse.SUPPRESS
    parser.add_argument("--rows", metavar="T,..", type=whole_numbers, default=absent, help="default 1,4,16,64")
    parser.add_argument("--topk", metavar="N,..", type=whole_numbers, default=absent, help="kept; default 2048")
    parser.add_argument("--columns", metavar="L,..", type=whole_numbers, default=absent, help="default 4k to 128k")
    parser.add_argument("--scores", metavar="KIND,..", type=names, default=absent, help="random (default), ties")
    add_output_arguments(parser, absent)


@dataclass(frozen=True)
class LocalPlan:
    """A checked command line."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    topk: tuple[int, ...]
    scores: tuple[str, ...]
    replays: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> LocalPlan:
        """Refuses what cannot be measured, before it looks for a GPU."""
        columns = args.columns or (QUICK_COLUMNS if args.quick else COLUMNS)
        columns = columns if isinstance(columns, tuple) else (columns,)  # given before "local"
        topk = args.topk or TOPK
        require(max(topk) <= MAX_TOPK, f"--topk {max(topk)}: allowed is 1..{MAX_TOPK}")
        low, high = min(columns), max(columns)
        require(
            max(topk) <= low and high <= MOST_COLUMNS,
            f"--columns {low} to {high}: must be {max(topk)} (the most N) to {MOST_COLUMNS}",
        )
        scores = args.scores or SCORES[:1]
        for kind in scores:
            require(kind in SCORES, f"--scores {kind}: must be of {', '.join(SCORES)}")
        require_gpus(1, "bench local")
        rows = args.rows or (QUICK_ROWS if args.quick else ROWS)
        return cls(rows, columns, topk, scores, QUICK_REPLAYS if args.quick else REPLAYS)


def run(args: argparse.Namespace) -> int:
    from .bench import reported

    plan = LocalPlan.of(args)
    from ..ops.cute.device import require_dsl, require_gpu

    require_dsl()
    require_gpu(torch.device("cuda", torch.cuda.current_device()))
    settings = {name: list(getattr(plan, name)) for name in ("rows", "columns", "topk", "scores")}
    settings |= {"calls": CALLS, "rounds": ROUNDS, "replays": plan.replays}
    with reported(args, Results("bench local", {}, settings, LOCAL_SYSTEMS, across="columns")) as results:
        cases = [
            (Panel(1, topk, scores), rows, columns)
            for topk in plan.topk
            for scores in plan.scores
            for rows in plan.rows
            for columns in plan.columns
        ]
        with progress("configurations", len(cases)) as advance:
            for panel, rows, columns in cases:
                _measure(results, panel, rows, columns, plan.replays)
                advance(1)
    return 1 if results.wrong else 0


def _measure(results: Results, panel: Panel, rows: int, columns: int, replays: int) -> None:
    case = LocalCase(panel, rows, columns)
    graphs: dict[str, Graphed[Output]] = {}
    for name in LOCAL_SYSTEMS:
        try:
            graphs[name] = Graphed(case.build(name), CALLS)
        except TopkxError as error:
            results.leave_out([(name, str(error))])
        except Exception as error:  # vLLM's kernels refuse in their own ways
            results.leave_out([(name, f"{type(error).__name__}: {error}")])
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for round_ in range(ROUNDS):
        case.refresh(1 + round_)
        for name, graph in graphs.items():
            times[name] += graph.time(replays)
            if round_ == ROUNDS - 1:
                verdict = case.verdict(graph.outputs, name)
                results.measurements.append(Measurement.of(name, panel, rows, columns, times[name], verdict))


class LocalCase:
    """Scores in rotating buffers, changed in place by :meth:`refresh`."""

    def __init__(self, panel: Panel, rows: int, columns: int) -> None:
        self.panel, self.k = panel, panel.topk
        self.scores = torch.zeros(BUFFERS, rows, columns, device="cuda")
        self.bf16 = torch.zeros_like(self.scores, dtype=torch.bfloat16)
        self.ends = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
        self.refresh(0)

    def refresh(self, seed: int) -> None:
        for b in range(BUFFERS):
            fill_scores(self.scores[b], self.panel.scores, 0, 1, seed * BUFFERS + b)
            self.bf16[b].copy_(self.scores[b])

    def build(self, name: str) -> Call:
        """Output ``ids``: positions, or for ``topkx`` the words."""
        scores = self.bf16 if "bf16" in name else self.scores
        if name.startswith("topkx"):
            return lambda i: Output(torch.ops.topkx.local_topk_words(scores[i % BUFFERS], self.ends, self.k))
        if name.startswith("torch"):
            return lambda i: Output(scores[i % BUFFERS].topk(self.k, dim=-1, sorted=False).indices)
        kernel = local_topk_kernel("persistent_topk" if name == "vllm" else "top_k_per_row_decode")
        return self._vllm(kernel)

    def _vllm(self, kernel: Callable[[Tensor, Tensor, Tensor], None]) -> Call:
        def call(i: int) -> Output:
            out = torch.empty(self.ends.shape[0], self.k, dtype=torch.int32, device="cuda")
            kernel(self.scores[i % BUFFERS], self.ends, out)
            return Output(out)

        return call

    def verdict(self, outputs: list[Output], name: str) -> str:
        """On every call of the last replay."""
        verdicts = []
        for b in range(BUFFERS):
            scores = (self.bf16 if "bf16" in name else self.scores)[b]
            truth = Truth.of(scores[None], self.k, 1)
            for output in outputs[b::BUFFERS]:
                ids = output.ids
                if name.startswith("topkx"):
                    ord_, ids = unpack_words(ids, self.k, "bf16" if "bf16" in name else "fp32")
                    ids = ids.where(ord_ != 0, -1)
                verdicts.append(truth.verdict_on_ids(ids))
        return worst(verdicts, UNCHECKED)
