"""The exchange between processes of one host: slots in shared memory, the same bytes as on GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from ..errors import ExchangeTimeoutError, TopkxError
from ..exchange import ExchangeSettings, TopkExchange
from ..layouts import ll_pairs, packed_row_words, unpack_words
from ..spec import KvMap, Merged, MergeSpec
from .ll import WaitExpired, tag_words, wait_words
from .select import Candidates, select, select_words
from .shared_memory import rendezvous

#: Words int32 ``[n, words]`` of this rank's best K candidates of the rows ``[n]``, in local order.
LocalLists = Callable[[torch.Tensor], torch.Tensor]


class SharedMemoryExchange(TopkExchange):
    """A :class:`TopkExchange` of CPU ranks; see ``docs/protocol.md`` for why it is safe."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, lane: int, settings: ExchangeSettings, timeout_s: float
    ) -> None:
        super().__init__(group, device, lane, settings, timeout_s)
        halves = 2 * ll_pairs(packed_row_words(settings.local_topk, settings.layout))
        list_halves = 2 * ll_pairs(packed_row_words(settings.topk, settings.layout))
        slots_shape = (2, self.world_size, settings.rows, halves)
        lists_shape = (self.rescue_slots, settings.rows, list_halves)
        self._in_a_call = threading.RLock()
        # By owner: peers write into slots[owner][parity, source, row] and lists[owner][slot, row].
        self._slots, self._lists = [], []
        for segment in rendezvous(group, self.nbytes):
            memory = np.frombuffer(segment, dtype=np.uint64)
            self._slots.append(memory[: np.prod(slots_shape)].reshape(slots_shape))
            self._lists.append(memory[np.prod(slots_shape) :].reshape(lists_shape))

    def close(self) -> None:
        self._slots, self._lists = [], []
        if self.failure is None:
            self.failure = TopkxError(f"the exchange of group {self.group!r} was closed: reserve it again")

    def merge(
        self, words: torch.Tensor, lists: LocalLists, spec: MergeSpec, kv: KvMap | None, emit_ids: bool
    ) -> Merged:
        """One merge: push ``words [T, words]``, poll the peers', select, rescue, write the epochs back."""
        rows = len(words)
        with self._one_call():
            epochs = _as_uint32(self.epoch[:rows]) + np.uint32(1)  # wraps through 0
            self._push(words, epochs)
            gathered = self._poll(epochs, words.shape[1])
            out, saturation = select_words(gathered, spec, kv, emit_ids)
            self.rescue(gathered, saturation, out, lists, spec, kv)
            self.epoch[:rows] = torch.from_numpy(epochs.view(np.int32))
        return out

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """A call that ends before its epochs are written back breaks the exchange, whatever ended it.

        Its words may be with the peers; the next call would push others under the same epoch. So would a call
        of another thread at the same time, which is refused.
        """
        if not self._in_a_call.acquire(blocking=False):
            raise TopkxError(
                f"two calls at once on lane {self.lane} of group {self.group!r}: calls that can be in flight "
                f"together need a lane each"
            )
        try:
            yield
        except BaseException as error:
            if self.failure is None:
                self.failure = TopkxError(
                    f"a call on the exchange of group {self.group!r} was ended by {type(error).__name__} while its "
                    f"words were with the peers: reserve the exchange again, on every rank"
                )
            raise
        finally:
            self._in_a_call.release()

    def _push(self, words: torch.Tensor, epochs: np.ndarray) -> None:
        halves = tag_words(_as_uint32(words), epochs)
        index = (_parity(epochs), self.rank, np.arange(len(epochs)))
        for slots in self._slots:
            slots[index] = halves

    def _poll(self, epochs: np.ndarray, words: int) -> torch.Tensor:
        """The words of all ranks, int32 ``[W, T, words]``."""
        rows = np.arange(len(epochs))
        slots = self._slots[self.rank]
        gathered = np.empty((self.world_size, len(epochs), words), dtype=np.uint32)
        for source in range(self.world_size):
            index = (_parity(epochs), np.full_like(rows, source), rows)
            gathered[source] = self._wait(slots, index, epochs, words, rows, source, round=1)
        return torch.from_numpy(gathered.view(np.int32))

    def rescue(
        self,
        gathered: torch.Tensor,
        saturation: torch.Tensor,
        out: Merged,
        lists: LocalLists,
        spec: MergeSpec,
        kv: KvMap | None,
    ) -> None:
        """Round 2, into ``out``: saturated ranks push their local top-K of the rows in which they are.

        Every rank computed the same ``saturation`` from the same words, so all agree on who pushes
        which row into which list: the saturated ranks of a row take its lists in rank order.
        """
        rescued = saturation.nonzero().flatten()
        if len(rescued):
            with self._one_call():
                self._rescue_rows(rescued, gathered, saturation, out, lists, spec, kv)

    def _rescue_rows(
        self,
        rescued: torch.Tensor,
        gathered: torch.Tensor,
        saturation: torch.Tensor,
        out: Merged,
        lists: LocalLists,
        spec: MergeSpec,
        kv: KvMap | None,
    ) -> None:
        mask = _as_uint32(saturation)[rescued.numpy()]
        candidates = Candidates.from_words(gathered[:, rescued], spec.local_topk, spec.layout.name)
        shape = (len(rescued), spec.world_size, spec.topk)
        ord, idx = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        ord[..., : spec.local_topk], idx[..., : spec.local_topk] = candidates.ord, candidates.idx
        turns = []
        for source in range(spec.world_size):
            member = np.flatnonzero(mask >> np.uint32(source) & np.uint32(1))
            if len(member):
                slot = np.bitwise_count(mask[member] & np.uint32((1 << source) - 1)).astype(np.int64)
                turns.append((source, member, slot, rescued.numpy()[member]))
        epochs = [_as_uint32(self.list_epoch)[slot, row] + np.uint32(1) for _, _, slot, row in turns]
        for (source, _, slot, row), epoch in zip(turns, epochs, strict=True):
            if source == spec.rank:
                halves = tag_words(_as_uint32(lists(torch.from_numpy(row))), epoch)
                for peer_lists in self._lists:
                    peer_lists[slot, row] = halves
        words = packed_row_words(spec.topk, spec.layout.name)
        for (source, member, slot, row), epoch in zip(turns, epochs, strict=True):
            found = self._wait(self._lists[self.rank], (slot, row), epoch, words, row, source, round=2)
            list_words = torch.from_numpy(found.view(np.int32))
            ord[member, source], idx[member, source] = unpack_words(list_words, spec.topk, spec.layout.name)
            self.list_epoch[slot, row] = torch.from_numpy(epoch.view(np.int32))
        kv_of_rows = None if kv is None else KvMap(kv.block_table, kv.req_id[rescued], kv.block_size, kv.block_stride)
        better, _ = select(Candidates(ord, idx), spec, kv_of_rows, emit_ids=len(out.ids) > 0)
        if len(out.ids):
            out.ids[rescued] = better.ids
        if kv is not None:
            out.rows[rescued], out.valid[rescued] = better.rows, better.valid

    def _wait(
        self,
        slots: np.ndarray,
        index: tuple[np.ndarray, ...],
        epochs: np.ndarray,
        words: int,
        rows: np.ndarray,
        source: int,
        round: int,
    ) -> np.ndarray:
        try:
            return wait_words(slots, index, epochs, words, self.timeout_s)
        except WaitExpired as expired:
            first = expired.pending[0]
            self.failure = ExchangeTimeoutError(
                self.group, int(rows[first]), source, int(epochs[first]), round, self.timeout_s
            )
            raise self.failure from None


def _as_uint32(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().numpy().view(np.uint32)


def _parity(epochs: np.ndarray) -> np.ndarray:
    return (epochs & np.uint32(1)).astype(np.intp)
