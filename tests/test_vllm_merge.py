"""vLLM's merge function replaced by the exchange: real vLLM 0.33.0 on the CPU, two real ranks, vLLM's groups.

vLLM's own function needs a GPU. A call that reaches it raises its RuntimeError, which proves the path taken.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from vllm_topkx import TopkxError, plugin
from vllm_topkx.cli import vllm_cpu
from vllm_topkx.ops.reference import reference_topk, same_sets
from vllm_topkx.plugin import merge, reservation
from vllm_topkx.plugin.import_hook import when_imported
from vllm_topkx.plugin.shadow import Counts
from vllm_topkx.plugin.shadow_rows import KINDS
from vllm_topkx.ranks import RankContext, RankPool

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

W, K, L, INTERLEAVE, ROWS = 2, 64, 150, 4, 32
VLLMS_OWN = "DCP sparse-indexer merge requires"


@dataclass
class Step:
    """The arguments of one merge on all ranks, and what it must give.

    Attributes:
        logits: by rank, float32 ``[rows, columns]``.
        indices: by rank, int32 ``[rows, K]``.
        starts: by rank, int32 ``[rows]``, or None.
    """

    logits: list[np.ndarray]
    indices: list[np.ndarray]
    starts: list[np.ndarray | None]
    expected: np.ndarray


def local_topk(logits: np.ndarray, ends: np.ndarray, topk: int, rng: np.random.Generator) -> np.ndarray:
    """A rank's top-K of each row as vLLM has it: unordered, -1 padded."""
    indices = np.full((len(logits), topk), -1, np.int32)
    for row, (scores, end) in enumerate(zip(logits, ends, strict=True)):
        best = np.argsort(-scores[:end], kind="stable")[:topk]
        indices[row, : len(best)] = rng.permutation(best)
    return indices


def decode(rows: int, topk: int = K, seed: int = 0) -> Step:
    """Rows of very different lengths, many equal scores, one rank with all of row 0's best."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((W, rows, L)).astype(np.float32).round(1)
    logits[1, 0] += 100
    ends = rng.integers(0, L + 1, (W, rows)).astype(np.int32)
    ends[:, 0] = L
    indices = [local_topk(logits[r], ends[r], topk, rng) for r in range(W)]
    return Step(list(logits), indices, [None] * W, reference_topk(logits, ends, topk, INTERLEAVE))


def prefill(rows: int) -> Step:
    """A chunk whose rows begin at columns of their own."""
    step, rng = decode(rows, seed=1), np.random.default_rng(2)
    starts = [rng.integers(0, 50, rows).astype(np.int32) for _ in range(W)]
    for r in range(W):
        wide = np.full((rows, L + 50), np.inf, np.float32)
        for row, start in enumerate(starts[r]):
            wide[row, start : start + L] = step.logits[r][row]
        step.logits[r] = wide
    step.starts = list(starts)
    return step


def padded(rows: int) -> Step:
    """The padding rows of speculative decoding: no rank has a candidate, scores are NaN."""
    step = decode(rows, seed=3)
    for r in range(W):
        step.logits[r][1::2], step.indices[r][1::2] = np.nan, -1
    step.expected[1::2] = -1
    return step


def empty_shard(rows: int) -> Step:
    """A chunk of which rank 1 has no position: it has neither columns nor row starts."""
    step = prefill(rows)
    step.logits[1], step.starts[1] = np.empty((rows, 0), np.float32), None
    step.indices[1][:] = -1
    # What is left is rank 0's local top-K, as global positions.
    j = step.indices[0].astype(np.int64)
    step.expected = np.where(j < 0, -1, j // INTERLEAVE * W * INTERLEAVE + j % INTERLEAVE).astype(np.int32)
    return step


STEPS = {"decode": decode, "prefill": prefill, "padded": padded, "empty shard": empty_shard}


# On the ranks


@contextmanager
def messages() -> Iterator[list[tuple[str, str]]]:
    """Level and text of what the plugin logs."""
    said: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("vllm.topkx")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def start(ctx: RankContext, folder: str) -> dict[str, object]:
    """vLLM's groups and its modules, under a plugin whose first load fails; what that said and patched."""
    os.environ.update(vllm_cpu.environment(folder), VLLM_TOPKX="maybe", VLLM_TOPKX_MAX_ROWS=str(ROWS))
    with messages() as said:
        plugin.register()
        os.environ["VLLM_TOPKX"] = "1"
        plugin.register()
        global config
        config = vllm_cpu.set_up(ctx.rank, W)
        import vllm.model_executor.layers.sparse_attn_indexer as source
        import vllm.models.glm5next.nvidia.sparse_indexer as kpool

        before = source._merge_dcp_topk_global, source.SparseAttnIndexer.__init__, kpool._merge_dcp_topk_global
        for _ in range(3):
            plugin.register()
        after = source._merge_dcp_topk_global, source.SparseAttnIndexer.__init__, kpool._merge_dcp_topk_global
    original = merge.original_of(before[0])
    return {
        "said": said,
        "loads once": before == after,
        "vLLM's own": (original.__module__, original.__name__),
        "replaced once": merge.original_of(original) is None,
        "kpool has it": kpool._merge_dcp_topk_global is source._merge_dcp_topk_global,
        # What the eager call sites look the name up in.
        "call sites": [
            module.__dict__[name].__wrapped__.__globals__["_merge_dcp_topk_global"] is before[0]
            for module, name in ((source, "sparse_attn_indexer"), (kpool, "sparse_attn_indexer_kpool"))
        ],
    }


def build(topk: int) -> list[tuple[str, str]]:
    """Makes two of vLLM's indexer layers; what the plugin says to it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

    buffer = torch.empty(64, topk, dtype=torch.int32)
    with messages() as said, set_current_vllm_config(config), torch.device("meta"):
        for _ in range(2):
            SparseAttnIndexer(None, 128, "ue8m0", topk, 128, 4096, 4096, buffer)
    return said


def build_layers(ctx: RankContext, topk: int) -> list[tuple[str, str]]:
    return build(topk)


def call(ctx: RankContext, step: Step, function: Callable[..., None] | None = None) -> np.ndarray | str:
    """The merged ids; or, of vLLM's own function, its error."""
    import vllm.model_executor.layers.sparse_attn_indexer as source

    logits, ids = torch.from_numpy(step.logits[ctx.rank]), torch.from_numpy(step.indices[ctx.rank].copy())
    starts = step.starts[ctx.rank]
    starts = None if starts is None else torch.from_numpy(starts)
    try:
        with torch.inference_mode():
            (function or source._merge_dcp_topk_global)(
                logits, ids, ids.shape[1], ctx.rank, W, INTERLEAVE, row_starts=starts
            )
    except RuntimeError as error:
        return str(error)
    return ids.numpy()


def call_with_strides(ctx: RankContext, step: Step) -> np.ndarray:
    """As :func:`call`, with columns that are not neighbours on rank 1 alone, and row starts of 64 bits."""
    import vllm.model_executor.layers.sparse_attn_indexer as source

    logits, buffer = torch.from_numpy(step.logits[ctx.rank]), torch.zeros(len(step.expected), 2 * K, dtype=torch.int32)
    if ctx.rank == 1:
        logits = logits.t().contiguous().t()
    ids = buffer[:, ::2]
    ids.copy_(torch.from_numpy(step.indices[ctx.rank]))
    starts = torch.from_numpy(step.starts[ctx.rank]).to(torch.int64)
    source._merge_dcp_topk_global(logits, ids, K, ctx.rank, W, INTERLEAVE, starts)
    assert not buffer[:, 1::2].any()
    return ids.numpy()


def call_unfit(ctx: RankContext, rows: int, dtype: str, topk: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Two calls that no exchange takes: vLLM's errors, and what the plugin says."""
    import vllm.model_executor.layers.sparse_attn_indexer as source

    logits = torch.zeros(rows, L, dtype=getattr(torch, dtype))
    errors = []
    with messages() as said:
        for _ in range(2):
            ids = torch.zeros(rows, topk, dtype=torch.int32)
            with pytest.raises(RuntimeError) as raised:
                source._merge_dcp_topk_global(logits, ids, topk, ctx.rank, W, INTERLEAVE)
            errors.append(str(raised.value))
    return errors[0], errors[1], said


def build_failing(ctx: RankContext, topk: int, where: str) -> tuple[list[tuple[str, str]], str]:
    """Layers whose reservation fails, and vLLM's error when a merge is called."""

    def fail(*args: object, **kwargs: object) -> None:
        raise TopkxError("no such luck")

    # reserve() fails on all ranks or on none.
    with patch.object(reservation, where, fail) if where == "reserve" or ctx.rank == 1 else nullcontext():
        said = build(topk)
    return said, call_unfit(ctx, 3, "float32", topk)[0]


def call_in_lanes(ctx: RankContext, topk: int, step: Step) -> tuple[list[tuple[str, str]], list[np.ndarray], list[int]]:
    """A merge in each of two micro-batches: what was said, the ids, and the calls that each lane's exchange saw."""
    from vllm.v1.worker import ubatching

    from vllm_topkx.ops.exchange import find_exchange

    config.parallel_config.enable_dbo = True
    said = build(topk)
    config.parallel_config.enable_dbo = False
    local_topk = reservation.plans[vllm_cpu.GROUP, topk].local_topk
    lanes = [find_exchange(vllm_cpu.GROUP, ctx.device, local_topk, lane) for lane in range(2)]
    before = [int(exchange.epoch[0]) for exchange in lanes]
    ids = [call(ctx, step)]
    for _ in range(2):
        with patch.dict(ubatching._THREAD_ID_TO_CONTEXT, {threading.get_ident(): 1}):
            ids.append(call(ctx, step))
    return said, ids, [int(exchange.epoch[0]) - epoch for exchange, epoch in zip(lanes, before, strict=True)]


def build_kpool(ctx: RankContext, topk: int, index_kpool: int, step: Step) -> tuple[int, np.ndarray | str]:
    """Makes a layer of GLM-5.x: the K of its exchange, and a merge by the name in its module."""
    from vllm.config import set_current_vllm_config
    from vllm.models.glm5next.nvidia import sparse_indexer

    model = SimpleNamespace(hf_text_config=SimpleNamespace(index_kpool=index_kpool))
    before = set(reservation.plans)
    object.__setattr__(config, "model_config", model)
    try:
        with set_current_vllm_config(config):
            sparse_indexer.SparseAttnIndexerKpool(None, 128, "ue8m0", topk, 128, 1024, 4096, None)
    finally:
        object.__setattr__(config, "model_config", None)
    ((_, pools),) = set(reservation.plans) - before
    return pools, call(ctx, step, sparse_indexer._merge_dcp_topk_global)


def call_in_shadow(ctx: RankContext, steps: list[Step], topk: int, folder: str):
    """Merges beside a stand-in for vLLM's function that errs in row 0 of the last step."""
    import vllm.model_executor.layers.sparse_attn_indexer as source

    pending = [step.expected.copy() for step in steps]
    pending[-1][0, 0] = 2**30

    def theirs(logits, topk_indices, topk_tokens, dcp_rank, dcp_world_size, cp_interleave, row_starts=None):
        served = pending.pop(0)
        topk_indices.copy_(torch.from_numpy(served[:, ::-1].copy()))  # any order

    fake = ModuleType("vllm.topkx_shadowed")
    fake._merge_dcp_topk_global, fake.get_dcp_group = theirs, source.get_dcp_group
    fake.SparseAttnIndexer = type("SparseAttnIndexer", (), {"__init__": lambda self: None})
    merge.take_over(fake)
    with patch.dict(os.environ, VLLM_TOPKX="shadow"):
        said = build(topk)
    shadow = reservation.plans[vllm_cpu.GROUP, topk].shadow
    ids = [call(ctx, step, fake._merge_dcp_topk_global) for step in steps[:-1]]
    with messages() as reports, patch("tempfile.tempdir", folder):
        shadow.report()
        ids.append(call(ctx, steps[-1], fake._merge_dcp_topk_global))
        shadow.report()
        shadow.report()
    return said, ids, shadow.counts(), reports


# In the parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RankPool, list[dict[str, object]]]]:
    with RankPool(W) as pool:
        started = pool.run(start, str(tmp_path_factory.mktemp("vllm")))
        yield pool, started


@pytest.fixture(scope="module")
def pool(ranks: tuple[RankPool, list[dict[str, object]]]) -> RankPool:
    """Ranks whose layers of K are made."""
    for said in ranks[0].run(build_layers, K):
        ((level, text),) = said
        assert level == "INFO"
        assert "takes over the DCP top-K merge of every sparse layer: W 2, K 64, N 64, layout fp32" in text
        assert f"calls of up to {ROWS} rows, 1 lane, shared memory" in text
    return ranks[0]


def is_exact(found: list[np.ndarray | str], step: Step) -> bool:
    return all(isinstance(ids, np.ndarray) and same_sets(ids, step.expected).all() for ids in found)


def test_the_function_is_replaced_once_wherever_vllm_calls_it(ranks) -> None:
    for found in ranks[1]:
        ((level, text),) = found.pop("said")
        assert level == "WARNING" and "VLLM_TOPKX='maybe'" in text
        assert found == {
            "loads once": True,
            "vLLM's own": (merge.SOURCE, merge.FUNCTION),
            "replaced once": True,
            "kpool has it": True,
            "call sites": [True, True],
        }


@pytest.mark.parametrize("kind", STEPS)
def test_merged_ids_are_the_reference(pool: RankPool, kind: str) -> None:
    for rows in (1, 7, ROWS):
        step = STEPS[kind](rows)
        assert is_exact(pool.run(call, step), step)


def test_strides_and_integer_types_that_only_one_rank_has(pool: RankPool) -> None:
    step = prefill(9)
    assert is_exact(pool.run(call_with_strides, step), step)


def test_no_rows(pool: RankPool) -> None:
    nothing = Step([np.empty((0, L), np.float32)] * W, [np.empty((0, K), np.int32)] * W, [None] * W, None)
    for ids in pool.run(call, nothing):
        assert ids.shape == (0, K)


@pytest.mark.parametrize(
    "rows, dtype, topk, level, reason",
    [
        (ROWS + 1, "float32", K, "INFO", "more rows than the exchange holds (VLLM_TOPKX_MAX_ROWS)"),
        (4, "bfloat16", K, "WARNING", "the exchange takes float32 logits"),
        (4, "float32", K + 1, "WARNING", "no exchange was reserved for this group and K"),
    ],
)
def test_what_the_exchange_cannot_take_goes_to_vllm(
    pool: RankPool, rows: int, dtype: str, topk: int, level: str, reason: str
) -> None:
    for first, second, said in pool.run(call_unfit, rows, dtype, topk):
        assert first.startswith(VLLMS_OWN) and second.startswith(VLLMS_OWN)
        ((found, text),) = said
        assert found == level and reason in text
    step = decode(5)
    assert is_exact(pool.run(call, step), step)


@pytest.mark.parametrize("where, topk", [("reserve", 40), ("_compile", 41), ("_shadow", 42)])
def test_a_reservation_that_fails_on_one_rank_leaves_all_to_vllm(pool: RankPool, where: str, topk: int) -> None:
    rank = 0 if where == "reserve" else 1
    for said, error in pool.run(build_failing, topk, where):
        ((level, text),) = said
        assert level == "WARNING"
        assert f"DCP merges of K {topk} are left to vLLM, on all ranks: rank {rank}: TopkxError: no such luck" in text
        assert error.startswith(VLLMS_OWN)


def test_a_k_that_no_exchange_takes_is_one_warning(pool: RankPool) -> None:
    for said in pool.run(build_layers, 5000):
        ((level, text),) = said
        assert level == "WARNING" and "topk 5000: allowed is 1..4096" in text


def test_each_micro_batch_has_its_lane(pool: RankPool) -> None:
    step = decode(6, topk=48)
    for said, ids, calls in pool.run(call_in_lanes, 48, step):
        assert "2 lanes" in said[0][1]
        assert is_exact(ids, step)
        assert calls == [1, 2]


def test_pools_of_glm_are_merged_in_their_own_units(pool: RankPool) -> None:
    step = decode(6, topk=32)
    for pools, ids in pool.run(build_kpool, 128, 4, step):
        assert pools == 32
        assert is_exact([ids], step)


def test_shadow_serves_vllms_result_and_counts_differing_rows(pool: RankPool, tmp_path: Path) -> None:
    steps = [decode(rows, topk=56, seed=rows) for rows in (3, 5, 8)]
    for said, ids, counts, reports in pool.run(call_in_shadow, steps, 56, str(tmp_path)):
        assert "runs beside" in said[0][1] and "VLLM_TOPKX=shadow" in said[0][1]
        for found, step in zip(ids[:2], steps[:2], strict=True):
            assert np.array_equal(found, step.expected[:, ::-1])
        assert ids[2][0, -1] == 2**30
        assert counts == Counts(3, 16, 3, 3, tuple(int(kind == "ids past 2^24") for kind in KINDS))
        same, other = reports
        assert same == ("INFO", "vllm-topkx shadow, so far: 2 merges, 8 rows, 0 of them with other ids than vLLM's")
        assert other[0] == "WARNING"
        assert "3 merges, 16 rows, 1 of them with other ids than vLLM's: ids past 2^24 1; first in merge 3" in other[1]


# Without ranks: modules that are not as they are known


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with the names that are needed of vLLM's."""
    module = ModuleType("vllm.topkx_host")
    module.seen = []
    exec(
        f"def _merge_dcp_topk_global({', '.join(merge.PARAMETERS)}=None):\n    seen.append(dcp_world_size)\n"
        "def get_dcp_group():\n    raise AssertionError\n"
        "class SparseAttnIndexer:\n    pass\n",
        vars(module),
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_one_rank_changes_nothing(host: ModuleType) -> None:
    merge.take_over(host)
    host._merge_dcp_topk_global(None, None, 64, 0, 1, 1)
    assert host.seen == [1]


def test_importers_by_name_are_found(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    importer = ModuleType("vllm.topkx_importer")
    importer._merge_dcp_topk_global = original = host._merge_dcp_topk_global
    importer.SparseAttnIndexerKpool, importer.get_dcp_group = type("Layer", (), {}), host.get_dcp_group
    monkeypatch.setitem(sys.modules, importer.__name__, importer)
    with pytest.raises(TopkxError, match="is not the one that was replaced"):
        merge.take_over_kpool(importer)
    merge.take_over(host)
    assert merge.original_of(importer._merge_dcp_topk_global) is original
    merge.take_over_kpool(importer)


def alter_signature(module: ModuleType) -> None:
    exec("def _merge_dcp_topk_global(logits, topk_indices, topk):\n    pass\n", vars(module))


@pytest.mark.parametrize(
    "alter, warning",
    [
        (alter_signature, "has other parameters than are known: logits, topk_indices, topk"),
        (lambda module: delattr(module, merge.FUNCTION), "it has no _merge_dcp_topk_global"),
        (lambda module: delattr(module, "SparseAttnIndexer"), "it has no SparseAttnIndexer"),
        (lambda module: delattr(module, "get_dcp_group"), "it has no get_dcp_group"),
    ],
)
def test_a_module_that_is_not_as_known_is_one_warning_and_untouched(
    host: ModuleType, alter: Callable[[ModuleType], None], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    alter(host)
    before = dict(vars(host))
    for _ in range(3):
        when_imported(host.__name__, merge.take_over, plugin._warn)
    assert dict(vars(host)) == before
    (record,) = [record for record in caplog.records if record.name == "vllm.topkx"]
    assert record.levelname == "WARNING" and warning in record.getMessage()
