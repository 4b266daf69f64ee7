"""CUDA graphs of back-to-back calls, and how long a call takes in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")
Tensor = torch.Tensor

WARM_UP_CALLS, WARM_UP_REPLAYS = 2, 2
#: Clock cycles that a GPU sleeps before a replay (100 to 250 us): by then the host has enqueued the graph, so
#: that the time of its launch is not measured.
SLEEP_CYCLES = 400_000
#: Replays in flight at most.
REPLAYS_AT_ONCE = 10


def nothing() -> None:
    """What there is to do before a replay, for most systems."""


class Graphed(Generic[Result]):
    """``calls`` calls ``call(0)``, ``call(1)``, ... in one CUDA graph.

    Attributes:
        outputs: what the calls returned; tensors that each replay writes.
    """

    def __init__(self, call: Callable[[int], Result], calls: int, before: Callable[[], None] = nothing) -> None:
        self.calls, self._before = calls, before
        self._call = call  # holds memory that the graph uses
        before()
        for i in range(min(WARM_UP_CALLS, calls)):  # compiles
            call(i)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog may query events of its own meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.outputs = [call(i) for i in range(calls)]

    def time(self, replays: int, group: dist.ProcessGroup | None = None) -> list[float]:
        """Microseconds a call, of ``replays`` replays; ranks of ``group`` start each together.

        ``before`` runs ahead of every replay, untimed.
        """
        for _ in range(WARM_UP_REPLAYS):
            self._before()
            self._graph.replay()
        times: list[float] = []
        while len(times) < replays:
            events = []
            for _ in range(min(REPLAYS_AT_ONCE, replays - len(times))):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._before()
                torch.cuda._sleep(SLEEP_CYCLES)
                if group is not None:
                    dist.all_reduce(self._token(), group=group)
                start.record()
                self._graph.replay()
                end.record()
                events.append((start, end))
            torch.cuda.synchronize()
            times += [1000 * start.elapsed_time(end) / self.calls for start, end in events]
        return times

    def _token(self) -> Tensor:
        return torch.zeros(1, device="cuda")
