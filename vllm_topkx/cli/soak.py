"""``vllm-topkx soak``: a great many merges, every one checked; epochs go through 2**32, memory must stay flat."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from ..ops.checks import MAX_TOPK, check_world, require
from ..ops.errors import BackendUnavailableError, ExchangeTimeoutError, TopkxError
from ..ranks import RankError, RankPool
from . import soak_ranks
from .progress import progress

#: Stops on the way, where a sample is compared and memory is looked at.
STOPS = 40
#: Memory that may come and go between the first stop and the last: allocators, Python.
DEVICE_SLACK, HOST_SLACK = 16 << 20, 64 << 20

_EPILOG = """\
Merges through CUDA graphs of 61, 3 and 1 exchanges over 1 to 64 rows and eager calls
between them, in random order, on inputs that change from call to call: random scores,
ties, rows that one rank holds alone (round 2), short rows, NaN. Every row of every call
is compared with a stable sort by a 64-bit checksum of its ids, a sample of them id by
id; ids must have one order on all ranks. The epoch of every row goes through 2**32
half-way. The GPUs must have nothing else to do, for memory to be compared.

Exit code: 0 when all rows are right and memory stayed flat, 1 when not, 2 on bad input.

example:
  vllm-topkx soak --merges 1000000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("--merges", metavar="M", type=int, default=1_000_000, help="calls; default 1000000")
    parser.add_argument("--backend", choices=("cuda", "cpu"), help="default: cuda with W GPUs, else cpu (no graphs)")
    parser.add_argument("--ranks", metavar="W", type=int, default=2, help="default 2")
    parser.add_argument("--topk", metavar="K", type=int, default=512, help="default 512")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@dataclass
class Outcome:
    """What came of it. Memory is the largest growth of any rank between the first stop and the last."""

    merges: int
    rows: int
    backend: str
    ranks: int
    topk: int
    seconds: float = 0.0
    wrong_rows: int = 0
    sampled_rows: int = 0
    wrong_samples: int = 0
    wrapped_rows: int = 0
    device_growth: int = 0
    host_growth: int = 0
    problems: list[str] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    require(args.merges >= 1, f"--merges {args.merges}: must be 1 or more")
    require(1 <= args.topk <= MAX_TOPK, f"--topk {args.topk}: allowed is 1..{MAX_TOPK}")
    check_world(args.ranks)
    gpus = torch.cuda.device_count()
    backend = args.backend or ("cuda" if gpus >= args.ranks else "cpu")
    if backend == "cuda" and gpus < args.ranks:
        raise BackendUnavailableError(f"--backend cuda needs {args.ranks} GPUs: this machine has {gpus}; use cpu")
    try:
        with RankPool(args.ranks, preload=[soak_ranks.__name__], device_type=backend) as pool:
            outcome = _soak(pool, args.merges, backend, args.topk)
    except RankError as error:
        if isinstance(error.error, (TopkxError, ExchangeTimeoutError)):
            raise error.error from None
        raise
    if args.json:
        print(json.dumps({"ok": not outcome.problems, **asdict(outcome)}))
    else:
        _print(outcome)
    return 1 if outcome.problems else 0


def _soak(pool: RankPool, merges: int, backend: str, topk: int) -> Outcome:
    plays = soak_ranks.plan(merges)
    calls = soak_ranks.calls_of_rows(plays)
    outcome = Outcome(int(calls[0]), int(calls.sum()), backend, pool.world_size, topk)
    stops = np.array_split(plays, min(STOPS, len(plays)))
    reports = []
    with progress("merges", outcome.merges) as advance:
        pool.run(soak_ranks.build, topk)
        pool.run(soak_ranks.begin, topk, calls)
        started = time.monotonic()
        for part in stops:
            reports.append(pool.run(soak_ranks.run, topk, part.tolist()))
            advance(int(soak_ranks.calls_of_rows(part)[0]))
        outcome.seconds = round(time.monotonic() - started, 3)
        epochs = pool.run(soak_ranks.epochs, topk)
    _judge(outcome, reports, epochs, calls)
    return outcome


def _judge(
    outcome: Outcome, reports: list[list[soak_ranks.Report]], epochs: list[np.ndarray], calls: np.ndarray
) -> None:
    """Fills ``outcome`` from the ranks' reports at each stop and their epochs at the end."""
    everything = [report for of_ranks in reports for report in of_ranks]
    outcome.wrong_rows = sum(report.wrong_rows for report in everything)
    outcome.sampled_rows = sum(report.sampled_rows for report in everything)
    outcome.wrong_samples = sum(report.wrong_samples for report in everything)
    ends = list(zip(reports[0], reports[-1], strict=True))
    outcome.device_growth = max(last.device_bytes - first.device_bytes for first, last in ends)
    outcome.host_growth = max(last.host_bytes - first.host_bytes for first, last in ends)
    expected = calls - soak_ranks.calls_before_wrap(calls)
    outcome.wrapped_rows = int((expected >= 0).sum())
    problems = {
        "rows differ from the stable sort": outcome.wrong_rows or outcome.wrong_samples,
        "ranks give ids in different orders": len({report.order for report in reports[-1]}) > 1,
        "epochs are not those of the calls": any((of_rank != expected).any() for of_rank in epochs),
        "memory on the GPU grew": outcome.device_growth > DEVICE_SLACK,
        "memory on the host grew": outcome.host_growth > HOST_SLACK,
    }
    outcome.problems = [problem for problem, found in problems.items() if found]


def _print(outcome: Outcome) -> None:
    o = outcome
    print(f"{o.merges} merges, {o.rows} rows, topk {o.topk}, {o.ranks} ranks, backend {o.backend}, {o.seconds:.1f} s")
    print(f"wrong by checksum: {o.wrong_rows}; compared id by id: {o.sampled_rows}, wrong: {o.wrong_samples}")
    print(f"rows whose epoch went through 2**32: {o.wrapped_rows} of {soak_ranks.ROWS}")
    print(f"memory since the first stop: GPU {o.device_growth / 2**20:+.1f} MiB, host {o.host_growth / 2**20:+.1f} MiB")
    print("OK: every row is the exact top-K" if not o.problems else f"NOT OK: {'; '.join(o.problems)}")
