"""``VLLM_TOPKX=shadow``: counts the rows in which the exchange and vLLM's own merge select other ids."""

from __future__ import annotations

import logging
import threading
from multiprocessing.util import Finalize
from typing import Self

import torch

log = logging.getLogger("vllm.topkx")

REPORT_S = 60.0


class Shadow:
    """Counts of calls, rows and differing rows, kept on the device and reported by a thread.

    Whatever touches the GPU is enqueued by the step itself, in a CUDA graph with the rest of it: the counts are
    copied to pinned memory after every call. The thread only reads that memory. A thread that called CUDA
    while another captures a graph would end the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._calls, self._rows, self._differing = self._counts
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(3, dtype=torch.int64, pin_memory=True) if on_gpu else self._counts
        self._seen = self._host.numpy()
        self._reported = 0

    @classmethod
    def started(cls, device: torch.device) -> Self:
        """With its reports: every minute, and when the process ends, a process that multiprocessing made too."""
        shadow = cls(device)
        # Loads torch's kernels, so that none is loaded under capture.
        shadow.compare(*torch.zeros(2, 1, 2, dtype=torch.int32, device=device))
        shadow._counts.zero_()
        threading.Thread(target=shadow._report_forever, name="vllm-topkx-shadow", daemon=True).start()
        Finalize(None, shadow.report, kwargs={"last": True}, exitpriority=0)
        return shadow

    def compare(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Counts one call, and its rows whose ids ``[rows, K]`` differ as sets. Enqueues; waits for nothing."""
        differing = (ours.sort(dim=1).values != theirs.sort(dim=1).values).any(dim=1).sum()
        self._calls.add_(1)
        self._rows.add_(ours.shape[0])
        self._differing.add_(differing)
        if self._host is not self._counts:
            self._host.copy_(self._counts, non_blocking=True)

    def counts(self) -> tuple[int, int, int]:
        """Calls, rows and differing rows, of the calls that the device has finished."""
        calls, rows, differing = (int(count) for count in self._seen)
        return calls, rows, differing

    def report(self, last: bool = False) -> None:
        """Logs the counts, if there are new ones; a warning when there is a difference."""
        calls, rows, differing = self.counts()
        if calls == self._reported and not last:
            return
        self._reported = calls
        log.log(
            logging.WARNING if differing else logging.INFO,
            "vllm-topkx shadow, %s: %d merges, %d rows, %d of them with other ids than vLLM's",
            "at exit" if last else "so far",
            calls,
            rows,
            differing,
        )

    def _report_forever(self) -> None:
        pause = threading.Event()
        while not pause.wait(REPORT_S):
            self.report()
