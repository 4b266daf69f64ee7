"""Calls in a forked child, for the tests of exchanges whose process forks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

CHILD_S = 20  # a child that hangs is ended


def seen_in_child(call: Callable[[], str]) -> str:
    """What ``call`` returns in a child of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_S)
        try:
            os.write(write, call().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        seen = pipe.read()
    os.waitpid(child, 0)
    return seen
