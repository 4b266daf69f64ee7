"""The LL protocol on memory that processes share: a word travels with its epoch.

A slot is an array of 8-byte halves ``epoch << 32 | word`` (little endian: the word, then its epoch), two
of which make a 16-byte LL pair. Aligned 8-byte loads and stores are single-copy atomic on the machines
that have 64-bit Python, and the half is all that must be atomic: a reader that sees the epoch it waits
for has the word that was stored with it. No flag, no fence. Every wait goes through :func:`wait_words`.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from ..layouts import ll_pairs

assert sys.byteorder == "little"

#: First give the core away (a peer on the same core runs), then sleep, ever longer up to a scheduler tick.
YIELDS = 50
FIRST_SLEEP_S, LONGEST_SLEEP_S = 20e-6, 1e-3


class WaitExpired(Exception):
    """A wait reached its limit; ``pending`` are the indices (into the call's rows) still missing."""

    def __init__(self, pending: np.ndarray) -> None:
        self.pending = pending


def tag_words(words: np.ndarray, epochs: np.ndarray) -> np.ndarray:
    """``words`` uint32 ``[n, words]`` with their row's epoch uint32 ``[n]``: uint64 ``[n, 2 * ll_pairs]``."""
    halves = np.zeros((len(words), 2 * ll_pairs(words.shape[1])), dtype=np.uint64)
    halves[:, : words.shape[1]] = words
    halves |= epochs.astype(np.uint64)[:, None] << np.uint64(32)
    return halves


def wait_words(
    slots: np.ndarray, index: tuple[np.ndarray, ...], epochs: np.ndarray, words: int, limit_s: float
) -> np.ndarray:
    """Words of the rows ``slots[index]`` once every half of them carries its row's epoch.

    Args:
        slots: uint64 ``[..., 2 * ll_pairs]``, memory that a peer writes.
        index: arrays ``[n]`` over the leading axes of ``slots``.
        epochs: uint32 ``[n]`` to wait for.
        words: words of a row.
        limit_s: seconds until :class:`WaitExpired`.

    Returns:
        uint32 ``[n, words]``.
    """
    got = np.empty((len(epochs), slots.shape[-1]), dtype=np.uint64)
    pending = np.arange(len(epochs))
    deadline = time.monotonic() + limit_s
    polls, sleep_s = 0, FIRST_SLEEP_S
    while True:
        halves = slots[tuple(axis[pending] for axis in index)]
        arrived = (halves >> np.uint64(32) == epochs[pending, None]).all(axis=1)
        got[pending[arrived]] = halves[arrived]
        pending = pending[~arrived]
        if not len(pending):
            return (got[:, :words] & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        if time.monotonic() > deadline:
            raise WaitExpired(pending)
        polls += 1
        if polls < YIELDS:
            os.sched_yield()
        else:
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)
