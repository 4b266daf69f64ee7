"""The fuzz command: the same seed is the same work, a failure is made small, and ``verify`` replays it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from properties import merge_in_one_process

from vllm_topkx.cli import fuzz, main, verify
from vllm_topkx.cli.dump import Dump, load_dump
from vllm_topkx.cli.fuzz import GPU_SHAPES, Merge, configuration
from vllm_topkx.cli.fuzz_case import Limits, Shape, choose_dump
from vllm_topkx.cli.fuzz_shrink import shrink, with_columns, with_rows
from vllm_topkx.cli.fuzz_sort import sort_on_device
from vllm_topkx.cli.merge_dump import MergedDump
from vllm_topkx.cli.verify import compare, sort_dump
from vllm_topkx.ops.layouts import exchange_bytes


def test_a_seed_and_a_number_are_one_configuration() -> None:
    for number in range(5):
        first, again, other = configuration(1, number), configuration(1, number), configuration(2, number)
        for name, value in vars(first).items():
            np.testing.assert_array_equal(getattr(again, name), value)
        assert first.logits.tobytes() != other.logits.tobytes()


def test_configurations_reach_every_corner() -> None:
    seen: Counter[str] = Counter()
    for number in range(120):
        dump = configuration(0, number)
        scores = dump.scores(slice(None))
        seen.update(
            {
                f"world size {dump.world_size}": 1,
                dump.layout.name: 1,
                "N = K": dump.local_topk == dump.topk,
                "N = 1 < K": dump.local_topk == 1 < dump.topk,
                "KV rows": dump.block_size > 0,
                "local top-Ks": dump.lists,
                "wraps": dump.epoch + len(dump.calls) >= 2**32,
                "NaN": bool(np.isnan(scores).any()),
                "infinite": bool(np.isinf(scores).any()),
                "-0.0": bool(((scores == 0) & np.signbit(scores)).any()),
                "empty shard": bool((dump.row_ends == 0).any()),
                "more than bf16": bool((scores.view(np.uint32) & 0xFFFF).any()),
                "256 rows in a call": max(dump.calls) > 200,
            }
        )
        bytes_a_rank = exchange_bytes(dump.world_size, max(dump.calls), dump.topk, dump.local_topk, dump.layout.name)
        assert dump.world_size * bytes_a_rank < 1 << 30
    missing = [name for name, times in seen.items() if not times]
    assert missing == [] and {f"world size {w}" for w in set(fuzz.CPU_WORLD_SIZES)} <= seen.keys()


def test_shapes_of_gpus_can_be_reserved_together() -> None:
    assert len({(shape.world_size, shape.local_topk) for shape in GPU_SHAPES}) == len(GPU_SHAPES)


@pytest.mark.parametrize("number", range(6))
def test_the_sort_on_a_device_is_the_reference(number: int) -> None:
    dump = configuration(3, number, [Shape(3, 40, 20, "fp32"), Shape(4, 300, 300, "bf16")] if number % 2 else [])
    dump = with_columns(with_rows(dump, np.arange(min(dump.rows, 60))), np.arange(min(dump.logits.shape[2], 200)))
    np.testing.assert_array_equal(sort_on_device(dump, torch.device("cpu")), sort_dump(dump))


def test_rows_and_columns_stay_where_they_are() -> None:
    logits = np.arange(2 * 5 * 7, dtype=np.float32).reshape(2, 5, 7)
    ends = np.int32([[0, 3, 7, 4, 1]] * 2)
    dump = replace(Dump.checked({"logits": logits, "row_ends": ends}, topk=3), calls=(2, 2, 1))
    rows = with_rows(dump, np.array([0, 2, 3]))
    assert rows.calls == (1, 2) and (rows.logits == logits[:, [0, 2, 3]]).all()
    assert with_rows(replace(dump, calls=()), np.array([1])).calls == ()
    columns = with_columns(dump, np.array([1, 3, 6]))
    assert (columns.logits == logits[:, :, [1, 3, 6]]).all()
    assert columns.row_ends[0].tolist() == [0, 1, 3, 2, 0]


def merge_wrong(dump: Dump) -> MergedDump:
    """Loses the first id of rows in which two ranks have the best score there is."""
    merged = merge_in_one_process(dump)
    best = (dump.scores(slice(None)) == np.inf).any(axis=2).sum(axis=0) > 1
    merged.ids[:, best, 0] = -1
    return merged


def goes_wrong(dump: Dump) -> bool:
    return not compare(dump, merge_wrong(dump), sort_dump(dump)).ok


def wrong_dump() -> Dump:
    rng = np.random.default_rng(0)
    shape, limits = Shape(3, 20, 7, "fp32"), Limits(calls=3, rows=30, columns=60, candidates=1 << 13)
    while True:
        dump = choose_dump(lambda low, high: int(rng.integers(low, high, endpoint=True)), shape, limits)
        if dump.rows > 30 and goes_wrong(dump):
            return dump


def test_the_smallest_failure_is_found() -> None:
    small = shrink(wrong_dump(), goes_wrong)
    assert small.rows == 1 and small.logits.shape[2] <= 2  # the two ranks' best may be in different columns
    assert goes_wrong(small)


def in_one_process(monkeypatch: pytest.MonkeyPatch, merge: Merge) -> None:
    """Makes the commands merge by ``merge`` and start no processes."""

    @contextmanager
    def merging(backend: str) -> Iterator[tuple[Merge, list[Shape]]]:
        yield merge, []

    monkeypatch.setattr(fuzz, "merging", merging)
    monkeypatch.setattr(verify, "merge_dump", lambda dump, backend, advance: merge(dump))


def test_a_failure_is_a_dump_that_verify_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    in_one_process(monkeypatch, merge_wrong)
    monkeypatch.setattr(fuzz, "configuration", lambda *args: wrong_dump())
    out = tmp_path / "wrong.npz"
    assert main(["fuzz", "--minutes", "5", "--backend", "cpu", "--out", str(out)]) == 1
    assert f"vllm-topkx verify {out} --backend cpu" in capsys.readouterr().out.splitlines()[-1]
    assert load_dump(out).rows == 1
    assert main(["verify", str(out), "--backend", "cpu"]) == 1
    assert "MISMATCH: 1 of 1 rows are wrong" in capsys.readouterr().out


def test_what_a_run_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    in_one_process(monkeypatch, merge_in_one_process)
    monkeypatch.chdir(tmp_path)
    assert main(["fuzz", "--minutes", "0.03", "--backend", "cpu", "--seed", "4"]) == 0
    first, *_, counts, last = capsys.readouterr().out.splitlines()
    assert first.startswith("backend cpu, seed 4, 0.03 minutes") and "cores" in first
    assert " rows (" in counts and counts.endswith(" rows/s")
    assert last.startswith("OK") and not list(tmp_path.iterdir())


def test_a_rank_that_does_not_answer_leaves_the_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def merge(dump: Dump) -> MergedDump:
        raise RuntimeError("rank 1: died")

    in_one_process(monkeypatch, merge)
    out = tmp_path / "dump.npz"
    with pytest.raises(RuntimeError, match="rank 1"):
        main(["fuzz", "--minutes", "1", "--backend", "cpu", "--out", str(out)])
    assert load_dump(out).rows == configuration(0, 0).rows


@pytest.mark.parametrize("option", [["--minutes", "0"], ["--seed", "-1"], ["--backend", "gpu"]])
def test_bad_options_are_one_line(option: list[str], capsys: pytest.CaptureFixture) -> None:
    try:
        code = main(["fuzz", *option])
    except SystemExit as left:
        code = left.code
    assert code == 2 and len(capsys.readouterr().err.splitlines()) == 1
