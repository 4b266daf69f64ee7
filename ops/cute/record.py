"""The failure record: where a kernel leaves what it waited for, or refused, before it stops the context."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Self

import torch

from ..errors import TopkxError

#: Words of a record, int32.
RECORD_WORDS = 8
CLAIMED, COMPLETE, ROW, SOURCE, EPOCH, ROUND = range(6)
#: What ``ROUND`` says when two launches on one lane took the same epoch.
OVERLAP = 3


@dataclass(frozen=True)
class Failure:
    """A record that a kernel filled; see :meth:`.wait.Watch.fail`. ``round`` 0 is a refused row end, 3 an overlap."""

    row: int
    source: int
    epoch: int
    round: int


class FailureRecord:
    """One record, int32 ``[RECORD_WORDS]``. Kernels are given ``address``."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._words = memory.numpy()  # read on every call: an item of an array costs less than of a tensor
        self.address = memory.data_ptr()  # the GPU's address too: memory is unified

    @classmethod
    def pinned(cls) -> Self:
        """In pinned host memory, which outlives the context."""
        return cls(torch.zeros(RECORD_WORDS, dtype=torch.int32, pin_memory=True))

    def failure(self) -> Failure | None:
        """What a kernel left, if one did."""
        words = self._words
        if not words[COMPLETE]:
            return None
        return Failure(int(words[ROW]), int(words[SOURCE]), int(words[EPOCH]) & 0xFFFFFFFF, int(words[ROUND]))


class RowEndRecord(FailureRecord):
    """The record of the kernels of a device that belong to no exchange."""

    def check(self) -> None:
        """Raises for a row end that an earlier call was given. The CUDA context is lost by then."""
        failure = self.failure()
        if failure is not None:
            end = failure.epoch - (failure.epoch >> 31 << 32)
            raise TopkxError(
                f"row_ends[{failure.row}] is {end}: must lie in 0..{failure.source} (the columns); "
                f"it was found on the GPU, whose context is lost"
            )


@functools.cache
def row_end_record(device: torch.device) -> RowEndRecord:
    """The record of ``device`` (with its index)."""
    with torch.cuda.device(device):
        return RowEndRecord.pinned()
