"""Shadow mode: which kind a differing row is of, what is counted and told, and that no value is read on the host."""

from __future__ import annotations

import logging
import multiprocessing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from vllm_topkx.plugin.shadow import Counts, Shadow
from vllm_topkx.plugin.shadow_rows import KINDS, Rows

W, K, L, INTERLEAVE = 2, 4, 8, 2
NAN = float("nan")


@dataclass(frozen=True)
class Row:
    """One row of a merge on two ranks; global position g has the score 100 - g unless ``scores`` says other."""

    theirs: tuple[int, ...]
    ours: tuple[int, ...] = (0, 1, 2, 3)
    scores: tuple[tuple[int, float], ...] = ()
    local_ids: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 1, 2, 3), (0, 1, 2, 3))
    starts: tuple[int, int] | None = None
    columns: int = L

    def on_ranks(self) -> list[Rows]:
        changed = dict(self.scores)
        made = []
        for rank in range(W):
            start = self.starts[rank] if self.starts else 0
            logits = torch.full((1, self.columns), 1e9)
            for j in range(self.columns - start):
                g = j // INTERLEAVE * W * INTERLEAVE + rank * INTERLEAVE + j % INTERLEAVE
                logits[0, start + j] = changed.get(g, 100.0 - g)
            made.append(
                Rows(
                    logits, ids(self.local_ids[rank]), torch.tensor([start]) if self.starts else None,
                    ids(self.ours), ids(self.theirs), rank, W, INTERLEAVE,
                )
            )  # fmt: skip
        return made


def ids(values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.int32)


def gathered(ranks: list[Rows]) -> torch.Tensor:
    return torch.cat([rows.report() for rows in ranks], dim=1)


def kind_of(ranks: list[Rows]) -> str | None:
    """The kind of the first row, on which both ranks agree."""
    everything = gathered(ranks)
    found = {tuple(rows.kinds(everything)[0].tolist()) for rows in ranks}
    assert len(found) == 1
    names = [name for name, is_it in zip(KINDS, found.pop(), strict=True) if is_it]
    assert len(names) <= 1
    return names[0] if names else None


NAN_SCORES = Row((2, 0, 1, 3), (0, 1, 3, 4), ((2, NAN),))
REPEATED = Row((0, 0, 1, 2), local_ids=((0, 0, 1, 2), (0, 1, -1, -1)))
PAST = Row((0, 1, 2, 19), local_ids=((0, 1, 2, 3), (0, 1, 2, 9)))
TIE = Row((0, 1, 2, 4), scores=((3, 97.5), (4, 97.5)))
UNEXPLAINED = Row((0, 1, 2, 6))


@pytest.mark.parametrize(
    "row, kind",
    [
        (Row((3, 1, 0, 2)), None),
        (Row((-1, 1, 0, -1), (1, 0, -1, -1)), None),
        (NAN_SCORES, "NaN scores"),
        (replace(NAN_SCORES, scores=((2, -NAN),)), "NaN scores"),
        # No NaN: that of the column that a -1 would read is nobody's score.
        (replace(TIE, scores=((0, NAN), *TIE.scores), local_ids=((-1, 1, 2, 3), (0, 1, 2, 3))), "equal scores"),
        (REPEATED, "repeated ids"),
        (PAST, "ids past the logits"),
        (replace(PAST, starts=(0, 5), local_ids=((0, 1, 2, 3), (0, 1, 2, 3))), "ids past the logits"),
        (TIE, "equal scores"),
        (replace(TIE, starts=(4, 2), columns=L + 4), "equal scores"),
        (replace(TIE, scores=((3, 0.0), (4, -0.0))), "unexplained"),
        # An id that is missing has no score, and neither has one of 0.0 the same.
        (Row((0, 1, 2, -1), scores=((3, 0.0),)), "unexplained"),
        (UNEXPLAINED, "unexplained"),
    ],
)
def test_kinds_of_rows(row: Row, kind: str | None) -> None:
    assert kind_of(row.on_ranks()) == kind


def test_positions_past_what_a_float_holds() -> None:
    j = 1 << 23
    ranks = [
        Rows(
            torch.zeros(1, 1).expand(1, j + 8), ids((j, -1, -1, -1)), None,
            ids((2 * j + 1, -1, -1, -1)), ids((2 * j, -1, -1, -1)), rank, W, 1,
        )
        for rank in range(W)
    ]  # fmt: skip
    assert kind_of(ranks) == "ids past 2^24"


def test_a_rank_without_columns() -> None:
    ranks = Row((0, 1, -1, -1), (0, 1, 4, 5)).on_ranks()
    ranks[1] = replace(ranks[1], logits=torch.empty(1, 0), local_ids=ids((-1,) * K))
    assert kind_of(ranks) == "unexplained"
    assert ranks[1].report()[0, -3:].tolist() == [0, 0, 0]


def stacked(rows: list[Row]) -> list[Rows]:
    """One merge of all ``rows`` on each rank."""
    by_rank = zip(*(row.on_ranks() for row in rows), strict=True)
    return [
        replace(parts[0], **{name: torch.cat([getattr(part, name) for part in parts]) for name in FIELDS})
        for parts in by_rank
    ]


FIELDS = ("logits", "local_ids", "ours", "theirs")


def shadowed(*merges: list[Row], rank: int = 0) -> Shadow:
    """The shadow of ``rank`` after ``merges``."""
    pending = [stacked(rows) for rows in merges]
    reports = [gathered(ranks) for ranks in pending]
    shadow = Shadow(torch.device("cpu"), K, rank, lambda report, dim: reports.pop(0))
    for ranks in pending:
        shadow.compare(ranks[rank])
    return shadow


SAME = Row((3, 2, 1, 0))


def test_counts_by_kind_and_the_merges_that_differ() -> None:
    shadow = shadowed([SAME, SAME], [TIE, NAN_SCORES, SAME, NAN_SCORES], [SAME], [NAN_SCORES], [SAME])
    assert shadow.counts() == Counts(5, 9, 2, 4, (3, 0, 0, 0, 1, 0))


def test_a_merge_without_rows_is_counted_and_gathers_nothing() -> None:
    shadow = Shadow(torch.device("cpu"), K, 0, None)
    rows = stacked([SAME])[0]
    shadow.compare(replace(rows, **{name: getattr(rows, name)[:0] for name in FIELDS}))
    assert shadow.counts() == Counts(1, 0, 0, 0, (0,) * len(KINDS))


def test_the_report_names_kinds_and_a_file_with_the_first_row_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rank = 1
    later = replace(UNEXPLAINED, theirs=(0, 1, 2, 7))
    shadow = shadowed([SAME], [SAME, UNEXPLAINED, NAN_SCORES], [later], rank=rank)
    with caplog.at_level(logging.INFO, "vllm.topkx"):
        shadow.report()
        shadow.report()
        shadow.report(last=True)
    (path,) = tmp_path.iterdir()
    text = (
        "5 rows, 3 of them with other ids than vLLM's: NaN scores 1, unexplained 2; first in merge 2, last in merge 3; "
        f"the first row of each kind is in {path}"
    )
    assert [record.getMessage() for record in caplog.records] == [
        f"vllm-topkx shadow, so far: 3 merges, {text}",
        f"vllm-topkx shadow, at exit: 3 merges, {text}",
    ]
    found = np.load(path)
    assert found["kind"].tolist() == ["NaN scores", "unexplained"]
    assert found["merge"].tolist() == [2, 2] and found["row"].tolist() == [2, 1]
    assert found["ours"].tolist() == [list(NAN_SCORES.ours), list(UNEXPLAINED.ours)]
    assert found["theirs"].tolist() == [list(NAN_SCORES.theirs), list(UNEXPLAINED.theirs)]
    assert found["local_ids"].tolist() == [[0, 1, 2, 3]] * 2
    np.testing.assert_array_equal(found["scores"], np.float32([[NAN, 97, 94, 93], [98, 97, 94, 93]]))
    assert found["rank"] == rank and found["start"].tolist() == [0, 0]


def test_no_value_is_read_on_the_host() -> None:
    rows = stacked([TIE, NAN_SCORES])[0]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shadow = Shadow(torch.device("cpu"), K, 0, lambda report, dim: report.repeat(1, W))
        fake = {name: mode.from_tensor(getattr(rows, name)) for name in FIELDS}
        shadow.compare(replace(rows, **fake, starts=torch.zeros(2, dtype=torch.int64)))
        with pytest.raises(DataDependentOutputException):  # what the mode would have said
            fake["ours"].sum().item()


def count_and_end(log: str) -> None:
    logging.basicConfig(filename=log, level=logging.INFO)
    rows = stacked([SAME, SAME])[0]
    Shadow.started(torch.device("cpu"), K, 0, W, lambda report, dim: report.repeat(1, W)).compare(rows)


def test_the_last_report_is_made_when_a_process_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    worker = multiprocessing.get_context("forkserver").Process(target=count_and_end, args=(str(log),))
    worker.start()
    worker.join()
    assert log.read_text().count("at exit: 1 merges, 2 rows, 0 of them with other ids than vLLM's") == 1
