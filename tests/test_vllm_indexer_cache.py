"""vLLM's compile caches with the indexer in the graph: two processes, one without the plugin, share a folder."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import pytest
import torch
from indexed_model import DYNAMIC, ROWS, Indexed, K, L, decode_step

from vllm_topkx import plugin
from vllm_topkx.cli import vllm_cpu
from vllm_topkx.ranks import RankContext, RankPool

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

OURS, THEIRS = {"topkx::sparse_attn_indexer"}, {"vllm::sparse_attn_indexer"}


def start(ctx: RankContext, folder: str, with_plugin: bool) -> None:
    os.environ.update(vllm_cpu.environment(folder, cache=True))
    if with_plugin:
        plugin.register()
    vllm_cpu.set_up(0, 1)


def run(
    ctx: RankContext, splitting_ops: list[str] | None, env: dict[str, str], version: str | None, topk: int | None
) -> tuple[bool, set[str]]:
    """Whether a compiled graph came from the folder, and which indexer was called.

    Args:
        splitting_ops: of the configuration.
        env: settings.
        version: of the package, if not its own.
        topk: K of an exchange to reserve, or None.
    """
    from fx_helpers import stub_exchange  # brings Inductor, which reads the environment once

    from vllm_topkx.fx_passes import cache_key
    from vllm_topkx.ops.exchange import release_all

    torch._dynamo.reset()
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, env))
        stack.callback(release_all)
        if version is not None:
            stack.enter_context(patch.object(cache_key, "__version__", version))
        if topk is not None:
            stub_exchange(topk=topk, local_topk=topk)
        config = vllm_cpu.make_config(0, 1, ROWS, splitting_ops)
        module = vllm_cpu.compiled(Indexed, DYNAMIC, config, world_size=2)
        stack.enter_context(decode_step(np.full(3, L, np.int32), merges=False))
        inputs = torch.zeros(3, L), torch.zeros(ROWS, K, dtype=torch.int32)
        module(*inputs)  # may trace it, which is a call too
        with torch.profiler.profile() as profile:
            module(*inputs)
    called = {event.name for event in profile.events() if event.name.endswith("::sparse_attn_indexer")}
    return module.was_aot_compile_fn_loaded_from_disk, called


class Process:
    """A process of vLLM."""

    def __init__(self, pool: RankPool) -> None:
        self.pool = pool

    def run(self, splitting_ops=None, env=None, version=None, topk=None) -> tuple[bool, set[str]]:
        (result,) = self.pool.run(run, splitting_ops, env or {}, version, topk)
        return result


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Process]]:
    """Without and with the plugin."""
    folder = str(tmp_path_factory.mktemp("vllm"))
    with RankPool(1) as without, RankPool(1) as with_plugin:
        without.run(start, folder, False)
        with_plugin.run(start, folder, True)
        yield Process(without), Process(with_plugin)


def test_a_graph_compiled_without_the_plugin_is_not_used_with_it(processes: tuple[Process, Process]) -> None:
    without, with_plugin = processes
    assert [without.run() for _ in range(2)] == [(False, THEIRS), (True, THEIRS)]
    assert [with_plugin.run() for _ in range(2)] == [(False, OURS), (True, OURS)]


def test_a_graph_compiled_with_the_plugin_is_not_used_without_it(processes: tuple[Process, Process]) -> None:
    without, with_plugin = processes
    assert with_plugin.run(splitting_ops=[]) == (False, OURS)
    assert without.run(splitting_ops=[]) == (False, THEIRS)
    assert with_plugin.run(splitting_ops=[]) == (True, OURS)


@pytest.mark.parametrize(
    "changed",
    [
        {"env": {"VLLM_TOPKX_LOCAL_TOPK": "48"}},
        {"env": {"VLLM_TOPKX_MAX_ROWS": "48"}},
        {"version": "0.0.0"},
        {"topk": 48},
        {"topk": 56},
    ],
    ids=str,
)
def test_a_graph_compiled_under_other_settings_is_not_used(
    processes: tuple[Process, Process], changed: dict[str, object]
) -> None:
    with_plugin = processes[1]
    with_plugin.run()
    assert with_plugin.run(**changed) == (False, OURS)
    assert with_plugin.run() == (True, OURS)
