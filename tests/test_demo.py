"""The demo: one run as users start it, and that its check would find a wrong row."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

from vllm_topkx.cli import demo_model as model
from vllm_topkx.cli import main
from vllm_topkx.cli.demo import Answer, exact_rows

RANKS = 2
COMMAND = [sys.executable, "-c", "import sys; from vllm_topkx.cli import main; sys.exit(main())", "demo"]


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_demo_rewrites_the_chain_and_every_row_is_exact() -> None:
    run = subprocess.run([*COMMAND, "--ranks", "2", "--steps", "10"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    before, after = run.stdout.split("\nafter it")
    assert "- gathered: " in before and "vllm.all_gather(" in before
    after, table = after.split("decode steps against the dense reference")
    assert "topkx.exchange_merge(" in after and "all_gather" not in after
    found = {cells[0]: cells[1:] for line in table.splitlines() if len(cells := _cells(line)) == 7}
    for kind in model.KINDS:
        steps, rows, exact, rescued, fallbacks, _ = found[kind]
        assert (steps, exact, fallbacks) == ("2", rows, "0")
        assert rescued == (rows if kind == model.SKEWED else "0")
    assert run.stdout.splitlines()[-1].startswith("OK: ")
    # Progress, and nothing of what vLLM and torch log.
    assert all(line.startswith(("importing", "compiling", "decode steps")) for line in run.stderr.splitlines()), (
        run.stderr
    )


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip(" │").split("│")]


@pytest.mark.parametrize(
    ("arguments", "compiler", "vllm", "reason"),
    [
        (["--ranks", "1"], "true", True, "--ranks 1: must be 2..16"),
        (["--steps", "0"], "true", True, "--steps 0: must be 1 or more"),
        ([], "true", False, "vLLM is not installed: pip install 'vllm-topkx[vllm]'"),
        ([], "no-such-compiler", True, "Inductor needs a C++ compiler, and there is no no-such-compiler"),
    ],
)
def test_what_it_cannot_run_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    arguments: list[str],
    compiler: str,
    vllm: bool,
    reason: str,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: vllm or None)
    assert main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith(f"vllm-topkx demo: {reason}")


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_plugin_that_is_off_is_a_no() -> None:
    run = subprocess.run(COMMAND, env={**os.environ, "VLLM_TOPKX": "0"}, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (1, "NOT REWRITTEN: VLLM_TOPKX=0 turns it off\n", "")


def right_answers(step: model.Step) -> list[Answer]:
    ids = model.reference(step)
    answers = []
    for rank in range(RANKS):
        own = list(model.kv_rows(ids, step, rank, RANKS))
        rows = np.full_like(ids, -1)
        for row, places in zip(rows, own, strict=True):
            row[: len(places)] = places
        valid = np.array([len(places) for places in own], dtype=np.int32)
        answers.append(Answer(ids.copy(), rows, valid, seconds=0.0, rescued=0, exchanged=True))
    return answers


@pytest.mark.parametrize("number", range(len(model.KINDS)))
def test_the_check_finds_each_wrong_row(number: int) -> None:
    step = model.make_step(number, RANKS)
    answers = right_answers(step)
    assert exact_rows(answers, step).all()
    wrong = {field: getattr(answers[1], field).copy() for field in ("ids", "rows", "valid")}
    wrong["ids"][0, 0] = np.setdiff1d(np.arange(RANKS * model.POSITIONS), wrong["ids"][0])[0]
    wrong["rows"][0, 0] = model.REQUESTS * model.BLOCKS * model.BLOCK_SIZE
    wrong["valid"][0] += 1
    for field, value in wrong.items():
        found = exact_rows([answers[0], dataclasses.replace(answers[1], **{field: value})], step)
        assert not found[0], field
        assert found[1:].all()


def test_steps_are_what_their_kind_says() -> None:
    for number in range(2 * len(model.KINDS)):
        step = model.make_step(number, 4)
        ids, scores = model.reference(step), model.dense_scores(step)
        assert np.abs(scores).max() < 2**24  # whole numbers that float32 holds
        if step.kind == model.SKEWED:
            owners = ids // model.INTERLEAVE % 4
            assert (owners == owners[:, :1]).all()
        elif step.kind == model.TIES:
            threshold = np.take_along_axis(scores, ids[:, -1:], axis=1)
            assert ((scores == threshold) & (np.arange(scores.shape[1]) < step.lengths[:, None])).sum(1).min() > 1
        elif step.kind == model.SHORT:
            assert (ids == -1).any()
