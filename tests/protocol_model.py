"""The exchange protocol of ``docs/protocol.md`` as a small state machine: what its steps do.

The parts of a state are in ``protocol_state.py``; which steps a state allows, and the search of all runs,
in ``protocol_search.py``.

Every rank works through the same calls; a call has some rows. A call *launches*: its stores into every
peer's slot ``[parity, source, row]`` are under way, and each 8-byte half (word, tag) *lands* at a time of
its own. Each row *takes* what a source sent when its tags are those of the epoch it waits for, *selects*
(which ranks are saturated is a free choice, the same on every rank), takes the lists of the saturated
ranks, and *writes back* its epoch and those of the lists. When all rows have, the launch has ended and the
next call launches. The rows of a launch (its thread blocks) interleave freely. Calls count from 1.

A word is (call, source, row), so taking a word of another call shows. A word is *live* from its landing
until its reader has written the row back: to land on a live word is an error even when the reader has
taken it (a kernel may read it twice). Tags count modulo 4. 4 divides 2**32, so tags that are equal modulo
2**32 are equal here, and whatever a real run takes, a run of the model takes; it also is the smallest
number that works, as a test shows, and wraps within a search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from protocol_state import Choice, Form, Half, Move, Rank, Row, State, Store, Violation, Word


def put(items: tuple, index: int, value: object) -> tuple:
    return (*items[:index], value, *items[index + 1 :])


@dataclass(frozen=True)
class Model:
    """A protocol to explore.

    Args:
        world: ranks.
        calls: rows of each call, the same on every rank.
        saturated: sets of ranks that a select may find saturated.
        halves: 2, or 1: the two halves of a pair land together.
        in_turn: one block handles all rows of a rank, one after the other, instead of a block each.
        endless: ``calls`` repeats for ever (call numbers are then counted from the slowest rank's).
        mutant: name of a mistake to make; see the tests.
    """

    world: int
    calls: tuple[tuple[int, ...], ...]
    saturated: tuple[tuple[int, ...], ...] = ((),)
    form: Form = Form.ONE_KERNEL
    modulus: int = 4
    halves: int = 2
    in_turn: bool = False
    endless: bool = False
    reduce: int = 1
    mutant: str = ""
    row_count: int = field(init=False)
    slots: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_count", 1 + max(max(rows) for rows in self.calls))
        object.__setattr__(self, "slots", max(len(ranks) for ranks in self.saturated))

    # Addresses

    def slot_cell(self, tag: int, source: int, row: int) -> int:
        parity = 0 if self.mutant == "one parity" else tag % 2
        return (parity * self.world + source) * self.row_count + row

    def list_cell(self, slot: int, row: int) -> int:
        return (2 * self.world + slot) * self.row_count + row

    def is_list(self, cell: int) -> bool:
        return cell >= 2 * self.world * self.row_count

    def rows_of(self, call: int) -> tuple[int, ...]:
        return self.calls[(call - 1) % len(self.calls)]

    def order(self, me: int, call: int) -> tuple[int, ...]:
        """The order in which one block handles its rows."""
        rows = self.rows_of(call)
        return rows[::-1] if self.mutant in ("other order", "push in turn") and me % 2 else rows

    # State: the start, the end, and one rank's part

    def start(self) -> State:
        zero = (Half(0, None),) * self.halves
        memory = [zero] * ((2 * self.world + self.slots) * self.row_count)
        if self.mutant == "old tags":  # what an outgrown exchange left after two calls
            for tag in (1, 2):
                for source in range(self.world):
                    memory[self.slot_cell(tag, source, 0)] = (Half(tag, None),) * self.halves
        idle, lists = (Row(),) * self.row_count, (0,) * (self.slots * self.row_count)
        rank = Rank(0, 0, idle, (0,) * self.row_count, lists, tuple(memory), frozenset())
        state = State((rank,) * self.world, frozenset())
        for me in range(self.world):
            state = self.launch(state, me)
        return state

    def finished(self, state: State) -> bool:
        return not self.endless and all(rank.merging > len(self.calls) for rank in state.ranks)

    @staticmethod
    def change(state: State, me: int, **fields: object) -> State:
        return state._replace(ranks=put(state.ranks, me, state.ranks[me]._replace(**fields)))

    def set_row(self, state: State, me: int, row: int, value: Row) -> State:
        return self.change(state, me, rows=put(state.ranks[me].rows, row, value))

    # Stores

    def land(self, state: State, me: int, store: Store) -> State:
        target = state.ranks[store.peer]
        cell = target.memory[store.cell]
        if cell[store.half].word is not None:
            raise Violation(f"it overwrites the {cell[store.half].word}, which rank {store.peer} has not finished with")
        word = store.word or Word(state.ranks[me].pushing, me, store.row)
        cell = put(cell, store.half, Half(store.tag, word))
        state = self.change(state, store.peer, memory=put(target.memory, store.cell, cell))
        return self.change(state, me, pending=state.ranks[me].pending - {store})

    def send(
        self, state: State, me: int, cell: int, tag: int, row: int, word: Word | None, part: int | None = None
    ) -> State:
        """Sends both halves, or one of them, to all peers; what goes to this rank itself is there at once."""
        halves = range(self.halves) if part is None else (part,)
        stores = [Store(peer, cell, half, tag, row, word) for peer in range(self.world) for half in halves]
        state = self.change(state, me, pending=state.ranks[me].pending.union(stores))
        for store in stores:
            if store.peer == me:
                state = self.land(state, me, store)
        return state

    def push(self, state: State, me: int, row: int) -> State:
        if self.form is Form.ALL_GATHER:
            return state
        rank = state.ranks[me]
        if self.form is Form.SHARED_PUSH:
            return self.change(state, me, parts=rank.parts | {(row, half) for half in range(self.halves)})
        tag = (rank.pushing if self.mutant == "early push, own count" else rank.epoch[row] + 1) % self.modulus
        word = Word(rank.pushing, me, row) if self.form is Form.PROCESSES else None
        return self.send(state, me, self.slot_cell(tag, me, row), tag, row, word)

    def push_part(self, state: State, me: int, row: int, half: int) -> State:
        rank = state.ranks[me]
        tag = (rank.epoch[row] + 1) % self.modulus
        state = self.change(state, me, parts=rank.parts - {(row, half)})
        return self.send(state, me, self.slot_cell(tag, me, row), tag, row, None, half)

    # Steps of a rank

    def push_all(self, state: State, me: int) -> State:
        call = state.ranks[me].pushing + 1
        state = self.change(state, me, pushing=call)
        order = self.order(me, call) if self.endless or call <= len(self.calls) else ()
        for row in order[:1] if self.mutant == "push in turn" else order:
            state = self.push(state, me, row)
        return state

    def launch(self, state: State, me: int) -> State:
        call = state.ranks[me].merging + 1
        if state.ranks[me].pushing < call:
            state = self.push_all(state, me)
        rows = self.rows_of(call) if self.endless or call <= len(self.calls) else ()
        polling = tuple(Row("poll") if row in rows else Row() for row in range(self.row_count))
        return self.rebase(self.change(state, me, merging=call, rows=polling))

    def take(self, state: State, me: int, cell: int, tag: int, wanted: Word) -> bool:
        """Whether both halves carry the tag; wrong words raise."""
        halves = state.ranks[me].memory[cell]
        untagged = self.mutant == ("list flag" if self.is_list(cell) else "one tag")
        if halves[0].tag != tag or (halves[-1].tag != tag and not untagged):
            return False
        for half in halves:
            if half.word != wanted:
                raise Violation(f"it takes {half.word or 'an old word or a zero'} for the {wanted}")
        return True

    def list_of(self, state: State, me: int, row: int, source: int) -> tuple[int, int, int]:
        """List slot, cell and tag of a saturated rank in this call."""
        rank = state.ranks[me]
        slot = rank.rows[row].saturated.index(source)
        used = rank.epoch[row] if self.mutant == "row tags lists" else rank.list_epoch[slot * self.row_count + row]
        return slot, self.list_cell(slot, row), (used + 1) % self.modulus

    def poll(self, state: State, me: int, row: int, source: int) -> bool:
        rank = state.ranks[me]
        wanted = Word(rank.merging, source, row)
        if rank.rows[row].stage == "lists":
            _, cell, tag = self.list_of(state, me, row, source)
            return self.take(state, me, cell, tag, wanted)
        if self.form is Form.ALL_GATHER:  # it ends on no rank before every rank has begun it
            return state.ranks[source].pushing >= rank.merging
        if self.mutant == "own words at hand" and source == me:
            return True
        tag = (rank.epoch[row] + 1) % self.modulus  # each thread reads the epoch itself
        return self.take(state, me, self.slot_cell(tag, source, row), tag, wanted)

    def select(self, state: State, me: int, row: int) -> Iterator[Move]:
        """One move for each set of saturated ranks, or one for the set that a peer's select has chosen."""
        call = state.ranks[me].merging
        made = next((c for c in state.choices if (c.call, c.row) == (call, row)), None)
        for saturated in [made.saturated] if made else self.saturated:
            choice = made or Choice(call, row, saturated, self.world)
            left = choice._replace(ranks_left=choice.ranks_left - 1)
            choices = state.choices - {choice} | ({left} if left.ranks_left else set())
            stage = "lists" if saturated else "read"
            at = state.ranks[me].rows[row]._replace(stage=stage, taken=0, saturated=saturated)
            after = self.set_row(state._replace(choices=choices), me, row, at)
            if me in saturated:
                _, cell, tag = self.list_of(after, me, row, me)
                after = self.send(after, me, cell, tag, row, Word(call, me, row))
            yield f"rank {me}, row {row}: selects call {call}, saturated {saturated or 'none'}", after

    def write_back(self, state: State, me: int, row: int) -> State:
        """Advances the row's epoch and those of its lists; from now on its words may be overwritten."""
        rank = state.ranks[me]
        tag = (rank.epoch[row] + (not rank.rows[row].written)) % self.modulus
        lists, cells = rank.list_epoch, [self.slot_cell(tag, source, row) for source in range(self.world)]
        for source in rank.rows[row].saturated:
            slot, cell, _ = self.list_of(state, me, row, source)
            at = slot * self.row_count + row
            lists = put(lists, at, (lists[at] + 1) % self.modulus)
            cells.append(cell)
        memory = list(rank.memory)
        for cell in cells:
            memory[cell] = tuple(half._replace(word=None) for half in memory[cell])
        return self.change(
            self.set_row(state, me, row, Row()),
            me,
            epoch=put(rank.epoch, row, tag),
            list_epoch=lists,
            memory=tuple(memory),
        )

    def give_up(self, state: State) -> State:
        """A call that ends half way and leaves the epochs as they were, and the next one."""
        memory = tuple(tuple(half._replace(word=None) for half in cell) for cell in state.ranks[0].memory)
        return self.launch(self.change(state, 0, memory=memory), 0)

    def rebase(self, state: State) -> State:
        """Endless runs: numbers the calls from the slowest rank's, so that there are finitely many states."""
        back = (min(rank.merging for rank in state.ranks) - 1) // len(self.calls) * len(self.calls)
        if not self.endless or back <= 0:
            return state

        def moved(word: Word | None) -> Word | None:
            return word and word._replace(call=word.call - back)

        ranks = tuple(
            rank._replace(
                pushing=rank.pushing - back,
                merging=rank.merging - back,
                memory=tuple(tuple(half._replace(word=moved(half.word)) for half in cell) for cell in rank.memory),
                pending=frozenset(store._replace(word=moved(store.word)) for store in rank.pending),
            )
            for rank in state.ranks
        )
        return State(ranks, frozenset(c._replace(call=c.call - back) for c in state.choices))
