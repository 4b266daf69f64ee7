"""What a state of the protocol model consists of; see ``protocol_model.py``."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Form(Enum):
    """How a call is launched, that is, what has to be over before what."""

    ONE_KERNEL = "push and merge in one kernel: it ends when its rows are written back and its stores landed"
    SHARED_PUSH = "as one kernel, but a row is pushed by several blocks, each of which reads the epoch for itself"
    TWO_KERNELS = "a push kernel and a merge kernel under programmatic launch: the write-back waits for the push"
    ALL_GATHER = "NCCL form: an all-gather in place of round 1, then the rescue"
    PROCESSES = "one thread a rank: as one kernel, but a call may return before its stores have landed"


class Word(NamedTuple):
    call: int
    source: int
    row: int

    def __str__(self) -> str:
        return f"word of call {self.call}, rank {self.source}, row {self.row}"


class Half(NamedTuple):
    """8 bytes of a slot or list. ``word`` is None when it is zero or its reader is done with it."""

    tag: int
    word: Word | None


class Store(NamedTuple):
    """A half on its way. A push reads its word when it stores it (``word`` None), a list is in registers."""

    peer: int
    cell: int
    half: int
    tag: int
    row: int
    word: Word | None


class Row(NamedTuple):
    """Where a row of the running merge is: ``poll`` -> ``lists`` (if any) -> ``read`` -> ``done``."""

    stage: str = "done"
    taken: int = 0  # bit s: what source s sent was taken
    saturated: tuple[int, ...] = ()
    written: bool = False  # the epoch was written back (before its time: a mutant)


class Rank(NamedTuple):
    pushing: int  # the call whose words are in the buffer that the push reads
    merging: int
    rows: tuple[Row, ...]
    epoch: tuple[int, ...]  # by row
    list_epoch: tuple[int, ...]  # by slot * rows + row
    memory: tuple[tuple[Half, ...], ...]  # slots, then lists: see Model.slot_cell and Model.list_cell
    pending: frozenset[Store]
    parts: frozenset[tuple[int, int]] = frozenset()  # rows and halves that a block of a shared push has yet to send


class Choice(NamedTuple):
    """Who is saturated in a row of a call, until all ranks have selected it."""

    call: int
    row: int
    saturated: tuple[int, ...]
    ranks_left: int


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    choices: frozenset[Choice]


class Violation(Exception):
    """What must never happen, happened."""


#: The name of a step and what it leads to.
Move = tuple[str, "State | Violation"]
