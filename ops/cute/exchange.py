"""Exchanges whose slots lie in GPU memory: what kernels need of them, and the one over symmetric memory."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ..errors import BackendUnavailableError, ExchangeTimeoutError, TopkxError
from ..exchange import ExchangeSettings, TopkExchange
from ..groups import gather_from_ranks
from .device import multiprocessors, require_dsl, require_gpu
from .record import OVERLAP, FailureRecord
from .report import watch

#: Two micro-batches may be in flight, on two lanes, and the blocks of both must be resident together. A
#: block takes the registers of a whole multiprocessor, so each launch gets half of them.
LANES_AT_ONCE = 2
#: An address that no GPU has.
NOWHERE = 1 << 62
#: What closed exchanges leave: graphs that captured them read it.
_closed_bases: list[torch.Tensor] = []


class DeviceExchange(TopkExchange):
    """A :class:`TopkExchange` on GPUs.

    Attributes:
        bases: int64 ``[W]`` on the device: address of every rank's buffer, as this rank's kernels see it.
        record: where a kernel leaves what it waited for.
        max_blocks: thread blocks of a launch that are resident at once.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, lane: int, settings: ExchangeSettings, timeout_s: float
    ) -> None:
        super().__init__(group, device, lane, settings, timeout_s)
        self.bases: torch.Tensor | None = None
        self.record = FailureRecord.pinned()
        self.max_blocks = multiprocessors(device) // LANES_AT_ONCE
        watch(self)

    @property
    def timeout_ns(self) -> int:
        return int(self.timeout_s * 1e9)

    def failed(self) -> bool:
        """Whether a kernel gave up waiting; a read of host memory."""
        return self.record.failure() is not None

    def check_call(self, rows: int | torch.SymInt, topk: int, layout: str) -> None:
        self.check_failure()  # before anything asks the GPU, whose context is lost
        super().check_call(rows, topk, layout)

    def check_failure(self) -> None:
        """Raises what made a kernel stop, ``ExchangeTimeoutError`` for a time limit; a read of host memory."""
        if self.failure is None and (found := self.record.failure()) is not None:
            if found.round == OVERLAP:
                self.failure = TopkxError(
                    f"two calls at once on lane {self.lane} of group {self.group!r} (row {found.row}, epoch "
                    f"{found.epoch}): calls that can be in flight together need a lane each. Their results are mixed "
                    f"and the CUDA context is lost: restart the group"
                )
            else:
                self.failure = ExchangeTimeoutError(
                    self.group, found.row, found.source, found.epoch, found.round, self.timeout_s
                )
        if self.failure is not None:
            raise self.failure

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turns the CUDA error that follows a kernel's stop into the error that says why, and who was late."""
        try:
            yield
        except RuntimeError as error:
            if self.failed():
                with contextlib.suppress(TopkxError, ExchangeTimeoutError):
                    self.check_failure()
                raise self.failure from error
            raise

    def synchronize(self) -> None:
        """Waits for the device, as ``torch.cuda.synchronize``; a time limit is named as such."""
        with self.explained():
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if self.bases is not None:
            # A graph that captured it and is replayed yet must end in an error, not in memory of others.
            with contextlib.suppress(RuntimeError):  # the context may be lost
                self.bases.fill_(NOWHERE)
            _closed_bases.append(self.bases)
        self.bases = None
        self._free()
        if self.failure is None:
            self.failure = TopkxError(f"the exchange of group {self.group!r} was closed: reserve it again")

    @abstractmethod
    def _free(self) -> None:
        """Lets go of the buffer."""


class SymmetricMemoryExchange(DeviceExchange):
    """Ranks on GPUs of one NVLink domain; a rank stores to the others' memory and reads its own.

    Only the peers' addresses are used, no multicast object.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, lane: int, settings: ExchangeSettings, timeout_s: float
    ) -> None:
        # Ranks go on together or raise together: else the others would wait in the next collective.
        with _together(group, "cannot run the CUDA backend"):
            require_dsl()
            require_gpu(device)
            super().__init__(group, device, lane, settings, timeout_s)
        with torch.cuda.device(device):
            with _together(group, "cannot allot symmetric memory"):
                self._buffer: torch.Tensor | None = self._allocate()
            with _together(group, "cannot map the memory of its peers (NVLink or peer access is missing)"):
                bases = self._map(self._buffer)
            # All buffers were zeroed before any rank was told of any: nobody stores earlier.
            self.bases = torch.tensor(bases, dtype=torch.int64, device=device)

    def _allocate(self) -> torch.Tensor:
        """This rank's buffer, zeroed: epochs start at 1, so that zero is never waited for."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        buffer = symmetric_memory.empty(self.nbytes // 4, dtype=torch.int32, device=self.device)
        buffer.zero_()
        torch.cuda.synchronize(self.device)
        return buffer

    def _map(self, buffer: torch.Tensor) -> list[int]:
        """Collective: every rank's buffer as this rank addresses it."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        handle = symmetric_memory.rendezvous(buffer, self.group)
        # A buffer may begin inside the block that is mapped, at the same place on every rank.
        inside = buffer.data_ptr() - handle.buffer_ptrs[self.rank]
        return [pointer + inside for pointer in handle.buffer_ptrs]

    def _free(self) -> None:
        self._buffer = None


@contextlib.contextmanager
def _together(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Collective: when the block raises on one rank, all raise ``BackendUnavailableError`` that names it."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    try:
        gather_from_ranks(group, None, None if error is None else str(error), f" {what}")
    except BackendUnavailableError as refused:
        raise refused from error
