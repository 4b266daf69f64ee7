"""``VLLM_TOPKX=shadow``: counts, by kind, the rows in which the exchange and vLLM's own merge select other ids."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Self

import numpy as np
import torch

from .shadow_rows import KINDS, Rows, unpack

log = logging.getLogger("vllm.topkx")

AllGather = Callable[[torch.Tensor, int], torch.Tensor]
REPORT_S = 60.0


@dataclass(frozen=True)
class Counts:
    """Of the calls that the device has finished, replays of CUDA graphs included.

    Attributes:
        calls, rows: merges, and their rows.
        first, last: numbers of the first and the last merge with a differing row, from 1; 0 without one.
        kinds: differing rows by kind, in the order of ``KINDS``.
    """

    calls: int
    rows: int
    first: int
    last: int
    kinds: tuple[int, ...]


class Shadow:
    """Counts of merges and of differing rows, and the first row of each kind; on the device, told by a thread.

    Whatever touches the GPU is enqueued by the step itself, in a CUDA graph with the rest of it: all is
    copied to pinned memory after every call. The thread only reads that memory. A thread that called CUDA
    while another captures a graph would end the capture.

    Args:
        device: of the merges.
        topk: K.
        rank: this one's, in the DCP group.
        all_gather: ``(tensor, dim)``, vLLM's of that group.
    """

    def __init__(self, device: torch.device, topk: int, rank: int, all_gather: AllGather) -> None:
        self._rank, self._all_gather = rank, all_gather
        self._counts = torch.zeros(4 + len(KINDS), dtype=torch.int64, device=device)
        self._calls, self._rows, self._first, self._last = self._counts[:4]
        self._kinds = self._counts[4:]
        # The first row of each kind, behind the number of its merge.
        self._examples = torch.zeros(len(KINDS), 1 + 4 * topk + 2, dtype=torch.int32, device=device)
        self._seen_counts, self._seen_examples = _host_copy(self._counts), _host_copy(self._examples)
        self._reported = Counts(0, 0, 0, 0, (0,) * len(KINDS))
        self._path: str | None = None

    @classmethod
    def started(cls, device: torch.device, topk: int, rank: int, world_size: int, all_gather: AllGather) -> Self:
        """With its reports: every minute, and when the process ends, a process that multiprocessing made too."""
        # Loads torch's kernels, so that none is loaded under capture; alone, as another rank may have failed.
        alone = cls(device, topk, rank, lambda report, dim: report.repeat(1, world_size))
        ids = torch.zeros(1, topk, dtype=torch.int32, device=device)
        starts = torch.zeros(1, dtype=torch.int32, device=device)
        alone.compare(Rows(ids.to(torch.float32), ids, starts, ids, ids - 1, rank, world_size, 1))
        shadow = cls(device, topk, rank, all_gather)
        threading.Thread(target=shadow._report_forever, name="vllm-topkx-shadow", daemon=True).start()
        Finalize(None, shadow.report, kwargs={"last": True}, exitpriority=0)
        return shadow

    def compare(self, rows: Rows) -> None:
        """Counts one call. Collective: gathers as vLLM's merge does. Enqueues; waits for nothing."""
        self._calls.add_(1)
        if rows.ours.shape[0]:
            self._rows.add_(rows.ours.shape[0])
            self._count(rows, rows.kinds(self._all_gather(rows.report(), 1)))
        if self._seen_counts is not self._counts:
            self._seen_examples.copy_(self._examples, non_blocking=True)
            self._seen_counts.copy_(self._counts, non_blocking=True)  # last: what they count is there then

    def _count(self, rows: Rows, kinds: torch.Tensor) -> None:
        found = kinds.any(dim=0)
        differs, number = found.any(), self._calls
        self._first.copy_(torch.where(differs & (self._first == 0), number, self._first))
        self._last.copy_(torch.where(differs, number, self._last))
        index = kinds.to(torch.int32).argmax(dim=0)
        example = torch.cat([number.to(torch.int32).expand(len(KINDS), 1), rows.record(index)], dim=1)
        self._examples.copy_(torch.where((found & (self._kinds == 0))[:, None], example, self._examples))
        self._kinds.add_(kinds.sum(dim=0))

    def counts(self) -> Counts:
        calls, rows, first, last, *kinds = self._seen_counts.numpy().tolist()
        return Counts(calls, rows, first, last, tuple(kinds))

    def report(self, last: bool = False) -> None:
        """Logs the counts, if there are new ones; a warning when there is a difference."""
        counts, reported = self.counts(), self._reported
        if counts.calls == reported.calls and not last:
            return
        self._reported = counts
        differing = sum(counts.kinds)
        text = (
            f"vllm-topkx shadow, {'at exit' if last else 'so far'}: {counts.calls} merges, {counts.rows} rows, "
            f"{differing} of them with other ids than vLLM's"
        )
        if differing:
            by_kind = ", ".join(f"{name} {count}" for name, count in zip(KINDS, counts.kinds, strict=True) if count)
            text += f": {by_kind}; first in merge {counts.first}, last in merge {counts.last}"
            if any(now and not before for now, before in zip(counts.kinds, reported.kinds, strict=True)):
                self._write_examples(counts)
            text += f"; the first row of each kind is in {self._path}" if self._path else ""
        log.log(logging.WARNING if differing else logging.INFO, "%s", text)

    def _write_examples(self, counts: Counts) -> None:
        """Writes the first row of each kind, an array a field by kind, to a file of its own."""
        kept = [kind for kind, count in enumerate(counts.kinds) if count]
        examples = self._seen_examples[kept]
        fields = {name: value.numpy() for name, value in unpack(examples[:, 1:]).items()}
        fields |= {"kind": np.array(KINDS)[kept], "merge": examples[:, 0].numpy(), "rank": np.array(self._rank)}
        try:
            if self._path is None:
                handle, self._path = tempfile.mkstemp(".npz", f"vllm-topkx-shadow-rank{self._rank}-")
                os.close(handle)
            np.savez(self._path, **fields)
        except OSError as error:
            log.warning("vllm-topkx shadow: the differing rows cannot be written: %s", error)

    def _report_forever(self) -> None:
        pause = threading.Event()
        while not pause.wait(REPORT_S):
            self.report()


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned memory to copy ``tensor`` to; itself when it is on the host."""
    return torch.zeros_like(tensor, device="cpu", pin_memory=True) if tensor.is_cuda else tensor
