"""W real processes on one machine, each a rank of one group: what the CLI and the tests run on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

GRACE_S = 2.0  # for ranks to end by themselves


class RankError(RuntimeError):
    """A rank raised or died; ``rank`` says which, ``error`` is what it raised (None: it died)."""

    def __init__(self, rank: int, message: str, error: BaseException | None = None) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank, self.error = rank, error


@dataclass(frozen=True)
class RankContext:
    """What a function that runs on a rank is told."""

    rank: int
    world_size: int
    group: dist.ProcessGroup
    device: torch.device

    @property
    def group_name(self) -> str:
        return self.group.group_name


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Starts processes that never see Ctrl-C, which goes to all of a terminal; the parent sees it afterwards.

    A start cut short would leave a process that nobody knows. Processes inherit the mask; the handler is
    for other threads of the parent, to which the signal can go. The tracker goes first, as its start
    resets the mask.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if held:
        signal.raise_signal(signal.SIGINT)


class RankPool:
    """Processes that stay up and run functions together.

    Args:
        world_size: processes.
        group_sizes: sizes W of the groups (ranks 0..W-1) that :meth:`run` can use, beside all.
        preload: modules that the server process imports once, before it forks the ranks.
        device_type: ``"cpu"`` (gloo), or ``"cuda"`` (NCCL beside gloo; rank r has GPU r).
    """

    def __init__(
        self,
        world_size: int,
        group_sizes: Sequence[int] = (),
        preload: Sequence[str] = (),
        device_type: str = "cpu",
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *preload])
        self._store = tempfile.TemporaryDirectory(prefix="topkx-store-")
        self.world_size = world_size
        self._connections: list[Connection] = []
        self.processes = []
        sizes = sorted({*group_sizes, world_size})
        try:
            with _interrupts_held():
                for rank in range(world_size):
                    ours, theirs = context.Pipe()
                    arguments = (rank, world_size, sizes, self._store.name, device_type, theirs)
                    process = context.Process(target=_serve, args=arguments, daemon=True)
                    process.start()
                    theirs.close()
                    self._connections.append(ours)
                    self.processes.append(process)
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        each: Sequence[tuple] | None = None,
        world_size: int | None = None,
        timeout_s: float = 300.0,
    ) -> list:
        """``function(context, *args, *each[rank])`` on the first ``world_size`` ranks at once; results by rank.

        Raises:
            RankError: the first rank that raised or died. The pool is closed when one died or hangs.
        """
        size = world_size or self.world_size
        busy = dict(zip(self._connections[:size], range(size), strict=True))
        for connection, rank in busy.items():
            connection.send((function, args if each is None else (*args, *each[rank]), size))
        results: list = [None] * size
        failure: RankError | None = None
        while busy:
            ready = wait(list(busy), timeout=timeout_s)
            if not ready:
                ranks = sorted(busy.values())
                self.close()
                raise RankError(ranks[0], f"no answer within {timeout_s:g} s (waiting for ranks {ranks})")
            for connection in ready:
                rank = busy.pop(connection)
                try:
                    ok, value, text = connection.recv()
                except (EOFError, ConnectionError):
                    self.processes[rank].join(1)
                    failure = failure or RankError(rank, f"died (exit code {self.processes[rank].exitcode})")
                    continue
                if ok:
                    results[rank] = value
                elif failure is None:
                    failure = RankError(rank, text, value)
        if failure is not None:
            raise failure
        return results

    def close(self, grace_s: float = GRACE_S) -> None:
        """Ends all ranks; those that still work after ``grace_s`` are killed."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + grace_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._connections, self.processes = [], []
        self._store.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(grace_s=0.0 if kind is KeyboardInterrupt else GRACE_S)


def _serve(rank: int, world_size: int, sizes: list[int], store: str, device_type: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    device, backend = torch.device("cpu"), "gloo"
    if device_type == "cuda":
        device, backend = torch.device("cuda", rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}/rendezvous", rank=rank, world_size=world_size)
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    while True:
        try:
            function, args, size = connection.recv()
        except (EOFError, ConnectionError):
            # The parent is gone or closed us. multiprocessing gives back its semaphores (Inductor makes one)
            # and leaves by os._exit: exchanges and groups end with the process, not in destructors.
            return
        try:
            answer = (True, function(RankContext(rank, size, groups[size], device), *args), "")
        except BaseException as error:
            answer = (False, error, "".join(traceback.format_exception(error)))
        try:
            connection.send(answer)
        except ConnectionError:
            return  # closed while we worked
        except Exception:  # the result or the error cannot be pickled
            connection.send((False, None, answer[2] or f"result cannot be sent: {answer[1]!r}"))
