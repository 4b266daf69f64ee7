"""The shared memory of a block of the interpreter, which also finds races.

A race: two threads use one word with no barrier between, and one of them stores; two atomics are none. Threads
of one warp count as any two, as nothing orders their accesses either.
"""

from __future__ import annotations

import numpy as np

SHARED_BYTES = 100 << 10
_NOBODY, _SEVERAL = -1, -2
_READ, _STORE, _COUNT = range(3)
_MUST_NOT_MEET = {_READ: (_STORE, _COUNT), _STORE: (_READ, _STORE, _COUNT), _COUNT: (_READ, _STORE)}
Vector = np.ndarray


class Race(Exception):
    """Two threads used a word of shared memory in no order."""


class SharedMemory:
    """``SHARED_BYTES`` of junk; ``used`` is the end of what was accessed."""

    def __init__(self) -> None:
        self._words = np.full(SHARED_BYTES // 4, 0xDEADBEEF, np.uint32)
        self._users = np.full((3, SHARED_BYTES // 4), _NOBODY)
        self.used = 0

    def barrier(self) -> None:
        """All threads have come: what they do from here on is after what they did."""
        self._users.fill(_NOBODY)

    def load(self, addresses: Vector, threads: Vector, dtype: type, count: int) -> list[Vector]:
        """``count`` neighbouring values of each of ``threads``."""
        places = self._places(addresses, threads, np.dtype(dtype).itemsize, count, _READ)
        return [self._words.view(dtype)[place] for place in places]

    def store(self, addresses: Vector, threads: Vector, values: list[Vector]) -> None:
        dtype = values[0].dtype
        places = self._places(addresses, threads, dtype.itemsize, len(values), _STORE)
        for place, value in zip(places, values, strict=True):
            self._words.view(dtype)[place] = value

    def combine(self, addresses: Vector, threads: Vector, operation: np.ufunc, values: Vector) -> None:
        """An atomic that returns nothing."""
        (places,) = self._places(addresses, threads, 4, 1, _COUNT)
        operation.at(self._words, places, values)

    def _places(self, addresses: Vector, threads: Vector, size: int, count: int, use: int) -> list[Vector]:
        self.used = max(self.used, int(addresses.max()) + size * count)
        if self.used > SHARED_BYTES or (addresses % (size * count)).any():
            raise IndexError(f"shared memory at {int(addresses.max())}")
        places = [addresses // size + i for i in range(count)]
        for word in range(max(1, size * count // 4)):
            self._use(addresses // 4 + word, threads, use)
        return places

    def _use(self, words: Vector, threads: Vector, use: int) -> None:
        for other in _MUST_NOT_MEET[use]:
            users = self._users[other, words]
            self._refuse(words, (users != _NOBODY) & (users != threads))
        users = self._users[use]
        before = users[words]
        users[words] = np.where((before == _NOBODY) | (before == threads), threads, _SEVERAL)
        shared = (users[words] != threads) & (users[words] != _SEVERAL)  # of threads in this very access
        users[words[shared]] = _SEVERAL
        if use == _STORE:
            self._refuse(words, shared)

    def _refuse(self, words: Vector, raced: Vector) -> None:
        if raced.any():
            raise Race(f"shared memory at {4 * int(words[raced][0])}: used by two threads with no barrier between")
