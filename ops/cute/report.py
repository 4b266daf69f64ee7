"""Says why a CUDA context was lost.

A wait that reached its limit ends the context. The program then gets a CUDA error from whatever asks the GPU
next, which names neither the exchange nor the peer; and that may be code that knows nothing of exchanges.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Protocol

log = logging.getLogger("vllm_topkx")

LOOK_EVERY_S = 0.05
_lock = threading.Lock()
_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_thread: threading.Thread | None = None


class Watched(Protocol):
    """An exchange whose kernels may leave a record."""

    def check_failure(self) -> None: ...

    def failed(self) -> bool:
        """Whether a kernel left one; a read of host memory."""


def watch(exchange: Watched) -> None:
    """Logs the error of ``exchange`` once, soon after a kernel gave up, for as long as it lives."""
    global _thread
    with _lock:
        _watched.add(exchange)
        if _thread is None:
            _thread = threading.Thread(target=_look, name="vllm-topkx-report", daemon=True)
            _thread.start()


def _look() -> None:
    while True:
        time.sleep(LOOK_EVERY_S)
        with _lock:
            failed = [exchange for exchange in _watched if exchange.failed()]
            for exchange in failed:
                _watched.discard(exchange)
        for exchange in failed:
            try:
                exchange.check_failure()
            except Exception as error:
                log.error("%s", error)
        del failed
