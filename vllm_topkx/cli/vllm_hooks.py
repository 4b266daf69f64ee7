"""What the plugin hooks into in vLLM, and whether it is there: read from vLLM's source, installed or not."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ..plugin import merge
from .machine import version_of
from .source_tree import NotFoundInSource, SourceTree, calls, has_string, mentions, parameters

ENTRY_POINTS, PLUGIN = "vllm.general_plugins", "topkx"
#: What is lost without some hooks: all merges stay vLLM's.
EVERYTHING = "everything"
OP = "sparse_attn_indexer"
CONFIG, PARALLEL, SCHEDULER = "config/vllm.py", "config/parallel.py", "config/scheduler.py"
COMPILATION, BACKENDS = "config/compilation.py", "compilation/backends.py"
INDUCTOR_PASS, PASS_MANAGER = "compilation/passes/inductor_pass.py", "compilation/passes/pass_manager.py"
GROUPS, MICRO_BATCHES = "distributed/parallel_state.py", "v1/worker/ubatching.py"


def _file(module: str) -> str:
    return module.removeprefix("vllm.").replace(".", "/") + ".py"


INDEXER, KPOOL = _file(merge.SOURCE), _file(merge.KPOOL)


class NotInThisVersion(Exception):
    """What a hook is for does not exist in this vLLM, and nothing is lost."""


@dataclass(frozen=True)
class Hook:
    """Something of vLLM's that the plugin builds on.

    Attributes:
        name: what it is.
        lost: what does not work without it.
        check: looks into the tree of the package ``vllm``; raises :class:`NotFoundInSource` when it is not as
            the plugin knows it, or :class:`NotInThisVersion`.
    """

    name: str
    lost: str
    check: Callable[[SourceTree], None]


@dataclass(frozen=True)
class Finding:
    """Whether ``hook`` holds; None when it is not needed in this vLLM. ``reason`` says why it does not hold."""

    hook: Hook
    holds: bool | None
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {"hook": self.hook.name, "holds": self.holds, "reason": self.reason, "lost": self.hook.lost}


def first_loss_of_everything(findings: list[Finding]) -> str | None:
    """Why the plugin can take over nothing, by ``findings``; None when it can."""
    return next((f.reason for f in findings if f.holds is False and f.hook.lost == EVERYTHING), None)


def check_hooks(root: Path) -> list[Finding]:
    """All of :data:`HOOKS` in the package ``vllm`` in the folder ``root``."""
    tree, found = SourceTree(root), []
    for hook in HOOKS:
        try:
            hook.check(tree)
            found.append(Finding(hook, True))
        except NotInThisVersion:
            found.append(Finding(hook, None))
        except NotFoundInSource as error:
            found.append(Finding(hook, False, str(error)))
    return found


def installed_root() -> Path | None:
    """The folder of the installed vLLM, which is not imported; None without one."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def plugin_problem(mode: str) -> str | None:
    """Why vLLM will not load the plugin, or why it will do nothing; None when it takes over.

    Args:
        mode: the setting ``VLLM_TOPKX``.
    """
    if version_of("vllm") is None:
        return "vLLM is not installed: pip install 'vllm-topkx[vllm]'"
    if PLUGIN not in {entry.name for entry in metadata.entry_points(group=ENTRY_POINTS)}:
        return f"no entry point {PLUGIN!r} in the group {ENTRY_POINTS}: reinstall vllm-topkx"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed!r} leaves {PLUGIN!r} out"
    return "VLLM_TOPKX=0 turns it off" if mode == "0" else None


def _loader(tree: SourceTree) -> None:
    loader, worker = "plugins/__init__.py", "v1/worker/worker_base.py"
    tree.function(loader, "load_general_plugins")
    if not has_string(tree.module(loader), ENTRY_POINTS):
        raise NotFoundInSource(f"{loader} does not name the group {ENTRY_POINTS}")
    if not calls(tree.module(worker), "load_general_plugins"):
        raise NotFoundInSource(f"{worker} does not call load_general_plugins")


def _merge(tree: SourceTree) -> None:
    found = parameters(tree.function(INDEXER, merge.FUNCTION))
    if found != merge.PARAMETERS:
        raise NotFoundInSource(f"{merge.FUNCTION} has other parameters than are known: {', '.join(found)}")
    if not calls(tree.function(INDEXER, OP), merge.FUNCTION):
        raise NotFoundInSource(f"{OP} in {INDEXER} does not call {merge.FUNCTION}")


def _layers(tree: SourceTree) -> None:
    tree.function(INDEXER, "__init__", "SparseAttnIndexer")
    tree.needs_attributes(INDEXER, "SparseAttnIndexer", "topk_tokens", "max_model_len")
    tree.needs_names(INDEXER, "get_dcp_group")
    # Models that call the function themselves, without the layer's forward.
    for path in tree.importers(OP):
        if not calls(tree.module(path), "SparseAttnIndexer"):
            raise NotFoundInSource(f"{path} calls {OP} and makes no SparseAttnIndexer")


def _configuration(tree: SourceTree) -> None:
    tree.function(CONFIG, "get_current_vllm_config")
    tree.needs_attributes(CONFIG, "VllmConfig", "model_config", "parallel_config", "scheduler_config")
    tree.needs_attributes(
        PARALLEL, "ParallelConfig",
        "decode_context_parallel_size", "cp_kv_cache_interleave_size", "use_ubatching", "num_ubatches",
    )  # fmt: skip
    tree.needs_attributes(SCHEDULER, "SchedulerConfig", "max_num_batched_tokens")


def _coordinator(tree: SourceTree) -> None:
    tree.needs_attributes(
        GROUPS, "GroupCoordinator",
        "unique_name", "rank_in_group", "device", "cpu_group", "device_group", "all_gather",
    )  # fmt: skip
    tree.needs_names(GROUPS, "get_dcp_group", "_groups")


def _micro_batches(tree: SourceTree) -> None:
    tree.function(MICRO_BATCHES, "dbo_current_ubatch_id")


def _kpool(tree: SourceTree) -> None:
    if not tree.has(KPOOL):
        raise NotInThisVersion
    if KPOOL not in tree.importers(merge.FUNCTION):
        raise NotFoundInSource(f"{KPOOL} does not import {merge.FUNCTION}")
    tree.function(KPOOL, "__init__", "SparseAttnIndexerKpool")
    tree.needs_attributes(KPOOL, "SparseAttnIndexerKpool", "topk_tokens", "max_pool_len")
    tree.needs_names(KPOOL, "get_dcp_group")


def _other_importers(tree: SourceTree) -> None:
    others = [path for path in tree.importers(merge.FUNCTION) if path != KPOOL]
    if others:
        raise NotFoundInSource(f"{merge.FUNCTION} is imported by modules that are not known: {', '.join(others)}")


def _cache_key(tree: SourceTree) -> None:
    tree.needs_names("envs.py", "environment_variables")
    if not mentions(tree.function("envs.py", "compile_factors"), "environment_variables"):
        raise NotFoundInSource("compile_factors in envs.py does not go by environment_variables")


def _post_grad(tree: SourceTree) -> None:
    if not mentions(tree.function(BACKENDS, "configure_post_pass", "VllmBackend"), "pass_manager"):
        raise NotFoundInSource(f"configure_post_pass in {BACKENDS} has no pass_manager")
    tree.function(PASS_MANAGER, "add", "PostGradPassManager")
    tree.class_(INDUCTOR_PASS, "InductorPass")
    tree.function(INDUCTOR_PASS, "get_pass_context")
    tree.needs_attributes(INDUCTOR_PASS, "PassContext", "compile_range")


def _op(tree: SourceTree) -> None:
    if "dcp_world_size" not in parameters(tree.function(INDEXER, OP)):
        raise NotFoundInSource(f"{OP} in {INDEXER} has no dcp_world_size")
    if not has_string(tree.module(INDEXER), OP) or not calls(tree.module(INDEXER), "direct_register_custom_op"):
        raise NotFoundInSource(f"{INDEXER} does not register vllm::{OP}")


def _split(tree: SourceTree) -> None:
    if parameters(tree.function(BACKENDS, "split_graph")) != ("graph", "splitting_ops"):
        raise NotFoundInSource(f"split_graph in {BACKENDS} has other parameters than are known")
    tree.function(BACKENDS, "__call__", "VllmBackend")
    tree.needs_names(BACKENDS, "inductor_partition_rule_context")
    if not has_string(tree.module(COMPILATION), f"vllm::{OP}"):
        raise NotFoundInSource(f"{COMPILATION} does not split at vllm::{OP}")


#: Everything that the plugin builds on.
HOOKS = (
    Hook("plugins are loaded in every worker", EVERYTHING, _loader),
    Hook(f"`{merge.FUNCTION}` and its parameters", EVERYTHING, _merge),
    Hook("`SparseAttnIndexer` layers", EVERYTHING, _layers),
    Hook("configuration that a reservation reads", EVERYTHING, _configuration),
    Hook("the DCP group's coordinator", EVERYTHING, _coordinator),
    Hook("micro-batch ids", "merges under dual batch overlap stay vLLM's", _micro_batches),
    Hook("kpool indexer of GLM-5.x", "GLM-5.x's merges stay vLLM's", _kpool),
    Hook("no other importer of the merge", "the merges of that module's layers stay vLLM's", _other_importers),
    Hook("compile cache keys", "graphs compiled without the plugin may be used with it", _cache_key),
    Hook("post-grad passes", "graphs are not rewritten when Inductor gets them whole", _post_grad),
    Hook(f"`vllm::{OP}` with `dcp_world_size`", "the indexer's op is not replaced in graphs", _op),
    Hook("graph splitting and partition rules", "the indexer's op is not replaced in split graphs", _split),
)
