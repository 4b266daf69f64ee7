"""``vllm-topkx verify``: merges logits dumped from a real run and compares with a stable sort."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from ..ops import BackendUnavailableError, ExchangeTimeoutError, TopkxError, reserve
from ..ops.layouts import exchange_bytes
from ..ops.nccl.form import merge_all_gather
from ..ops.reference import reference_topk, same_sets
from ..ranks import RankContext, RankError, RankPool
from ..settings import Settings
from .dump import Dump, load_dump, writable
from .progress import progress

BACKENDS = ("cpu", "cuda", "loopback", "nccl")
#: Bytes that all ranks together may take at once beside the dump; decides the rows of a chunk.
MEMORY = 2 << 30
REFERENCE_ROWS = 16  # rows between two signs of progress
SHOWN_ROWS, SHOWN_IDS = 5, 8  # of mismatches, in text
JSON_ROWS = 20
Advance = Callable[[int], None]

_EPILOG = """\
DUMP.npz (numpy.savez) holds, for W ranks, T query rows and L positions a rank:
  logits       [W, T, L] float32, or instead of it
  logits_bf16  [W, T, L] uint16, the bits of bfloat16
  row_ends     [W, T], optional: position j is a candidate when j < row end; default L
  topk, interleave, local_topk   whole numbers, optional where the option is given;
               interleave defaults to 1, local_topk to what the exchange would choose
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

    @property
    def ok(self) -> bool:
        return not self.mismatches and not self.order_differs


def run(args: argparse.Namespace) -> int:
    dump = load_dump(args.dump, args.topk, args.interleave, args.local_topk)
    backend = args.backend or default_backend(dump.world_size)
    with writable(args.out, args.dump) as out:
        started = time.monotonic()
        with progress("merging rows", dump.rows) as advance:
            ids, saturated = merge_dump(dump, backend, advance=advance)
        seconds = time.monotonic() - started
        with progress("sorting rows", dump.rows) as advance:
            reference = sort_dump(dump, advance)
        verdict = compare(ids, reference)
        if out is not None:
            with out.open("wb") as file:
                np.savez(file, ids=ids, saturated=saturated, reference=reference)
    (_print_json if args.json else _print_text)(args, dump, backend, saturated, verdict, seconds)
    return 0 if verdict.ok else 1


def default_backend(world_size: int) -> str:
    """cpu without a GPU, cuda with at least ``world_size``, else loopback."""
    gpus = torch.cuda.device_count()
    return "cpu" if not gpus else "cuda" if gpus >= world_size else "loopback"


def sort_dump(dump: Dump, advance: Advance = lambda rows: None) -> np.ndarray:
    """int32 ``[T, K]``: the reference of every row."""
    parts = []
    for rows in _chunks(dump.rows, REFERENCE_ROWS):
        parts.append(reference_topk(dump.scores(rows), dump.row_ends[:, rows], dump.topk, dump.interleave))
        advance(len(parts[-1]))
    return np.concatenate(parts)


def merge_dump(
    dump: Dump, backend: str, pool: RankPool | None = None, advance: Advance = lambda rows: None
) -> tuple[np.ndarray, np.ndarray]:
    """Merges every row on every rank.

    Args:
        dump: of W ranks, T rows.
        backend: one of ``BACKENDS``.
        pool: processes to run on, of the backend's device, at least W with a group of W; default: new ones.
        advance: is told of rows done.

    Returns:
        ids int32 ``[W, T, K]`` as each rank gives them, and the saturation word of each row, int32 ``[T]``.

    Raises:
        TopkxError: the machine lacks what the backend needs, or the exchange cannot be made.
        ExchangeTimeoutError: a rank did not answer.
    """
    world_size, gpus = dump.world_size, torch.cuda.device_count()
    if backend == "loopback":
        return _merge_loopback(dump, advance)
    if backend == "cuda" and gpus < world_size:
        raise BackendUnavailableError(
            f"backend cuda needs {world_size} CUDA GPUs, one a rank: this machine has {gpus}; "
            f"use {'loopback' if gpus else 'cpu'}"
        )
    if pool is not None:
        return _merge_on_pool(dump, pool, backend == "nccl", advance)
    on_gpus = backend != "cpu" and gpus >= world_size
    chunk_rows(dump)  # refuses settings before processes start
    with RankPool(world_size, preload=[__name__], device_type="cuda" if on_gpus else "cpu") as own:
        return _merge_on_pool(dump, own, backend == "nccl", advance)


def _merge_loopback(dump: Dump, advance: Advance) -> tuple[np.ndarray, np.ndarray]:
    if not torch.cuda.is_available():
        raise BackendUnavailableError("backend loopback needs a CUDA GPU: this machine has none; use cpu")
    raise BackendUnavailableError("backend loopback is not available in this version; use cpu or nccl")


def _merge_on_pool(dump: Dump, pool: RankPool, all_gather: bool, advance: Advance) -> tuple[np.ndarray, np.ndarray]:
    ids, saturated = [], []
    settings = (dump.topk, dump.local_topk, dump.interleave, all_gather)
    for rows in _chunks(dump.rows, chunk_rows(dump)):
        each = [(dump.logits[rank, rows], dump.row_ends[rank, rows]) for rank in range(dump.world_size)]
        try:
            answers = pool.run(_merge_on_rank, *settings, each=each, world_size=dump.world_size)
        except RankError as error:
            if isinstance(error.error, (TopkxError, ExchangeTimeoutError)):
                raise error.error from None
            raise
        ids.append(np.stack([rank_ids for rank_ids, _ in answers]))
        words = torch.from_numpy(np.stack([rank_words for _, rank_words in answers]))
        # The ranks decided from these words; here they are read once more, as the exchange does not tell.
        saturated.append(
            torch.ops.topkx.topk_select(
                words, 0, dump.topk, dump.local_topk, dump.interleave, dump.layout.name, emit_ids=False
            )[3].numpy()
        )
        advance(len(saturated[-1]))
    return np.concatenate(ids, axis=1), np.concatenate(saturated)


def _merge_on_rank(
    context: RankContext,
    topk: int,
    local_topk: int,
    interleave: int,
    all_gather: bool,
    logits: np.ndarray,
    row_ends: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """One rank's part of a chunk: its ids ``[T, K]`` and the words it sent."""
    scores = torch.from_numpy(logits if logits.dtype == np.float32 else logits.view(np.int16)).to(context.device)
    scores = scores if logits.dtype == np.float32 else scores.view(torch.bfloat16)
    ends = torch.from_numpy(row_ends).to(context.device)
    if not all_gather or local_topk < topk:
        reserve(context.group, len(ends), topk, local_topk=local_topk, dtype=scores.dtype, device=context.device)
    words = torch.ops.topkx.local_topk_words(scores, ends, local_topk)
    place = (context.group_name, context.rank, context.world_size)
    if all_gather:
        _, _, ids, _ = merge_all_gather(words, scores, ends, *place, topk, local_topk, interleave)
    else:
        group, _, world_size = place
        _, _, ids = torch.ops.topkx.exchange_merge(words, scores, ends, group, world_size, topk, local_topk, interleave)
    return ids.cpu().numpy(), words.cpu().numpy()


def chunk_rows(dump: Dump) -> int:
    """Rows to merge at once: at most ``VLLM_TOPKX_MAX_ROWS``, and what ``MEMORY`` is enough for."""
    shape = dump.world_size, dump.logits.shape[2]
    exchange = exchange_bytes(dump.world_size, 1, dump.topk, dump.local_topk, dump.layout.name)
    keys = 64 * (shape[1] + dump.world_size * dump.local_topk)  # the CPU ops' int64 temporaries
    return max(1, min(Settings.from_env().max_rows, MEMORY // (dump.world_size * (exchange + keys))))


def _chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def compare(ids: np.ndarray, reference: np.ndarray) -> Verdict:
    """Compares each rank's ``ids`` int32 ``[W, T, K]`` with ``reference`` ``[T, K]`` and with each other."""
    mismatches = []
    for row, rank in np.argwhere(~same_sets(ids, reference).T):
        got, want = Counter(ids[rank, row].tolist()), Counter(reference[row].tolist())
        missing, extra = sorted((want - got).elements()), sorted((got - want).elements())
        mismatches.append(Mismatch(int(row), int(rank), missing, extra))
    order_differs = np.flatnonzero((ids != ids[0]).any(axis=(0, 2)))
    return Verdict(mismatches, order_differs.tolist())


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
    wrong = len({mismatch.row for mismatch in verdict.mismatches})
    if len(verdict.mismatches) > SHOWN_ROWS:
        print(f"... and {len(verdict.mismatches) - SHOWN_ROWS} more")
    if verdict.order_differs:
        print(f"the ranks give different orders in {len(verdict.order_differs)} rows: {_some(verdict.order_differs)}")
    if args.out is not None:
        print(f"wrote {args.out}")
    if verdict.ok:
        print("OK: all ranks give the exact top-K of every row, in one order")
    else:
        print(f"MISMATCH: {wrong} of {dump.rows} rows differ from the reference")


def _some(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:SHOWN_IDS]))
    return f"[{shown}{f', ... {len(values)} in all' if len(values) > SHOWN_IDS else ''}]"
