"""``vllm-topkx soak``: one rank's merges, and how each is checked against a stable sort."""

from __future__ import annotations

import functools
import resource
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..ops.exchange import reserve
from ..ops.reference import reference_topk, same_sets
from ..ranks import RankContext

Tensor = torch.Tensor

COLUMNS = 2048  # scores a row and rank
#: Different inputs; calls take turns. A prime, so that graphs of any length do not begin with the same ones again.
SETS = 7
SEED = 20
#: Rows of a call, calls back to back, and whether they are one CUDA graph (on a GPU).
PLAYS = ((1, 61, True), (4, 61, True), (32, 61, True), (64, 3, True), (8, 1, True), (48, 1, False), (5, 2, False))
ROWS = max(rows for rows, _, _ in PLAYS)
LONGEST = max(calls for _, calls, _ in PLAYS)
#: Calls of each row, at least, before its epoch wraps: nothing in the slots then is of a call after the wrap.
BEFORE_WRAP = 4
SAMPLED_CALLS = 4


def plan(merges: int) -> list[int]:
    """Plays (places in ``PLAYS``) in random order that make ``merges`` calls or a few more."""
    random, plays, calls = np.random.default_rng(SEED), [], 0
    while calls < merges:
        plays.append(int(random.integers(len(PLAYS))))
        calls += PLAYS[plays[-1]][1]
    return plays


def calls_of_rows(plays: Sequence[int]) -> np.ndarray:
    """int64 ``[ROWS]``: calls that each row takes part in."""
    counts = np.zeros(ROWS, dtype=np.int64)
    for play in plays:
        rows, calls, _ = PLAYS[play]
        counts[:rows] += calls
    return counts


def calls_before_wrap(calls: np.ndarray) -> np.ndarray:
    """Of ``calls`` a row, those before its epoch goes through 2**32."""
    return np.maximum(BEFORE_WRAP, calls // 2)


def make_scores(world_size: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 ``[SETS, W, ROWS, COLUMNS]`` and row ends ``[SETS, W, ROWS]``; the same on all ranks.

    Four kinds of rows: random; few values, so that ties decide; one rank holds all that belong, so that it is
    rescued; NaN among them and ends that leave fewer than K candidates in many.
    """
    random = np.random.default_rng(SEED)
    scores = random.standard_normal((SETS, world_size, ROWS, COLUMNS), dtype=np.float32)
    ends = np.full((SETS, world_size, ROWS), COLUMNS, dtype=np.int32)
    for s in range(SETS):
        for t in range(ROWS):
            row = scores[s, :, t]
            match (s + t) % 4:
                case 1:
                    row[:] = row.round()
                case 2:
                    row[(s + t) // 4 % world_size] += 50
                case 3:
                    row[random.random(row.shape) < 0.1] = np.nan
                    ends[s, :, t] = random.integers(0, COLUMNS // 4, world_size)
    return scores, ends


@dataclass(frozen=True)
class Report:
    """What a rank found since the last report.

    Attributes:
        wrong_rows: rows whose ids are not the reference's, by their checksums.
        sampled_rows, wrong_samples: rows that were compared id by id, and those that differ.
        order: a checksum of all ids at their places so far; the same on all ranks.
        device_bytes, host_bytes: memory in use.
    """

    wrong_rows: int
    sampled_rows: int
    wrong_samples: int
    order: int
    device_bytes: int
    host_bytes: int


class Checks:
    """The reference of every set, and a device's running verdict.

    A set of ids is known by the sum of a random 64-bit number each (modulo 2**64): it does not depend on their
    order, a repeated id does not cancel, and sets that differ agree once in 2**64. The numbers are numpy's and
    the sums are torch's, so that they share nothing with what is checked.
    """

    def __init__(self, scores: np.ndarray, ends: np.ndarray, topk: int, device: torch.device) -> None:
        pairs = zip(scores, ends, strict=True)
        self.reference = np.stack([reference_topk(s, e, topk, 1) for s, e in pairs])
        random, info = np.random.default_rng(SEED + 1), np.iinfo(np.int64)
        self._most = scores.shape[1] * COLUMNS
        # By id + 1: -1 has a number, too, and what is no id of these rows has the last.
        numbers = random.integers(info.min, info.max, self._most + 2)
        weights = random.integers(info.min, info.max, topk)
        self.sums = torch.from_numpy(numbers[self.reference + 1].sum(axis=-1)).to(device)
        self._numbers, self._weights = torch.from_numpy(numbers).to(device), torch.from_numpy(weights).to(device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.order = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, ids: Tensor, sums: Tensor) -> None:
        """``ids [calls, rows, K]`` of calls whose reference has ``sums [calls, rows]``."""
        numbers = self._numbers[ids.long().clamp(-1, self._most) + 1]
        self.wrong += (numbers.sum(dim=-1) != sums).sum()
        self.order += (numbers * self._weights).sum()


class Play:
    """Back-to-back calls over the same rows, on inputs that are changed in place."""

    def __init__(self, soak: Soak, rows: int, calls: int, graphed: bool) -> None:
        device = soak.context.device
        self._soak, self.rows, self.calls = soak, rows, calls
        self._logits = torch.zeros(calls, rows, COLUMNS, device=device)
        self._ends = torch.zeros(calls, rows, dtype=torch.int32, device=device)
        self._sums = torch.zeros(calls, rows, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if graphed and device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self.ids = self._merge()

    def run(self, call: int) -> None:
        """The calls from number ``call`` on."""
        which = slice(call % SETS, call % SETS + self.calls)
        self._logits.copy_(self._soak.logits[which, : self.rows])
        self._ends.copy_(self._soak.ends[which, : self.rows])
        self._sums.copy_(self._soak.sums[which, : self.rows])
        if self._graph is None:
            self.ids = self._merge()
        else:
            self._graph.replay()

    def _merge(self) -> Tensor:
        ids = torch.stack([self._soak.merge(x, e) for x, e in zip(self._logits, self._ends, strict=True)])
        self._soak.checks.add(ids, self._sums)
        return ids


class Soak:
    """One rank's exchange, its graphs, and what they are checked with."""

    def __init__(self, context: RankContext, topk: int) -> None:
        self.context, self.topk = context, topk
        self.exchange = reserve(context.group, ROWS, topk, device=context.device)
        scores, ends = make_scores(context.world_size)
        self.checks = Checks(scores, ends, topk, context.device)
        turns = torch.arange(SETS + LONGEST) % SETS
        self.logits = torch.from_numpy(scores[:, context.rank])[turns].to(context.device)
        self.ends = torch.from_numpy(ends[:, context.rank])[turns].to(context.device)
        self.sums = self.checks.sums[turns.to(context.device)]
        self.merge(self.logits[0], self.ends[0])  # compiles
        self.synchronize()
        self.plays = [Play(self, *play) for play in PLAYS]
        if context.device.type == "cuda":
            for play in self.plays:  # a graph takes memory at its first replay
                play.run(0)
            self.synchronize()
        self.call = 0

    def merge(self, logits: Tensor, ends: Tensor) -> Tensor:
        """ids ``[rows, K]``."""
        n, size = self.exchange.settings.local_topk, self.context.world_size
        words = torch.ops.topkx.local_topk_words(logits, ends, n)
        return torch.ops.topkx.exchange_merge(words, logits, ends, self.context.group_name, size, self.topk, n, 1)[2]

    def synchronize(self) -> None:
        if self.context.device.type == "cuda":
            self.exchange.synchronize()

    def begin(self, calls: np.ndarray) -> None:
        """Sets the epochs so that each row's goes through 2**32 half-way through its ``calls``."""
        epochs = torch.from_numpy(-calls_before_wrap(calls)).to(torch.int32)
        lists = torch.from_numpy(-calls_before_wrap(calls // SETS)).to(torch.int32)  # one call in so many is rescued
        self.exchange.epoch.copy_(epochs)
        self.exchange.list_epoch.copy_(lists)
        self.synchronize()

    def run(self, plays: Sequence[int]) -> Report:
        for play in plays:
            self.plays[play].run(self.call)
            first, self.call = self.call, self.call + self.plays[play].calls
        self.synchronize()
        sample, reference = self.plays[plays[-1]], self.checks.reference
        ids = sample.ids[:SAMPLED_CALLS].cpu().numpy()
        same = [same_sets(ids[i], reference[(first + i) % SETS, : sample.rows]) for i in range(len(ids))]
        report = Report(
            wrong_rows=int(self.checks.wrong),
            sampled_rows=len(ids) * sample.rows,
            wrong_samples=int(np.sum(~np.stack(same))),
            order=int(self.checks.order),
            device_bytes=self._device_bytes(),
            host_bytes=_host_bytes(),
        )
        self.checks.wrong.zero_()
        return report

    def _device_bytes(self) -> int:
        if self.context.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.context.device)
        return total - free


def _host_bytes() -> int:
    """Resident memory of this process that no other shares."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * resource.getpagesize()


# what the pool calls


@functools.cache
def _soak(context: RankContext, topk: int) -> Soak:
    return Soak(context, topk)


def build(context: RankContext, topk: int) -> None:
    """Reserves, compiles, captures. Collective, as all of these."""
    _soak(context, topk)


def begin(context: RankContext, topk: int, calls: np.ndarray) -> None:
    """Between :func:`build` and the first :func:`run`, while no rank merges."""
    _soak(context, topk).begin(calls)


def run(context: RankContext, topk: int, plays: Sequence[int]) -> Report:
    return _soak(context, topk).run(plays)


def epochs(context: RankContext, topk: int) -> np.ndarray:
    """int32 ``[ROWS]`` at the end."""
    return _soak(context, topk).exchange.epoch.cpu().numpy()
