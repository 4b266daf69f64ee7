"""``vllm-topkx fuzz``: random merges against a stable sort, for as long as asked."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from .._version import __version__
from ..ops import release_all
from ..ops.checks import require
from ..ops.layouts import default_local_topk
from ..ranks import RankContext
from .dump import Dump
from .fuzz_case import Limits, Shape, choose_dump, choose_shape
from .fuzz_shrink import shrink
from .fuzz_sort import sort_on_device
from .machine import cpu_name, gpus, version_of
from .merge_dump import BACKENDS, MergedDump, default_backend, merge_dump, open_pool
from .verify import compare, sort_dump

Merge = Callable[[Dump], MergedDump]
LINE_EVERY_S = 30.0
#: More small worlds than large ones, whose rows take longer.
CPU_WORLD_SIZES = (2, 2, 2, 2, 3, 3, 3, 4, 4, 5, 8, 16)
CPU_LIMITS = Limits(calls=16, rows=256, columns=300, candidates=1 << 17)
GPU_LIMITS = Limits(calls=8, rows=256, columns=6000, candidates=1 << 21)
#: Few, as each is compiled. Shapes of one world size differ in N, so that their exchanges can
#: stay reserved together.
GPU_SHAPES = [
    Shape(2, 2048, default_local_topk(2048, 2), "fp32"),
    Shape(2, 512, 512, "bf16"),
    Shape(2, 300, 155, "fp32"),
    Shape(4, 512, default_local_topk(512, 4), "bf16"),
    Shape(4, 64, 20, "fp32"),
    Shape(8, 2048, default_local_topk(2048, 8), "fp32"),
    Shape(8, 300, 42, "bf16"),
    Shape(16, 512, default_local_topk(512, 16), "fp32"),
    Shape(16, 40, 40, "bf16"),
]

_EPILOG = """\
Each configuration has its own W, K, N, layout, interleave, positions, row ends, KV map or
none, first epoch (often just before a wrap) and scores (NaN, infinities, signed zeros, ties,
empty shards, one rank that holds everything, ...), and makes some calls of random rows. Ids,
their order, and KV rows are checked as `verify` does. On GPUs the W, K, N and layouts are a
fixed few, which are compiled once; backend nccl uses gloo without GPUs. The same seed
gives the same configurations.

Exit code: 0 when all rows are right; 1 when not: the smallest rows and columns that
fail are then in a dump that `vllm-topkx verify` replays.

example:
  vllm-topkx fuzz --minutes 10 --backend cpu --seed 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("--minutes", metavar="M", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--backend", choices=BACKENDS, help="default: as for verify with two ranks")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of all that is random (default: 0)")
    parser.add_argument(
        "--out", metavar="DUMP.npz", type=Path, default=Path("fuzz.npz"), help="for a failure (default: fuzz.npz)"
    )


def run(args: argparse.Namespace) -> int:
    require(args.minutes > 0, f"--minutes {args.minutes:g}: must be above 0")
    require(args.seed >= 0, f"--seed {args.seed}: must be 0 or more")
    backend = args.backend or default_backend(2)
    print(f"backend {backend}, seed {args.seed}, {args.minutes:g} minutes; {_machine()}", flush=True)
    counts: Counter[str] = Counter()
    with merging(backend) as (merge, shapes):
        started = shown = time.monotonic()
        while (now := time.monotonic()) < started + 60 * args.minutes:
            if now > shown + LINE_EVERY_S:
                print(_done(counts, now - started), flush=True)
                shown = now
            dump = configuration(args.seed, counts["configurations"], shapes)
            if backend == "nccl":  # which has no form that starts from local top-Ks
                dump = replace(dump, lists=0)
            try:
                merged = merge(dump)
            except Exception:
                dump.save(args.out)
                print(f"no answer: {_replay(args.out, backend)}", flush=True)
                raise
            if not compare(dump, merged, _sorted(dump, backend)).ok:
                return _failed(dump, merge, args.out, backend)
            counts.update(configurations=1, rows=dump.rows, calls=len(dump.calls))
            counts.update(rescued=int((merged.saturated != 0).sum()))
            counts.update(kv=dump.rows * bool(dump.block_size), lists=dump.rows * dump.lists)
        print(_done(counts, time.monotonic() - started))
    print("OK: all ranks gave the exact top-K of every row, in one order")
    return 0


@contextmanager
def merging(backend: str) -> Iterator[tuple[Merge, list[Shape]]]:
    """``merge(dump)`` on ``backend``, whose processes stay up, and the shapes to merge; none: any shape."""
    if backend == "loopback":
        yield lambda dump: merge_dump(dump, backend), GPU_SHAPES
        return
    found = 0 if backend == "cpu" else torch.cuda.device_count()
    on_gpus = backend == "cuda" or found >= 2
    shapes = [shape for shape in GPU_SHAPES if shape.world_size <= max(2, found)] if on_gpus else []
    most = max(shape.world_size for shape in shapes) if on_gpus else max(CPU_WORLD_SIZES)
    torch.set_num_threads(1)  # the ranks need the cores
    with open_pool(most, backend, range(2, most)) as pool:

        def merge(dump: Dump) -> MergedDump:
            if not on_gpus:  # the next may use the same names with other settings
                pool.run(_release)
            return merge_dump(dump, backend, pool)

        yield merge, shapes


def configuration(seed: int, number: int, shapes: Sequence[Shape] = ()) -> Dump:
    """Configuration ``number`` of ``seed``: of one of ``shapes``, or of any."""
    rng = np.random.default_rng((seed, number))

    def choose(low: int, high: int) -> int:
        return int(rng.integers(low, high, endpoint=True))

    if shapes:
        return choose_dump(choose, shapes[choose(0, len(shapes) - 1)], GPU_LIMITS)
    return choose_dump(choose, choose_shape(choose, CPU_WORLD_SIZES, 2048), CPU_LIMITS)


def _release(context: RankContext) -> None:
    release_all()


def _sorted(dump: Dump, backend: str) -> np.ndarray:
    on_gpu = backend != "cpu" and torch.cuda.is_available()
    return sort_on_device(dump, torch.device("cuda")) if on_gpu else sort_dump(dump)


def _failed(dump: Dump, merge: Merge, out: Path, backend: str) -> int:
    print(f"WRONG rows; looking for the smallest part of {dump.rows} rows that fails ...", flush=True)
    dump.save(out)

    def fails(part: Dump) -> bool:
        return not compare(part, merge(part), _sorted(part, backend)).ok

    if fails(dump):
        dump = shrink(dump, fails)
        dump.save(out)
    else:
        print("it did not fail again")
    print(f"{dump.rows} rows of {dump.logits.shape[2]} positions: {_replay(out, backend)}")
    return 1


def _replay(out: Path, backend: str) -> str:
    return f"vllm-topkx verify {out} --backend {backend}"


def _done(counts: Counter[str], seconds: float) -> str:
    rows = counts["rows"]
    return (
        f"{rows} rows ({counts['rescued']} rescued, {counts['kv']} with KV rows, {counts['lists']} from local top-Ks), "
        f"{counts['configurations']} configurations, {counts['calls']} calls, "
        f"{seconds:.0f} s, {rows / seconds:.0f} rows/s"
    )


def _machine() -> str:
    devices = ", ".join(gpu.name for gpu in gpus()) or cpu_name()
    return f"{devices}; vllm-topkx {__version__}, torch {version_of('torch')}"
