"""Merges of random shapes in the PTX interpreter, against the CPU backend bit for bit and a stable sort.

A kernel is compiled for its W, K, N and layout, and the compiler finds other code for each: divisions by N above all.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from interpreted import Interpreted
from merging import assert_merged, expected, kv_maps

from vllm_topkx.cli.hostile import HOSTILE, stacked
from vllm_topkx.cli.merge_dump import local_lists
from vllm_topkx.ops.cpu import select as cpu
from vllm_topkx.ops.cute import launch
from vllm_topkx.ops.reference import reference_topk, same_sets

ROWS = 3


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world_size, k = int(rng.choice([2, 3, 4, 5, 8])), int(rng.integers(1, 900))
    n, interleave = int(rng.integers(max(1, k // 4), k + 1)), int(rng.choice([1, 2, 7, 64]))
    dtype, columns = [torch.float32, torch.bfloat16][seed % 2], int(rng.integers(1, 3000))
    names = rng.choice(list(HOSTILE), ROWS, replace=False).tolist()
    scores, numpy_ends, _ = stacked(rng, world_size, 1, columns, names)
    logits, ends = [torch.from_numpy(s).to(dtype) for s in scores], [torch.from_numpy(e) for e in numpy_ends]
    loopback = Interpreted(world_size, ROWS, k, n, dtype)
    specs = [loopback.spec(rank, interleave) for rank in range(world_size)]

    words, lists = ([cpu.local_topk_words(x, e, m) for x, e in zip(logits, ends, strict=True)] for m in (n, k))
    kv = kv_maps(seed, world_size, ROWS, columns, 16 * interleave)
    got = loopback.run(
        lambda x: launch.prepare_exchange(
            x, words[x.rank], logits[x.rank], ends[x.rank], specs[x.rank], kv[x.rank], True
        )
    )
    reference = reference_topk(torch.stack(logits).float().numpy(), numpy_ends, k, interleave)
    for rank, merged in enumerate(got):
        assert_merged(merged, expected(words, lists, specs[rank], kv[rank]))
        assert same_sets(merged.ids.numpy(), reference).all()

    indices = [local_lists(x, e, k) for x, e in zip(logits, ends, strict=True)]
    words, lists = zip(
        *(cpu.words_of_local_topk(x, i, None, n) for x, i in zip(logits, indices, strict=True)), strict=True
    )
    got = loopback.run(lambda x: launch.prepare_merge_dcp_topk(x, logits[x.rank], indices[x.rank], None, specs[x.rank]))
    for rank, ids in enumerate(got):
        assert torch.equal(ids, expected(words, lists, specs[rank], None).ids)
        assert same_sets(ids.numpy(), reference).all()
