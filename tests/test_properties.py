"""Random merges on every backend that needs no GPU, and the keys and words that they rest on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging import release
from properties import check, choosing, merge_in_one_process, merge_interpreted

from vllm_topkx.cli.dump import Dump
from vllm_topkx.cli.fuzz import CPU_WORLD_SIZES
from vllm_topkx.cli.fuzz_case import Limits, Shape, choose_dump, choose_shape
from vllm_topkx.cli.merge_dump import MergedDump, merge_dump
from vllm_topkx.ops import keys
from vllm_topkx.ops.layouts import LAYOUTS
from vllm_topkx.ranks import RankPool

SMALL = Limits(calls=4, rows=12, columns=150, candidates=1 << 15)


@settings(settings.get_profile("reproducible"), max_examples=100)
@given(data=st.data(), layout=st.sampled_from(list(LAYOUTS)))
def test_keys_sort_as_score_then_position(data: st.DataObject, layout: str) -> None:
    """Against Python's own comparison of floats and whole numbers."""
    scores = data.draw(st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0]), min_size=2, max_size=20))
    scores = torch.tensor(scores, dtype=LAYOUTS[layout].dtype)
    positions = data.draw(st.permutations([0, 1, 2**24, 2**24 + 1, 2**31 - 1, *range(70, 70 + len(scores))]))
    positions = positions[: len(scores)]
    found = keys.selection_key(keys.score_ord(scores), torch.tensor(positions))
    assert (found == 0).tolist() == scores.isnan().tolist()
    candidates = [(s, g) for s, g in zip(scores.tolist(), positions, strict=True) if not math.isnan(s)]
    candidates.sort(key=lambda c: (-c[0], math.copysign(1, -c[0]), c[1]))
    best_first = found[found != 0].sort(descending=True).values
    assert keys.key_position(best_first).tolist() == [g for _, g in candidates]


@settings(settings.get_profile("reproducible"), max_examples=100)
@given(j=st.integers(0, 2**26), rank=st.integers(0, 15), more=st.integers(1, 8), interleave=st.integers(1, 5000))
def test_a_global_position_is_one_rank_s_place(j: int, rank: int, more: int, interleave: int) -> None:
    """Against the definition: stretches of ``interleave`` positions go round the ranks."""
    world_size = rank + more
    g = keys.global_position(torch.tensor(j), rank, world_size, interleave)
    stretch = g.item() // interleave
    assert (stretch % world_size, g.item() % interleave) == (rank, j % interleave)
    assert stretch // world_size == j // interleave
    assert [x.item() for x in keys.owner_and_local(g, world_size, interleave)] == [rank, j]


@settings(settings.get_profile("reproducible"), max_examples=60)
@given(data=st.data())
def test_select_and_rescue_in_one_process(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = choose_shape(choosing(data), CPU_WORLD_SIZES, most_topk=2048)
    check(choose_dump(choosing(data), shape, SMALL), merge_in_one_process, tmp_path_factory.mktemp("dump"))


@pytest.mark.parametrize("backend", ["cpu", "nccl"])
@settings(settings.get_profile("reproducible"), max_examples=30)
@given(data=st.data())
def test_exchange_and_all_gather_between_processes(
    data: st.DataObject, backend: str, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = choose_shape(choosing(data), CPU_WORLD_SIZES, most_topk=300)
    dump = choose_dump(choosing(data), shape, SMALL)

    def merge(part: Dump) -> MergedDump:
        ranks.run(release, world_size=part.world_size)
        return merge_dump(part, backend, ranks)

    check(replace(dump, lists=0) if backend == "nccl" else dump, merge, tmp_path_factory.mktemp("dump"))


@pytest.mark.parametrize("shape", [Shape(2, 20, 7, "fp32"), Shape(3, 9, 9, "bf16")], ids=str)
@settings(settings.get_profile("reproducible"), max_examples=6)
@given(data=st.data())
def test_interpreted_kernels(data: st.DataObject, shape: Shape, tmp_path_factory: pytest.TempPathFactory) -> None:
    few = Limits(calls=2, rows=3, columns=50, candidates=1 << 10)
    check(choose_dump(choosing(data), shape, few), merge_interpreted, tmp_path_factory.mktemp("dump"))
