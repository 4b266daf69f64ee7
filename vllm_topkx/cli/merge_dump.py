"""Merging a dump on every rank of a backend."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..ops import BackendUnavailableError, ExchangeTimeoutError, TopkxError, reserve
from ..ops.checks import require
from ..ops.exchange import TopkExchange
from ..ops.layouts import exchange_bytes, layout_of, unpack_words
from ..ops.nccl.form import merge_all_gather
from ..ops.spec import KvMap, Merged, empty_outputs
from ..ranks import RankContext, RankError, RankPool
from ..settings import Settings
from .dump import Dump

BACKENDS = ("cpu", "cuda", "loopback", "nccl")
#: Bytes that all ranks together may take at once beside the dump; decides the rows of a chunk.
MEMORY = 2 << 30
Advance = Callable[[int], None]
_started: weakref.WeakSet[TopkExchange] = weakref.WeakSet()


def default_backend(world_size: int) -> str:
    """cpu without a GPU, cuda with at least ``world_size``, else loopback."""
    gpus = torch.cuda.device_count()
    return "cpu" if not gpus else "cuda" if gpus >= world_size else "loopback"


#: A rank's own KV rows, their count, and the ids.
RankOutputs = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class MergedDump:
    """What the ranks gave for a dump of W ranks and T rows.

    Attributes:
        ids: int32 ``[W, T, K]``.
        saturated: int32 ``[T]``: bit r is set when rank r took part in round 2 of the row.
        rows, valid: int32 ``[W, T, K]`` and ``[W, T]``, each rank's own KV rows and their count; None without a
            block size.
    """

    ids: np.ndarray
    saturated: np.ndarray
    rows: np.ndarray | None = None
    valid: np.ndarray | None = None

    @classmethod
    def of_calls(cls, calls: Sequence[MergedDump]) -> MergedDump:
        """Several calls as one."""

        def joined(name: str, axis: int) -> np.ndarray | None:
            parts = [getattr(call, name) for call in calls]
            return None if parts[0] is None else np.concatenate(parts, axis=axis)

        return cls(joined("ids", 1), joined("saturated", 0), joined("rows", 1), joined("valid", 1))

    @classmethod
    def of_ranks(cls, dump: Dump, words: torch.Tensor, outputs: Sequence[RankOutputs]) -> MergedDump:
        """One call, from the words ``[W, T, words]`` that the ranks decided from and what each of them got."""
        # The exchange does not tell which ranks were saturated.
        settings = (dump.topk, dump.local_topk, dump.interleave, dump.layout.name)
        saturated = torch.ops.topkx.topk_select(words, 0, *settings, emit_ids=False)[3].cpu().numpy()
        rows, valid, ids = (np.stack(arrays) for arrays in zip(*outputs, strict=True))
        return cls(ids, saturated, *((rows, valid) if dump.block_size else ()))


def merge_dump(
    dump: Dump, backend: str, pool: RankPool | None = None, advance: Advance = lambda rows: None
) -> MergedDump:
    """Merges every row on every rank.

    Args:
        dump: of W ranks, T rows; starting from lists is not for ``nccl``.
        backend: one of ``BACKENDS``.
        pool: processes to run on, of the backend's device, at least W with a group of W; default: new ones.
        advance: is told of rows done.

    Raises:
        TopkxError: the machine lacks what the backend needs, or the exchange cannot be made.
        ExchangeTimeoutError: a rank did not answer.
    """
    size = chunk_rows(dump)  # refuses settings before processes start
    require(not (dump.lists and backend == "nccl"), "backend nccl has no form that starts from local top-Ks (lists)")
    if backend == "loopback":
        return _merge_loopback(dump, size, advance)
    if pool is not None:
        return _merge_on_pool(dump, size, pool, backend == "nccl", advance)
    with open_pool(dump.world_size, backend) as own:
        return _merge_on_pool(dump, size, own, backend == "nccl", advance)


def open_pool(world_size: int, backend: str, group_sizes: Sequence[int] = ()) -> RankPool:
    """Processes for ``backend`` (not loopback): on GPUs where it needs or can use them.

    Raises:
        BackendUnavailableError: the machine has not enough GPUs.
    """
    gpus = torch.cuda.device_count()
    if backend == "cuda" and gpus < world_size:
        raise BackendUnavailableError(
            f"backend cuda needs {world_size} CUDA GPUs, one a rank: this machine has {gpus}; "
            f"use {'loopback' if gpus else 'cpu'}"
        )
    on_gpus = backend != "cpu" and gpus >= world_size
    return RankPool(world_size, group_sizes, preload=[__name__], device_type="cuda" if on_gpus else "cpu")


def _merge_loopback(dump: Dump, size: int, advance: Advance) -> MergedDump:
    if not torch.cuda.is_available():
        raise BackendUnavailableError("backend loopback needs a CUDA GPU: this machine has none; use cpu")
    from ..ops.cute.loopback import Loopback

    calls = slices(dump, size)
    most = max(rows.stop - rows.start for rows in calls)
    loopback = Loopback(dump.world_size, most, dump.topk, dump.local_topk, dump.layout.dtype)
    for exchange in loopback.exchanges:
        start_at(exchange, dump.epoch)
    done = []
    for rows in calls:
        inputs = [on_device(dump.logits[r, rows], dump.row_ends[r, rows], loopback.device) for r in dump.ranks]
        kv = [kv_on_device(dump.kv_map(r, rows), dump, loopback.device) for r in dump.ranks]
        words = [torch.ops.topkx.local_topk_words(*of_rank, dump.local_topk) for of_rank in inputs]
        if dump.lists:
            ids = [local_lists(*of_rank, dump.topk) for of_rank in inputs]
            loopback.merge_dcp_topk_([scores for scores, _ in inputs], ids, dump.interleave)
            merged = [only_ids(of_rank) for of_rank in ids]
        else:
            merged = loopback.exchange_merge(words, *zip(*inputs, strict=True), interleave=dump.interleave, kv=kv)
        loopback.synchronize()
        done.append(MergedDump.of_ranks(dump, torch.stack(words), [outputs(of_rank) for of_rank in merged]))
        advance(rows.stop - rows.start)
    return MergedDump.of_calls(done)


def start_at(exchange: TopkExchange, epoch: int) -> None:
    """Sets the epochs of a new exchange. In used slots, old words could have the tags that are waited for."""
    if exchange not in _started:
        _started.add(exchange)
        for epochs in (exchange.epoch, exchange.list_epoch):
            epochs.fill_(epoch - (epoch >> 31 << 32))


def on_device(logits: np.ndarray, row_ends: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores ``[T, L]`` and row ends ``[T]``; uint16 logits are the bits of bfloat16."""
    scores = torch.from_numpy(logits if logits.dtype == np.float32 else logits.view(np.int16)).to(device)
    scores = scores if logits.dtype == np.float32 else scores.view(torch.bfloat16)
    return scores, torch.from_numpy(row_ends).to(device)


def kv_on_device(kv: tuple[np.ndarray, np.ndarray] | None, dump: Dump, device: torch.device) -> KvMap | None:
    if kv is None:
        return None
    return KvMap(*(torch.from_numpy(array).to(device) for array in kv), dump.block_size, dump.block_stride)


def local_lists(scores: torch.Tensor, row_ends: torch.Tensor, topk: int) -> torch.Tensor:
    """A local top-K as vLLM has it: int32 ``[T, K]`` positions in no order, -1 among them where there are fewer."""
    words = torch.ops.topkx.local_topk_words(scores, row_ends, topk)
    ord, idx = unpack_words(words, topk, layout_of(scores.dtype).name)
    order = torch.randperm(topk, generator=torch.Generator().manual_seed(topk)).to(scores.device)
    return torch.where(ord != 0, idx, -1).to(torch.int32)[:, order]


def only_ids(ids: torch.Tensor) -> Merged:
    return replace(empty_outputs(0, ids.shape[1], False, False, ids.device), ids=ids)


def outputs(merged: Merged) -> RankOutputs:
    return merged.rows.cpu().numpy(), merged.valid.cpu().numpy(), merged.ids.cpu().numpy()


def _merge_on_pool(dump: Dump, size: int, pool: RankPool, all_gather: bool, advance: Advance) -> MergedDump:
    calls = slices(dump, size)
    # Calls that the dump names follow each other closely; else each is as large as memory allows.
    batches = [calls] if dump.calls else [[rows] for rows in calls]
    settings = replace(dump, logits=dump.logits[:0], row_ends=dump.row_ends[:0])
    done = []
    for batch in batches:
        each = [
            ([(dump.logits[r, rows], dump.row_ends[r, rows], dump.kv_map(r, rows)) for rows in batch],)
            for r in dump.ranks
        ]
        try:
            answers = pool.run(_merge_on_rank, settings, all_gather, each=each, world_size=dump.world_size)
        except RankError as error:
            if isinstance(error.error, (TopkxError, ExchangeTimeoutError)):
                raise error.error from None
            raise
        for of_ranks in zip(*answers, strict=True):
            words, merged = zip(*of_ranks, strict=True)
            done.append(MergedDump.of_ranks(dump, torch.from_numpy(np.stack(words)), merged))
            advance(len(done[-1].saturated))
    return MergedDump.of_calls(done)


def _merge_on_rank(
    context: RankContext,
    settings: Dump,
    all_gather: bool,
    calls: list[tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray] | None]],
) -> list[tuple[np.ndarray, RankOutputs]]:
    """One rank's part of some calls, each given as its logits, row ends and block table: words sent, outputs.

    ``settings`` is the dump without its logits and row ends.
    """
    s, device, group = settings, context.device, context.group_name
    if not all_gather or s.local_topk < s.topk:
        most = max(len(ends) for _, ends, _ in calls)
        exchange = reserve(
            context.group, most, s.topk, local_topk=s.local_topk, dtype=s.layout.dtype, device=context.device
        )
        start_at(exchange, s.epoch)
    done = []
    for logits, row_ends, table in calls:
        scores, ends = on_device(logits, row_ends, device)
        kv = kv_on_device(table, s, device)
        numbers = (s.topk, s.local_topk, s.interleave)
        kv_args = {} if kv is None else vars(kv)
        words = torch.ops.topkx.local_topk_words(scores, ends, s.local_topk)
        if all_gather:
            place = (group, context.rank, context.world_size)
            merged = Merged(*merge_all_gather(words, scores, ends, *place, *numbers, **kv_args)[:3])
        elif s.lists:
            ids, place = local_lists(scores, ends, s.topk), (s.topk, context.rank, context.world_size, s.interleave)
            torch.ops.topkx.merge_dcp_topk_(scores, ids, *place, group=group, local_topk=s.local_topk)
            merged = only_ids(ids)
        else:
            place = (group, context.world_size)
            merged = Merged(*torch.ops.topkx.exchange_merge(words, scores, ends, *place, *numbers, **kv_args))
        done.append((words.cpu().numpy(), outputs(merged)))
    return done


def chunk_rows(dump: Dump) -> int:
    """Rows to merge at once: at most ``VLLM_TOPKX_MAX_ROWS``, and what ``MEMORY`` is enough for."""
    shape = dump.world_size, dump.logits.shape[2]
    exchange = exchange_bytes(dump.world_size, 1, dump.topk, dump.local_topk, dump.layout.name)
    keys = 64 * (shape[1] + dump.world_size * dump.local_topk)  # the CPU ops' int64 temporaries
    return max(1, min(Settings.from_env().max_rows, MEMORY // (dump.world_size * (exchange + keys))))


def slices(dump: Dump, size: int) -> list[slice]:
    """The rows of each call; ``size`` is the most where the dump does not say."""
    if not dump.calls:
        return chunks(dump.rows, size)
    ends = np.cumsum(dump.calls).tolist()
    return [slice(end - rows, end) for rows, end in zip(dump.calls, ends, strict=True)]


def chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
