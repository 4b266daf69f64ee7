"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Where there is no terminal: nothing in the first second, then a line this often.
QUIET_S, LINE_EVERY_S = 1.0, 5.0


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows that ``what`` goes on; the block calls the yielded function with the steps done since."""
    shown = _bar if sys.stderr.isatty() else _lines
    with shown(what, total) as advance:
        yield advance


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda steps: bar.advance(task, steps)


@contextmanager
def _lines(what: str, total: int) -> Iterator[Callable[[int], None]]:
    done, ended = 0, threading.Event()

    def advance(steps: int) -> None:
        nonlocal done
        done += steps

    def report() -> None:
        pause = QUIET_S
        while not ended.wait(pause):
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)
            pause = LINE_EVERY_S

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield advance
    finally:
        ended.set()
        reporter.join()
