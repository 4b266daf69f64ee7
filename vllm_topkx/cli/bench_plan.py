"""What ``vllm-topkx bench`` is asked for: options, their checks, and the configurations that follow."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..ops.checks import MAX_TOPK, WORLD_SIZES, require
from ..ops.errors import BackendUnavailableError
from ..ops.layouts import default_local_topk
from ..settings import Settings
from .bench_case import BLOCK_SIZE, SCORES
from .bench_record import GPU_SYSTEMS, LOOPBACK_SYSTEMS, System

BACKENDS = {"cuda": GPU_SYSTEMS, "loopback": LOOPBACK_SYSTEMS}
ROWS, TOPK, LOOPBACK_RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (512, 1024, 2048), (8, 16)
QUICK_ROWS, QUICK_TOPK = (1, 16, 64), (2048,)
CALLS = range(20, 101)
#: What plain ``bench`` and ``bench --quick`` repeat: rounds with fresh scores, replays a system in each.
ROUNDS, REPLAYS, QUICK_ROUNDS, QUICK_REPLAYS = 3, 20, 2, 10
COLUMNS, MOST_COLUMNS = 16384, 131072


def whole_numbers(text: str) -> tuple[int, ...]:
    """``1,2,4``: numbers of at least 1, none twice."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of different whole numbers like 1,2,4")
    return numbers


def names(text: str) -> tuple[str, ...]:
    """``a,b``"""
    return tuple(dict.fromkeys(text.split(",")))


def picture(text: str) -> Path:
    """A path that matplotlib can draw to."""
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png, .svg or .pdf")
    return path


def add_output_arguments(parser: argparse.ArgumentParser, default: Any = None) -> None:
    """``--json``, ``--plot`` and ``--quick``; a subcommand's ``default`` SUPPRESS leaves what came before it."""
    parser.add_argument("--json", metavar="FILE", type=Path, default=default, help="write the results there, too")
    parser.add_argument("--plot", metavar="FILE.png", type=picture, default=default, help="draw them (matplotlib)")
    quick = False if default is None else default
    parser.add_argument("--quick", action="store_true", default=quick, help="a first look: less of everything")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    number = {"metavar": "N", "type": int}
    parser.add_argument("--backend", choices=BACKENDS, default="cuda", help="cuda: one rank a GPU (default); loopback")
    parser.add_argument("--ranks", metavar="W,..", type=whole_numbers, help="W; default: the GPUs; loopback: 8,16")
    parser.add_argument("--rows", metavar="T,..", type=whole_numbers, help=f"query rows; default {_text(ROWS)}")
    parser.add_argument("--topk", metavar="K,..", type=whole_numbers, help=f"default {_text(TOPK)}")
    parser.add_argument("--scores", metavar="KIND,..", type=names, help=f"{', '.join(SCORES)}; default random")
    parser.add_argument("--systems", metavar="NAME,..", type=names, help="only those, by name as in the table")
    parser.add_argument("--columns", **number, help=f"scores a row and rank; default {COLUMNS}, loopback 2 K")
    parser.add_argument("--interleave", **number, help="cp_kv_cache_interleave_size; default 1")
    parser.add_argument("--calls", **number, help="calls a CUDA graph, 20..100; default 50")
    parser.add_argument("--rounds", **number, help=f"rounds with fresh scores; default {ROUNDS}")
    parser.add_argument("--replays", **number, help=f"timed replays a system and round; default {REPLAYS}")


def _text(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


@dataclass(frozen=True)
class Plan:
    """A checked command line."""

    backend: str
    world_sizes: tuple[int, ...]
    rows: tuple[int, ...]
    topk: tuple[int, ...]
    scores: tuple[str, ...]
    systems: tuple[str, ...]
    columns: int
    interleave: int
    calls: int
    rounds: int
    replays: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> Plan:
        """Refuses what cannot be measured, before it looks for a GPU.

        Raises:
            TopkxError: an option is out of range.
            BackendUnavailableError: this machine lacks the GPUs.
        """
        known = BACKENDS[args.backend]
        rows = args.rows or (QUICK_ROWS if args.quick else ROWS)
        topk = args.topk or (QUICK_TOPK if args.quick else TOPK)
        scores = args.scores or SCORES[:1]
        interleave = 1 if args.interleave is None else args.interleave
        most = Settings.from_env().max_rows
        require(max(rows) <= most, f"--rows {max(rows)}: at most {most} (VLLM_TOPKX_MAX_ROWS raises the limit)")
        require(max(topk) <= MAX_TOPK, f"--topk {max(topk)}: allowed is 1..{MAX_TOPK}")
        for kind in scores:
            require(kind in SCORES, f"--scores {kind}: must be of {', '.join(SCORES)}")
        for name in args.systems or ():
            require(name in known, f"--systems {name}: {args.backend} has {', '.join(known)}")
        fits = interleave >= 1 and BLOCK_SIZE % interleave == 0
        require(fits, f"--interleave {interleave}: must divide the block size, {BLOCK_SIZE}")
        columns = args.columns
        if columns is None:
            columns = COLUMNS if args.backend == "cuda" else 2 * max(topk)
            columns = -(-columns // BLOCK_SIZE) * BLOCK_SIZE
        require(
            max(topk) <= columns <= MOST_COLUMNS and columns % interleave == 0,
            f"--columns {columns}: must be {max(topk)} (the most K) to {MOST_COLUMNS}, a multiple of {interleave}",
        )
        calls = _number("--calls", args.calls, 20 if args.quick else 50, CALLS.start, CALLS.stop - 1)
        rounds = _number("--rounds", args.rounds, QUICK_ROUNDS if args.quick else ROUNDS, 1, 1000)
        replays = _number("--replays", args.replays, QUICK_REPLAYS if args.quick else REPLAYS, 1, 10_000)
        world_sizes = _world_sizes(args)
        systems = tuple(name for name in known if name in (args.systems or known))
        return cls(args.backend, world_sizes, rows, topk, scores, systems, columns, interleave, calls, rounds, replays)

    def configurations(self) -> Iterator[tuple[int, str, int]]:
        """``(topk, scores, rows)``."""
        return ((k, kind, rows) for k in self.topk for kind in self.scores for rows in self.rows)

    @property
    def steps(self) -> int:
        return len(self.world_sizes) * len(self.topk) * len(self.scores) * len(self.rows)

    @property
    def known(self) -> dict[str, System]:
        return BACKENDS[self.backend]

    def local_topk(self, topk: int, world_size: int) -> int:
        """N."""
        return min(Settings.from_env().local_topk or default_local_topk(topk, world_size), topk)

    def settings(self) -> dict[str, Any]:
        """For the reader: the plan, and N by W and K."""
        n = {f"W = {w}, K = {k}": self.local_topk(k, w) for w in self.world_sizes for k in self.topk}
        return asdict(self) | {"local_topk": n}


def _number(option: str, given: int | None, default: int, low: int, high: int) -> int:
    value = default if given is None else given
    require(low <= value <= high, f"{option} {value}: must be {low}..{high}")
    return value


def require_gpus(count: int, what: str) -> int:
    """The GPUs there are; refuses fewer than ``count``."""
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise BackendUnavailableError(
            f"{what} needs an NVIDIA GPU: this machine has none (bench passes runs here; see --help)"
        )
    if gpus < count:
        raise BackendUnavailableError(f"{what} needs {count} GPUs: this machine has {gpus}; use --backend loopback")
    return gpus


def _world_sizes(args: argparse.Namespace) -> tuple[int, ...]:
    low, high = WORLD_SIZES.start, WORLD_SIZES.stop - 1
    for world_size in args.ranks or ():
        require(low <= world_size <= high, f"--ranks {world_size}: must be {low}..{high}")
    if args.backend == "loopback":
        require_gpus(1, "--backend loopback")
        return args.ranks or LOOPBACK_RANKS
    require(args.ranks is None or len(args.ranks) == 1, "--ranks: --backend cuda measures one W at a time")
    gpus = require_gpus(args.ranks[0] if args.ranks else 2, "--backend cuda")
    return args.ranks or (min(gpus, high),)
