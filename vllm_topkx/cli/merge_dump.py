"""Merging a dump on every rank of a backend."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..ops import BackendUnavailableError, ExchangeTimeoutError, TopkxError, reserve
from ..ops.layouts import exchange_bytes
from ..ops.nccl.form import merge_all_gather
from ..ranks import RankContext, RankError, RankPool
from ..settings import Settings
from .dump import Dump

BACKENDS = ("cpu", "cuda", "loopback", "nccl")
#: Bytes that all ranks together may take at once beside the dump; decides the rows of a chunk.
MEMORY = 2 << 30
Advance = Callable[[int], None]


def default_backend(world_size: int) -> str:
    """cpu without a GPU, cuda with at least ``world_size``, else loopback."""
    gpus = torch.cuda.device_count()
    return "cpu" if not gpus else "cuda" if gpus >= world_size else "loopback"


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
    from ..ops.cute.loopback import Loopback

    size = chunk_rows(dump)
    loopback = Loopback(dump.world_size, min(size, dump.rows), dump.topk, dump.local_topk, dump.layout.dtype)
    ids, saturated = [], []
    for rows in chunks(dump.rows, size):
        inputs = [_on_device(dump.logits[r, rows], dump.row_ends[r, rows], loopback.device) for r in dump.ranks]
        words = [torch.ops.topkx.local_topk_words(*of_rank, dump.local_topk) for of_rank in inputs]
        merged = loopback.exchange_merge(words, *zip(*inputs, strict=True), interleave=dump.interleave)
        loopback.synchronize()
        ids.append(np.stack([of_rank.ids.cpu().numpy() for of_rank in merged]))
        saturated.append(_saturation(dump, torch.stack(words)))
        advance(len(saturated[-1]))
    return np.concatenate(ids, axis=1), np.concatenate(saturated)


def _saturation(dump: Dump, words: torch.Tensor) -> np.ndarray:
    """int32 ``[T]``, from the words that the ranks decided from: the exchange does not tell."""
    settings = (dump.topk, dump.local_topk, dump.interleave, dump.layout.name)
    return torch.ops.topkx.topk_select(words, 0, *settings, emit_ids=False)[3].cpu().numpy()


def _on_device(logits: np.ndarray, row_ends: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores ``[T, L]`` and row ends ``[T]``; uint16 logits are the bits of bfloat16."""
    scores = torch.from_numpy(logits if logits.dtype == np.float32 else logits.view(np.int16)).to(device)
    scores = scores if logits.dtype == np.float32 else scores.view(torch.bfloat16)
    return scores, torch.from_numpy(row_ends).to(device)


def _merge_on_pool(dump: Dump, pool: RankPool, all_gather: bool, advance: Advance) -> tuple[np.ndarray, np.ndarray]:
    ids, saturated = [], []
    settings = (dump.topk, dump.local_topk, dump.interleave, all_gather)
    for rows in chunks(dump.rows, chunk_rows(dump)):
        each = [(dump.logits[rank, rows], dump.row_ends[rank, rows]) for rank in dump.ranks]
        try:
            answers = pool.run(_merge_on_rank, *settings, each=each, world_size=dump.world_size)
        except RankError as error:
            if isinstance(error.error, (TopkxError, ExchangeTimeoutError)):
                raise error.error from None
            raise
        ids.append(np.stack([rank_ids for rank_ids, _ in answers]))
        saturated.append(_saturation(dump, torch.from_numpy(np.stack([rank_words for _, rank_words in answers]))))
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
    scores, ends = _on_device(logits, row_ends, context.device)
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


def chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
