"""``soak`` on ranks that are processes, and that its checks find what is wrong."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from vllm_topkx.cli import main, soak, soak_ranks
from vllm_topkx.cli.soak_ranks import Checks, Report


def test_every_merge_is_checked_and_epochs_wrap(capsys: pytest.CaptureFixture) -> None:
    assert main(["soak", "--backend", "cpu", "--merges", "70", "--topk", "128", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    calls = soak_ranks.calls_of_rows(soak_ranks.plan(70))
    assert found["ok"] and found["problems"] == []
    assert (found["merges"], found["rows"]) == (calls[0], calls.sum()) and calls[0] >= 70
    assert found["wrapped_rows"] == (calls >= soak_ranks.BEFORE_WRAP).sum() > 0
    assert found["sampled_rows"] > 0


@pytest.mark.parametrize(
    "arguments, reason",
    [(["--merges", "0"], "--merges 0"), (["--topk", "5000"], "--topk 5000"), (["--ranks", "1"], "world size 1")],
)
def test_what_it_cannot_run_is_one_line(arguments: list[str], reason: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["soak", "--backend", "cpu", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_a_checksum_finds_each_wrong_id_and_minds_no_order() -> None:
    scores, ends = (a[:1, :, :4] for a in soak_ranks.make_scores(2))
    checks = Checks(scores, ends, 16, torch.device("cpu"))
    right = torch.from_numpy(checks.reference[0])
    assert (right[3] >= 0).any()
    for change, wrong_rows in [
        (lambda ids: ids, 0),
        (lambda ids: ids.flip(-1), 0),
        (lambda ids: ids[:, [0, 0, *range(2, 16)]], 4),  # one twice, one left out
        (lambda ids: torch.where(torch.arange(16) == 5, soak_ranks.COLUMNS * 2, ids), 4),  # no id of these rows
        (lambda ids: torch.where(torch.arange(16) == 5, -9, ids), 4),
        (lambda ids: ids[[1, 0, 2, 3]], 2),
    ]:
        checks.wrong.zero_()
        checks.add(change(right)[None], checks.sums[:1])
        assert int(checks.wrong) == wrong_rows


def test_one_call_differs_from_the_next_in_every_row() -> None:
    scores, _ = soak_ranks.make_scores(2)
    for s in range(soak_ranks.SETS):
        assert (scores[s] != scores[(s + 1) % soak_ranks.SETS]).any(axis=(0, 2)).all()


GOOD = Report(wrong_rows=0, sampled_rows=8, wrong_samples=0, order=5, device_bytes=1 << 30, host_bytes=1 << 28)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({}, None),
        ({"wrong_rows": 1}, "rows differ from the stable sort"),
        ({"wrong_samples": 1}, "rows differ from the stable sort"),
        ({"order": 6}, "ranks give ids in different orders"),
        ({"device_bytes": (1 << 30) + (17 << 20)}, "memory on the GPU grew"),
        ({"host_bytes": 1 << 29}, "memory on the host grew"),
    ],
)
def test_the_verdict(change: dict[str, int], problem: str | None) -> None:
    calls = soak_ranks.calls_of_rows(soak_ranks.plan(1000))
    epochs = calls - soak_ranks.calls_before_wrap(calls)
    outcome = soak.Outcome(1000, 1000, "cuda", 2, 512)
    soak._judge(outcome, [[GOOD, GOOD], [GOOD, dataclasses.replace(GOOD, **change)]], [epochs, epochs], calls)
    assert outcome.problems == ([] if problem is None else [problem])
    lost = epochs - (np.arange(soak_ranks.ROWS) == 3)
    soak._judge(outcome, [[GOOD, GOOD]], [epochs, lost], calls)
    assert outcome.problems == ["epochs are not those of the calls"]
