"""Memory that the ranks of a group share on one host, and that no death of a process leaves behind.

Every rank makes a segment under ``/dev/shm``, maps those of its peers, and unlinks its own name once all
have mapped it: from then on the kernel frees the memory with the last process. A rank killed before that
leaves a name whose lock nobody holds; the next start removes it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import uuid
from pathlib import Path

import torch.distributed as dist

from ..errors import BackendUnavailableError
from ..groups import gather_from_ranks

SHM = Path("/dev/shm")
PREFIX = "topkx-"
NO_MEMORY = " has no shared memory"


def reclaim() -> list[str]:
    """Removes the segments of processes that died before they could; returns their names."""
    removed = []
    for path in SHM.glob(PREFIX + "*"):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue  # gone already, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(fd)
    return removed


def _create(size: int) -> tuple[Path, int]:
    """A new zeroed segment of ``size`` bytes and its open file, whose shared lock says that we live."""
    while True:
        path = SHM / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if path.exists():  # else reclaim() of another process came between creation and lock
            break
        os.close(fd)
    try:
        if size > (free := free_bytes()):  # else the next line would use up the machine's memory before it fails
            raise OSError(errno.ENOSPC, f"{free} are free")
        os.posix_fallocate(fd, 0, size)  # fails here instead of a SIGBUS at first use
    except OSError as error:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise BackendUnavailableError(f"{size} bytes: {error.strerror}; free some, or reserve fewer rows") from error
    return path, fd


def free_bytes() -> int:
    """What shared memory can still take: the file system's room, which may be more than the memory there is."""
    room = os.statvfs(SHM)
    available = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    free = room.f_bavail * room.f_frsize
    return min(free, 1024 * int(available[1])) if available else free


def _map(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def rendezvous(group: dist.ProcessGroup, size: int) -> list[mmap.mmap]:
    """Every rank's segment of ``size`` zeroed bytes, in rank order, mapped into this process.

    Collective. When a rank fails, all raise.
    """
    reclaim()
    path, fd = None, -1
    segments: list[mmap.mmap] = []
    try:
        error = None
        try:
            path, fd = _create(size)
        except (OSError, BackendUnavailableError) as failure:
            error = str(failure)
        paths = gather_from_ranks(group, path, error, NO_MEMORY)
        try:
            segments += [_map(path, size) for path in paths]
        except OSError as failure:
            error = str(failure)
        gather_from_ranks(group, path, error, NO_MEMORY)  # all have mapped: the names can go
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
            os.close(fd)
    return segments
