"""Which steps a state of the protocol model allows, and a search of all its runs.

Which orders of steps are searched, by ``Model.reduce``:

0. All.
1. Steps that no other rank can see (take, select, launch: a slow one looks to the others like stores that
   land late) are done at once, one at a time. They commute with every step of other ranks, and the rule
   about live words does not ask when they were done, so all that is lost is the order of steps that
   commute. For the same reason a store to the rank's own slot lands at once, at every ``reduce``.
2. So do stores. One that lands early finds a live word whenever a late one does, and a late one only keeps
   its reader from steps that may be late anyway: its write-back. Hence the orders of write-backs are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from protocol_model import Model, put
from protocol_state import Form, Move, Rank, State, Store, Violation, Word


def moves(model: Model, state: State) -> list[Move]:
    """The steps to explore from ``state``; one step's alternatives if no other rank can see that step."""
    unseen = (step for me in range(model.world) for step in unseen_steps(model, state, me))
    if model.reduce and (first := next(unseen, None)) is not None:
        return first
    for me in range(model.world if model.reduce == 2 else 0):
        for store in sorted(state.ranks[me].pending)[:1]:
            return [landing(model, state, me, store)]
    seen = [move for me in range(model.world) for move in seen_moves(model, state, me)]
    return seen + [move for step in unseen for move in step]


def unseen_steps(model: Model, state: State, me: int) -> Iterator[list[Move]]:
    """Steps of a rank that no other rank can see, as lists of alternatives."""
    rank = state.ranks[me]
    for row, (stage, taken, saturated, _) in enumerate(rank.rows):
        if stage not in ("poll", "lists") or not has_turn(model, rank, me, row):
            continue
        sources = range(model.world) if stage == "poll" else saturated
        missing = [source for source in sources if not taken >> source & 1]
        if not missing:
            after = model.set_row(state, me, row, rank.rows[row]._replace(stage="read"))
            again = [(f"rank {me}, row {row}: selects again", after)]
            yield list(model.select(state, me, row)) if stage == "poll" else again
        for source in missing:
            what = f"rank {me}, row {row}: takes the {'words' if stage == 'poll' else 'list'} of rank {source}"
            try:
                if model.poll(state, me, row, source):
                    taking = rank.rows[row]._replace(taken=taken | 1 << source)
                    yield [(what, model.set_row(state, me, row, taking))]
            except Violation as violation:
                yield [(what, violation)]
    if has_ended(model, rank) and launches_unseen(model, rank):
        yield [attempt(f"rank {me}: launches call {rank.merging + 1}", model.launch, state, me)]


def launches_unseen(model: Model, rank: Rank) -> bool:
    """A launch shows when it changes the words of stores that are under way, or lets an all-gather end."""
    return model.form is Form.PROCESSES or (not rank.pending and model.form is not Form.ALL_GATHER)


def has_turn(model: Model, rank: Rank, me: int, row: int) -> bool:
    if not model.in_turn:
        return True
    return row == next(r for r in model.order(me, rank.merging) if rank.rows[r].stage != "done")


def has_ended(model: Model, rank: Rank) -> bool:
    """Whether the merge of the running call is over, as what follows on the stream sees it."""
    landed = model.form is Form.PROCESSES or not any(
        model.is_list(store.cell) or model.form is not Form.TWO_KERNELS for store in rank.pending
    )
    running = model.endless or rank.merging <= len(model.calls)
    return running and landed and not rank.parts and all(row.stage == "done" for row in rank.rows)


def landing(model: Model, state: State, me: int, store: Store) -> Move:
    word = store.word or Word(state.ranks[me].pushing, me, store.row)
    what = f"{'list' if model.is_list(store.cell) else 'push'}, {word}"
    name = f"rank {me}: half {store.half} (tag {store.tag}) of its {what}, lands at rank {store.peer}"
    return attempt(name, model.land, state, me, store)


def seen_moves(model: Model, state: State, me: int) -> Iterator[Move]:
    rank = state.ranks[me]
    for store in sorted(rank.pending):
        yield landing(model, state, me, store)
    for row, half in sorted(rank.parts):
        yield attempt(f"rank {me}: a block sends half {half} of row {row}", model.push_part, state, me, row, half)
    push_ended = all(model.is_list(store.cell) for store in rank.pending)
    may_write = push_ended or model.form is not Form.TWO_KERNELS or model.mutant == "no wait"
    for row, at in enumerate(rank.rows):
        name = f"rank {me}, row {row}: writes its epoch back, call {rank.merging}"
        if at.stage == "read" and may_write:
            after = model.write_back(state, me, row)
            if model.mutant == "push in turn" and row != model.order(me, rank.merging)[-1]:
                order = model.order(me, rank.merging)
                after = model.push(after, me, order[order.index(row) + 1])
            early = model.form is Form.TWO_KERNELS and not push_ended
            yield name + (" BEFORE its push has ended" if early else ""), after
        if model.mutant == "early epoch" and at.stage == "poll" and not at.written:
            epochs = put(rank.epoch, row, (rank.epoch[row] + 1) % model.modulus)
            after = model.set_row(state, me, row, at._replace(written=True))
            yield name + " BEFORE all words were read", model.change(after, me, epoch=epochs)
    if has_ended(model, rank) and not launches_unseen(model, rank):
        yield attempt(f"rank {me}: launches call {rank.merging + 1}", model.launch, state, me)
    behind = push_ended and rank.pushing == rank.merging and not has_ended(model, rank)
    if behind and model.mutant.startswith("early push"):
        call = rank.merging
        name = f"rank {me}: begins round 1 of call {call + 1} BEFORE its merge of call {call} ended"
        yield attempt(name, model.push_all, state, me)
    if model.mutant == "call again" and me == 0 and rank.merging == 1:
        yield attempt("rank 0: call 1 raises AFTER its push; call 2 launches", model.give_up, state)


def attempt(name: str, step: Callable[..., State], state: State, *args) -> Move:
    try:
        return name, step(state, *args)
    except Violation as violation:
        return name, violation


@dataclass(frozen=True)
class Result:
    """What a search found. ``trace`` leads to ``violation`` on a shortest way, from all ranks in call 1."""

    states: int
    violation: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = [f"{number:3}. {step}" for number, step in enumerate(self.trace, 1)]
        return "\n".join([*steps, f"==> {self.violation or 'no violation'} ({self.states} states)"])


def explore(model: Model) -> Result:
    """Breadth first through every state that ``model`` can reach, up to the first violation.

    Every run ends: each step adds to ``progress``, and there are finitely many states. (In an endless model
    the calls are counted anew, so it is not asked there.)
    """
    start = model.start()
    parent: dict[State, State | None] = {start: None}
    level = [start]

    def trace(state: State, last: str | None) -> tuple[str, ...]:
        steps = [] if last is None else [last]
        while (before := parent[state]) is not None:
            steps.append(next(name for name, after in moves(model, before) if after == state))
            state = before
        return tuple(reversed(steps))

    while level:
        following = []
        for state in level:
            steps, so_far = moves(model, state), progress(state)
            if not steps and not model.finished(state):
                return Result(len(parent), f"no progress: {waits(state)}", trace(state, None))
            for name, after in steps:
                if isinstance(after, Violation):
                    return Result(len(parent), str(after), trace(state, name))
                if after not in parent:
                    parent[after] = state
                    following.append(after)
                if not model.endless and progress(after) <= so_far:
                    return Result(len(parent), "a run may come back to a state", trace(state, name))
        level = following
    return Result(len(parent))


def progress(state: State) -> int:
    """A number that every step raises."""
    stages = {"poll": 0, "lists": 100, "read": 200, "done": 300}
    total = 0
    for rank in state.ranks:
        total += 10000 * rank.merging + 1000 * rank.pushing - len(rank.pending) - 10 * len(rank.parts)
        for stage, taken, _, written in rank.rows:
            total += stages[stage] + taken + written
    return total


def waits(state: State) -> str:
    rows = [
        f"rank {me} waits in call {rank.merging} for the {'words' if at.stage == 'poll' else 'lists'} of row {row}"
        for me, rank in enumerate(state.ranks)
        for row, at in enumerate(rank.rows)
        if at.stage in ("poll", "lists")
    ]
    return "; ".join(rows) or "every rank has ended"
