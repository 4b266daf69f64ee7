"""One property for every backend: the ids, their order, KV rows and saturation words of any dump are right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from interpreted import Interpreted
from merging import expected, saturation

from vllm_topkx.cli.dump import Dump
from vllm_topkx.cli.fuzz import Merge
from vllm_topkx.cli.fuzz_case import Choose
from vllm_topkx.cli.fuzz_shrink import shrink
from vllm_topkx.cli.merge_dump import (
    MergedDump,
    kv_on_device,
    local_lists,
    on_device,
    only_ids,
    outputs,
    slices,
    start_at,
)
from vllm_topkx.cli.verify import compare, sort_dump
from vllm_topkx.ops.cpu import select as cpu
from vllm_topkx.ops.cute import launch
from vllm_topkx.ops.cute.exchange import DeviceExchange
from vllm_topkx.ops.spec import KvMap, Merged, MergeSpec

#: The same examples in every run. We shrink ourselves: rows and columns, which hypothesis does not see.
settings.register_profile(
    "reproducible",
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def choosing(data: st.DataObject) -> Choose:
    return lambda low, high: data.draw(st.integers(low, high))


def is_right(dump: Dump, merge: Merge) -> bool:
    merged = merge(dump)
    return compare(dump, merged, sort_dump(dump)).ok and np.array_equal(merged.saturated, saturation(dump))


def check(dump: Dump, merge: Merge, folder: Path) -> None:
    """Fails with the smallest part of ``dump`` that ``merge`` gets wrong."""
    if is_right(dump, merge):
        return
    small, path = shrink(dump, lambda part: not is_right(part, merge)), folder / "smallest.npz"
    small.save(path)
    pytest.fail(f"{small.rows} rows of {small.logits.shape[2]} positions: vllm-topkx verify {path}")


@dataclass(frozen=True)
class Call:
    """The inputs of one call, by rank: scores, row ends, words of the best N and of the best K, block table, list."""

    scores: list[torch.Tensor]
    ends: list[torch.Tensor]
    words: list[torch.Tensor]
    best: list[torch.Tensor]
    kv: list[KvMap | None]
    lists: list[torch.Tensor]


def calls_of(dump: Dump) -> Iterator[Call]:
    for rows in slices(dump, dump.rows):
        of_ranks = [on_device(dump.logits[r, rows], dump.row_ends[r, rows], torch.device("cpu")) for r in dump.ranks]
        kv = [kv_on_device(dump.kv_map(r, rows), dump, torch.device("cpu")) for r in dump.ranks]
        lists = [local_lists(*of_rank, dump.topk) for of_rank in of_ranks]
        scores, ends = (list(tensors) for tensors in zip(*of_ranks, strict=True))
        if dump.lists:
            pairs = [
                cpu.words_of_local_topk(*of_rank, None, dump.local_topk) for of_rank in zip(scores, lists, strict=True)
            ]
        else:
            pairs = [[cpu.local_topk_words(*of_rank, n) for n in (dump.local_topk, dump.topk)] for of_rank in of_ranks]
        words, best = (list(tensors) for tensors in zip(*pairs, strict=True))
        yield Call(scores, ends, words, best, kv, lists)


def merged_dump(dump: Dump, calls: list[tuple[Call, list[Merged]]]) -> MergedDump:
    return MergedDump.of_calls(
        [MergedDump.of_ranks(dump, torch.stack(call.words), [outputs(m) for m in merged]) for call, merged in calls]
    )


def merge_in_one_process(dump: Dump) -> MergedDump:
    """The CPU backend's select and round 2, without an exchange."""
    done = []
    for call in calls_of(dump):
        specs = [
            MergeSpec(r, dump.world_size, dump.topk, dump.local_topk, dump.interleave, dump.layout) for r in dump.ranks
        ]
        done.append((call, [expected(call.words, call.best, spec, call.kv[spec.rank]) for spec in specs]))
    return merged_dump(dump, done)


def merge_interpreted(dump: Dump) -> MergedDump:
    """The kernels' PTX in the interpreter."""
    loopback = Interpreted(dump.world_size, max(dump.calls), dump.topk, dump.local_topk, dump.layout.dtype)
    for exchange in loopback.exchanges:
        start_at(exchange, dump.epoch)
    done = []
    for call in calls_of(dump):

        def prepare(exchange: DeviceExchange, call: Call = call) -> launch.Launch:
            r, spec = exchange.rank, loopback.spec(exchange.rank, dump.interleave)
            if dump.lists:
                return launch.prepare_merge_dcp_topk(exchange, call.scores[r], call.lists[r], None, spec)
            return launch.prepare_exchange(
                exchange, call.words[r], call.scores[r], call.ends[r], spec, call.kv[r], emit_ids=True
            )

        results = loopback.run(prepare)
        done.append((call, [only_ids(ids) for ids in results] if dump.lists else results))
    return merged_dump(dump, done)
