"""``vllm-topkx verify``: merges logits dumped from a real run and compares with a stable sort."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..ops.reference import reference_topk, same_sets
from .dump import Dump, load_dump, writable
from .merge_dump import BACKENDS, Advance, MergedDump, chunks, default_backend, merge_dump
from .progress import progress

REFERENCE_ROWS = 16  # rows between two signs of progress
SHOWN_ROWS, SHOWN_IDS = 5, 8  # of mismatches, in text
JSON_ROWS = 20

_EPILOG = """\
DUMP.npz (numpy.savez) holds, for W ranks, T query rows and L positions a rank:
  logits       [W, T, L] float32, or instead of it
  logits_bf16  [W, T, L] uint16, the bits of bfloat16
  row_ends     [W, T], optional: position j is a candidate when j < row end; default L
  topk, interleave, local_topk   whole numbers, optional where the option is given;
               interleave defaults to 1, local_topk to what the exchange would choose
  block_size, calls, epoch, lists   optional, as `fuzz` writes them: KV rows are checked,
               too; rows of each call; calls of the rows before; 1: from local top-Ks
IDS.npz gets ids [W, T, K] int32, saturated [T] int32 (bit r: rank r took part in
round 2) and reference [T, K] int32.

Exit code: 0 when every rank has the reference's set in every row and all ranks have
one order, 1 when not, 2 on bad input.

Backends: cpu (W processes over shared memory), cuda (W GPUs), loopback (W virtual
ranks on one GPU), nccl (all-gather form; over gloo without W GPUs). Default: cuda
with W GPUs, loopback with fewer, cpu without any.

example:
  vllm-topkx verify step.npz --topk 2048 --interleave 64 --out ids.npz
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("dump", metavar="DUMP.npz", type=Path)
    parser.add_argument("--topk", metavar="K", type=int, help="ids wanted a row, 1..4096")
    parser.add_argument("--interleave", metavar="I", type=int, help="cp_kv_cache_interleave_size")
    parser.add_argument("--local-topk", metavar="N", type=int, help="candidates each rank sends in round 1, 1..K")
    parser.add_argument("--backend", choices=BACKENDS, help="see below")
    parser.add_argument("--out", metavar="IDS.npz", type=Path, help="write the ids, and what is right, there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@dataclass(frozen=True)
class Mismatch:
    """A row of a rank that is not the reference's set; ``missing`` and ``extra`` ids, counted ones repeated."""

    row: int
    rank: int
    missing: list[int]
    extra: list[int]


@dataclass(frozen=True)
class Verdict:
    """What a comparison found."""

    mismatches: list[Mismatch]
    order_differs: list[int]  # rows that the ranks give in different orders
    kv_rows_differ: list[int]  # rows whose KV rows or count are not those of the rank's ids

    @property
    def ok(self) -> bool:
        return not self.mismatches and not self.order_differs and not self.kv_rows_differ

    @property
    def wrong_rows(self) -> list[int]:
        return sorted({m.row for m in self.mismatches} | {*self.order_differs} | {*self.kv_rows_differ})


def run(args: argparse.Namespace) -> int:
    dump = load_dump(args.dump, args.topk, args.interleave, args.local_topk)
    backend = args.backend or default_backend(dump.world_size)
    with writable(args.out, args.dump) as out:
        started = time.monotonic()
        with progress("merging rows", dump.rows) as advance:
            merged = merge_dump(dump, backend, advance=advance)
        seconds = time.monotonic() - started
        with progress("sorting rows", dump.rows) as advance:
            reference = sort_dump(dump, advance)
        verdict = compare(dump, merged, reference)
        if out is not None:
            with out.open("wb") as file:
                np.savez(file, ids=merged.ids, saturated=merged.saturated, reference=reference)
    (_print_json if args.json else _print_text)(args, dump, backend, merged.saturated, verdict, seconds)
    return 0 if verdict.ok else 1


def sort_dump(dump: Dump, advance: Advance = lambda rows: None) -> np.ndarray:
    """int32 ``[T, K]``: the reference of every row."""
    parts = []
    for rows in chunks(dump.rows, REFERENCE_ROWS):
        parts.append(reference_topk(dump.scores(rows), dump.row_ends[:, rows], dump.topk, dump.interleave))
        advance(len(parts[-1]))
    return np.concatenate(parts)


def compare(dump: Dump, merged: MergedDump, reference: np.ndarray) -> Verdict:
    """Compares each rank's ids with ``reference`` int32 ``[T, K]`` and each other, and its KV rows with its ids."""
    ids, mismatches = merged.ids, []
    for row, rank in np.argwhere(~same_sets(ids, reference).T):
        got, want = Counter(ids[rank, row].tolist()), Counter(reference[row].tolist())
        missing, extra = sorted((want - got).elements()), sorted((got - want).elements())
        mismatches.append(Mismatch(int(row), int(rank), missing, extra))
    order_differs = np.flatnonzero((ids != ids[0]).any(axis=(0, 2)))
    kv_rows_differ = np.flatnonzero(_kv_rows_differ(dump, merged).any(axis=0))
    return Verdict(mismatches, order_differs.tolist(), kv_rows_differ.tolist())


def _kv_rows_differ(dump: Dump, merged: MergedDump) -> np.ndarray:
    """bool ``[W, T]``: where KV rows are not those of the rank's own ids, in their order, or their count is not."""
    differ = np.zeros((dump.world_size, dump.rows), dtype=bool)
    if merged.rows is None:
        return differ
    for rank in dump.ranks:
        (table, requests), ids = dump.kv_map(rank, slice(None)), merged.ids[rank]
        stretch, inside = np.divmod(ids, dump.interleave)
        own = (ids >= 0) & (stretch % dump.world_size == rank)
        block, place = np.divmod(stretch // dump.world_size * dump.interleave + inside, dump.block_size)
        block = table[requests[:, None], np.where(own, block, 0).clip(0, table.shape[1] - 1)]
        wanted = np.where(own, block * dump.block_stride + place, -1)
        wanted = np.take_along_axis(wanted, np.argsort(~own, axis=1, kind="stable"), axis=1)
        differ[rank] = (merged.rows[rank] != wanted).any(axis=1) | (merged.valid[rank] != own.sum(axis=1))
    return differ


def _print_json(
    args: argparse.Namespace, dump: Dump, backend: str, saturated: np.ndarray, verdict: Verdict, seconds: float
) -> None:
    print(
        json.dumps(
            {
                "ok": verdict.ok,
                "dump": str(args.dump),
                "backend": backend,
                "world_size": dump.world_size,
                "rows": dump.rows,
                "positions": dump.logits.shape[2],
                "dtype": str(dump.layout.dtype).removeprefix("torch."),
                "topk": dump.topk,
                "interleave": dump.interleave,
                "local_topk": dump.local_topk,
                "saturated_rows": int((saturated != 0).sum()),
                "mismatched_rows": sorted({mismatch.row for mismatch in verdict.mismatches}),
                "mismatches": [asdict(mismatch) for mismatch in verdict.mismatches[:JSON_ROWS]],
                "order_differs": verdict.order_differs,
                "kv_rows_differ": verdict.kv_rows_differ,
                "merge_seconds": round(seconds, 3),
                "out": None if args.out is None else str(args.out),
            }
        )
    )


def _print_text(
    args: argparse.Namespace, dump: Dump, backend: str, saturated: np.ndarray, verdict: Verdict, seconds: float
) -> None:
    dtype = str(dump.layout.dtype).removeprefix("torch.")
    print(f"{args.dump}: {dump.world_size} ranks, {dump.rows} rows of {dump.logits.shape[2]} positions, {dtype}")
    print(f"topk {dump.topk}, interleave {dump.interleave}, local_topk {dump.local_topk}, backend {backend}")
    rescued = int((saturated != 0).sum())
    print(f"merged in {seconds:.2f} s; {rescued} of {dump.rows} rows had a saturated rank and took round 2")
    for mismatch in verdict.mismatches[:SHOWN_ROWS]:
        print(
            f"row {mismatch.row}, rank {mismatch.rank}: missing {_some(mismatch.missing)}, "
            f"extra {_some(mismatch.extra)}"
        )
    if len(verdict.mismatches) > SHOWN_ROWS:
        print(f"... and {len(verdict.mismatches) - SHOWN_ROWS} more")
    if verdict.order_differs:
        print(f"the ranks give different orders in {len(verdict.order_differs)} rows: {_some(verdict.order_differs)}")
    if verdict.kv_rows_differ:
        print(
            f"KV rows are not those of the ids in {len(verdict.kv_rows_differ)} rows: {_some(verdict.kv_rows_differ)}"
        )
    if args.out is not None:
        print(f"wrote {args.out}")
    if verdict.ok:
        print("OK: all ranks give the exact top-K of every row, in one order")
    else:
        print(f"MISMATCH: {len(verdict.wrong_rows)} of {dump.rows} rows are wrong")


def _some(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:SHOWN_IDS]))
    return f"[{shown}{f', ... {len(values)} in all' if len(values) > SHOWN_IDS else ''}]"
