"""Exactness over world sizes, K, N, layouts, interleaves and inputs, through what ``verify`` runs."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from merging import release, saturation

from vllm_topkx.cli.dump import Dump, load_dump
from vllm_topkx.cli.hostile import HOSTILE, bf16_bits, stacked
from vllm_topkx.cli.merge_dump import MergedDump, chunk_rows, merge_dump
from vllm_topkx.cli.verify import compare, sort_dump
from vllm_topkx.ops.layouts import default_local_topk
from vllm_topkx.ops.reference import reference_topk, same_sets
from vllm_topkx.ranks import RankPool

ROWS = 5
#: W, K, N (None: the default), layout, interleave, positions a rank. Every value of the issue is in it, W
#: with both layouts and all interleaves, N at 1, 2, in between, K - 1 and K.
CASES = [
    (2, 512, None, "fp32", 1, 700),
    (2, 512, 512, "bf16", 16, 500),
    (2, 777, 388, "bf16", 64, 900),
    (2, 2048, 1024, "fp32", 64, 2000),
    (2, 4096, 4095, "bf16", 1, 2100),
    (2, 1, 1, "fp32", 16, 40),
    (3, 1024, None, "bf16", 1, 800),
    (3, 33, 1, "fp32", 16, 65),
    (3, 2048, 2047, "fp32", 64, 1000),
    (3, 7, 3, "bf16", 64, 130),
    (4, 512, 64, "fp32", 16, 300),
    (4, 2048, None, "bf16", 64, 1000),
    (4, 1024, 1024, "fp32", 1, 400),
    (4, 101, 2, "bf16", 1, 77),
    (8, 512, None, "bf16", 16, 200),
    (8, 2048, 300, "fp32", 1, 400),
    (8, 1023, 511, "fp32", 64, 333),
    (8, 6, 5, "bf16", 1, 20),
    (16, 512, 32, "bf16", 1, 100),
    (16, 1024, None, "fp32", 64, 200),
    (16, 2048, 128, "bf16", 64, 256),
    (16, 65, 4, "fp32", 16, 50),
    (16, 3, 3, "fp32", 1, 9),
]


def make_dump(
    logits: np.ndarray, ends: np.ndarray, topk: int, local_topk: int | None, layout: str, interleave: int
) -> Dump:
    arrays = {"logits": logits} if layout == "fp32" else {"logits_bf16": bf16_bits(logits)}
    return Dump.checked({**arrays, "row_ends": ends}, topk, interleave, local_topk)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "W{}-K{}-N{}-{}-I{}-L{}".format(*case))
def test_every_rank_gives_the_reference(ranks: RankPool, case: tuple) -> None:
    world_size, topk, local_topk, layout, interleave, columns = case
    rng = np.random.default_rng(CASES.index(case))
    logits, ends, names = stacked(rng, world_size, ROWS, columns)
    dump = make_dump(logits, ends, topk, local_topk, layout, interleave)
    reference = sort_dump(dump)
    merged = merge_dump(dump, "cpu", ranks)
    verdict = compare(dump, merged, reference)
    assert [(names[m.row], m.row, m.rank, m.missing[:4], m.extra[:4]) for m in verdict.mismatches] == []
    assert verdict.order_differs == []
    np.testing.assert_array_equal(merged.saturated, saturation(dump))


@pytest.mark.parametrize("local_topk", [1, 8, 11, 12, 13, 23, 24])
def test_exactly_local_topk_winners_on_a_rank(ranks: RankPool, local_topk: int) -> None:
    """The staircase has rows with one winner fewer than N, N and one more on a rank."""
    logits, ends = HOSTILE["staircase"](np.random.default_rng(1), 4, 24, 60)
    dump = make_dump(logits, ends, 24, local_topk, "fp32", 1)
    merged = merge_dump(dump, "cpu", ranks)
    assert compare(dump, merged, sort_dump(dump)).ok
    np.testing.assert_array_equal(merged.saturated, saturation(dump))
    assert (merged.saturated != 0).any() == (local_topk < 24)


def test_two_ranks_saturated_in_one_row(ranks: RankPool) -> None:
    logits, ends = HOSTILE["two_ranks_have_all"](np.random.default_rng(2), 8, 6, 300)
    dump = make_dump(logits, ends, 512, 200, "bf16", 16)
    merged = merge_dump(dump, "cpu", ranks)
    assert compare(dump, merged, sort_dump(dump)).ok
    assert merged.saturated.tolist() == [0b10000001] * 6


@pytest.mark.parametrize("local_topk", [40, 300])
def test_order_is_one_for_all_ranks_runs_and_backends(ranks: RankPool, local_topk: int) -> None:
    """With one N: the order inside a row is that of the words, and N decides which are sent again."""
    logits, ends, _ = stacked(np.random.default_rng(3), 4, 3, 200)
    dump = make_dump(logits, ends, 300, local_topk, "fp32", 16)
    first = merge_dump(dump, "cpu", ranks)
    assert (first.ids == first.ids[0]).all()
    for backend in ("cpu", "cpu", "nccl"):
        again = merge_dump(dump, backend, ranks)
        np.testing.assert_array_equal(again.ids, first.ids)
        np.testing.assert_array_equal(again.saturated, first.saturated)


def test_all_gather_form_without_rescue_needs_no_exchange(ranks: RankPool) -> None:
    logits, ends, _ = stacked(np.random.default_rng(4), 3, 3, 90)
    dump = make_dump(logits, ends, 64, 64, "bf16", 64)
    merged = merge_dump(dump, "nccl", ranks)
    assert compare(dump, merged, sort_dump(dump)).ok
    assert not merged.saturated.any()


def test_result_does_not_depend_on_how_it_was_merged(ranks: RankPool) -> None:
    logits, ends, _ = stacked(np.random.default_rng(5), 8, 2, 100)
    sets = []
    for local_topk in (1, 17, default_local_topk(130, 8), 130):
        for layout in ("fp32", "bf16"):
            merged = merge_dump(make_dump(logits, ends, 130, local_topk, layout, 16), "cpu", ranks)
            sets.append(np.sort(merged.ids[0], axis=-1))
            ranks.run(release)
    for other in sets[1:]:
        np.testing.assert_array_equal(other, sets[0])


def test_rows_are_merged_in_chunks(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, ends = HOSTILE["ties"](np.random.default_rng(6), 3, 23, 50)
    dump = make_dump(logits, ends, 40, 10, "fp32", 1)
    monkeypatch.setenv("VLLM_TOPKX_MAX_ROWS", "5")
    done: list[int] = []
    merged = merge_dump(dump, "cpu", ranks, done.append)
    assert done == [5, 5, 5, 5, 3]
    assert compare(dump, merged, sort_dump(dump)).ok
    assert merged.ids.shape == (3, 23, 40) and merged.saturated.shape == (23,)


def test_chunks_of_large_rows_are_small() -> None:
    logits = np.broadcast_to(np.float32(0), (16, 256, 131072))  # takes no memory
    assert 1 <= chunk_rows(Dump.checked({"logits": logits}, topk=4096, local_topk=4096)) < 20
    assert chunk_rows(Dump.checked({"logits": logits[:2, :, :4096]}, topk=2048)) == 256


def test_positions_at_the_end_of_the_bf16_layout(ranks: RankPool) -> None:
    """131072 positions a rank need the 17th bit."""
    columns = 131072
    logits = np.zeros((2, 2, columns), dtype=np.float32)
    logits[0, 0, -40:], logits[1, 1, 65530:65560] = 2, 3
    dump = make_dump(logits, np.full((2, 2), columns), 64, 40, "bf16", 64)
    merged = merge_dump(dump, "cpu", ranks)
    assert compare(dump, merged, sort_dump(dump)).ok


def brute_force(logits: np.ndarray, ends: np.ndarray, topk: int, interleave: int) -> list[list[int]]:
    """The definition, in plain Python: sort all candidates by (score, sign of zero) and position."""
    world_size, rows, _ = logits.shape

    def worse_first(a: tuple[float, int], b: tuple[float, int]) -> int:
        for x, y in ((a[0], b[0]), (math.copysign(1, a[0]), math.copysign(1, b[0]))):
            if x != y:
                return -1 if x > y else 1
        return a[1] - b[1]

    result = []
    for t in range(rows):
        candidates = []
        for rank in range(world_size):
            for j in range(int(ends[rank, t])):
                g = (j // interleave) * world_size * interleave + rank * interleave + j % interleave
                if not math.isnan(score := float(logits[rank, t, j])):
                    candidates.append((score, g))
        best = [g for _, g in sorted(candidates, key=functools.cmp_to_key(worse_first))[:topk]]
        result.append(best + [-1] * (topk - len(best)))
    return result


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(("world_size", "interleave"), [(2, 1), (3, 16)])
def test_the_reference_is_a_brute_force_sort(name: str, world_size: int, interleave: int) -> None:
    logits, ends = HOSTILE[name](np.random.default_rng(7), world_size, 4, 37)
    want = brute_force(logits, ends, 20, interleave)
    assert reference_topk(logits, ends, 20, interleave).tolist() == want


def test_compare_names_what_is_wrong() -> None:
    reference = np.int32([[4, 2, -1], [7, 8, 9]])
    ids = np.stack([reference, reference]).copy()
    ids[1, 0] = [2, 2, -1]
    ids[0, 1] = [8, 7, 9]
    assert same_sets(ids, reference).tolist() == [[True, True], [False, True]]
    dump = make_dump(np.zeros((2, 2, 9), dtype=np.float32), np.full((2, 2), 9), 3, 3, "fp32", 1)
    verdict = compare(dump, MergedDump(ids, np.zeros(2, dtype=np.int32)), reference)
    assert [(m.row, m.rank, m.missing, m.extra) for m in verdict.mismatches] == [(0, 1, [4], [2])]
    assert verdict.order_differs == [0, 1]
    assert not verdict.ok


def test_kv_rows_are_those_of_the_ids(ranks: RankPool) -> None:
    logits, ends, _ = stacked(np.random.default_rng(8), 3, 2, 40)
    dump = replace(make_dump(logits, ends, 24, 10, "fp32", 4), block_size=8, calls=(20, len(ends[0]) - 20))
    merged = merge_dump(dump, "cpu", ranks)
    reference = sort_dump(dump)
    assert compare(dump, merged, reference).ok
    (table, requests), row = dump.kv_map(1, slice(None)), next(t for t in range(dump.rows) if merged.valid[1, t])
    first = next(g for g in merged.ids[1, row].tolist() if g // 4 % 3 == 1)  # rank 1's own, I = 4, W = 3
    j = first // 12 * 4 + first % 4
    assert merged.rows[1, row, 0] == table[requests[row], j // 8] * 9 + j % 8
    for changed in (merged.rows, merged.valid):
        before = changed[1, row].copy()
        changed[1, row] += 1
        verdict = compare(dump, merged, reference)
        assert verdict.kv_rows_differ == [row] == verdict.wrong_rows and not verdict.ok
        changed[1, row] = before


def test_a_saved_dump_is_the_same(tmp_path: Path) -> None:
    logits, ends, _ = stacked(np.random.default_rng(9), 2, 1, 30)
    for layout in ("fp32", "bf16"):
        dump = replace(
            make_dump(logits, ends, 5, 2, layout, 2), block_size=4, calls=(1, len(ends[0]) - 1), epoch=2**32 - 3
        )
        dump.save(tmp_path / "dump.npz")
        again = load_dump(tmp_path / "dump.npz")
        assert vars(again).keys() == vars(dump).keys()
        for name, value in vars(dump).items():
            np.testing.assert_array_equal(getattr(again, name), value)
