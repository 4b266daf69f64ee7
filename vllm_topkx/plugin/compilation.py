"""The passes where vLLM compiles, and in the keys of its compile caches.

A graph goes through vLLM's backend in one of two ways. Split at ``splitting_ops``, the indexer among them,
Inductor gets the pieces between and never meets the indexer: the passes run before the split. Left whole
(``splitting_ops`` is empty, or Inductor partitions), it comes to Inductor with all of its ops: the passes
run after vLLM's own post-grad passes. That place also takes the pieces.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import fx

from ..settings import VARIABLES

if TYPE_CHECKING:
    from vllm.compilation.backends import VllmBackend

    from ..fx_passes import PassSequence

log = logging.getLogger("vllm.topkx")

#: Not a setting: a name under which vLLM's compile hash finds what our passes depend on.
CACHE_KEY = "VLLM_TOPKX_CACHE_KEY"
_said: set[str] = set()


def add_cache_key(envs: ModuleType) -> None:
    """Makes our code and settings part of every compile cache key of vLLM.

    vLLM finds a compiled graph by a hash of its own configuration and environment variables before any
    pass is asked for its ``uuid``; a graph that was compiled without the plugin would be used with it.
    """
    from ..fx_passes.cache_key import pass_uuid

    envs.environment_variables[CACHE_KEY] = functools.partial(pass_uuid, "vllm")
    for name in VARIABLES:  # vLLM warns of VLLM_ variables that it does not know
        envs.environment_variables.setdefault(name, functools.partial(os.environ.get, name))


def add_passes(backends: ModuleType) -> None:
    """Runs the passes in ``VllmBackend``, and lets it split and partition at our indexer wherever it does at its own.

    The lists of the configuration stay what they are: vLLM hashes and checks them.
    """
    backend = backends.VllmBackend
    compile_graph, configure = backend.__call__, backend.configure_post_pass
    split, partition_rules = backends.split_graph, backends.inductor_partition_rule_context
    post_grad_pass = _post_grad_pass()
    _lower_like_vllms()

    @functools.wraps(compile_graph)
    def call(self: Any, graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _run_or_leave(functools.partial(_run_before_split, self), graph.graph)
        return compile_graph(self, graph, *args, **kwargs)

    @functools.wraps(configure)
    def configure_post_pass(self: Any) -> None:
        configure(self)
        self.pass_manager.add(post_grad_pass())

    @functools.wraps(split)
    def split_graph(graph: fx.GraphModule, splitting_ops: list[str]) -> Any:
        return split(graph, _with_ours(splitting_ops))

    @functools.wraps(partition_rules)
    def inductor_partition_rule_context(splitting_ops: list[str] | None) -> AbstractContextManager[None]:
        return partition_rules(_with_ours(splitting_ops))

    backend.__call__, backend.configure_post_pass = call, configure_post_pass
    backends.split_graph, backends.inductor_partition_rule_context = split_graph, inductor_partition_rule_context


def _run_before_split(backend: VllmBackend, graph: fx.Graph) -> None:
    """On Dynamo's graph, if it is to be split: a chain around a splitting op would be in no piece as a whole."""
    config = backend.compilation_config
    if config.splitting_ops and not config.use_inductor_graph_partition:
        _passes(backend.vllm_config.scheduler_config.max_num_batched_tokens, early=True)(graph)
        graph.owning_module.recompile()


def _passes(max_rows: int, early: bool = False) -> PassSequence:
    from ..fx_passes import ExchangeMergePass, IndexerPass, PassSequence

    return PassSequence([IndexerPass(), ExchangeMergePass(max_rows, early)])


def _post_grad_pass() -> type:
    """The class of what goes among vLLM's post-grad passes; rows are bounded by the range that vLLM compiles for."""
    from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context

    class TopkxPass(InductorPass):
        def __call__(self, graph: fx.Graph) -> None:
            _run_or_leave(lambda graph: self._passes()(graph), graph)

        def uuid(self) -> tuple | None:
            return self._passes().uuid()

        def _passes(self) -> PassSequence:
            return _passes(get_pass_context().compile_range.end)

    return TopkxPass


def _lower_like_vllms() -> None:
    """Lets Inductor take our indexer as it takes vLLM's.

    vLLM 0.33 exempts its own ops from the layout constraints of custom ops, which are copies in the graph, and
    from a log message that takes minutes in a large one.
    """
    from torch._inductor.lowering import FALLBACK_ALLOW_LIST

    from ..fx_passes.indexer import INDEXER, VLLM_INDEXER

    if VLLM_INDEXER in FALLBACK_ALLOW_LIST:
        FALLBACK_ALLOW_LIST.add(INDEXER)


def _with_ours(splitting_ops: list[str] | None) -> list[str] | None:
    """``splitting_ops``, and our indexer where vLLM's is in it."""
    from ..fx_passes.indexer import INDEXER, VLLM_INDEXER

    if splitting_ops and {VLLM_INDEXER, f"{VLLM_INDEXER}.default"} & set(splitting_ops):
        return [*splitting_ops, INDEXER]
    return splitting_ops


def _run_or_leave(graph_pass: Callable[[fx.Graph], None], graph: fx.Graph) -> None:
    """Runs ``graph_pass``; if it raises, ``graph`` is put back as it was, with one warning."""
    before = None
    try:
        before = copy.deepcopy(graph)
        graph_pass(graph)
    except Exception as error:
        if before is not None:
            _restore(graph, before)
        text = f"{type(error).__name__}: {error}"
        if text not in _said:
            _said.add(text)
            log.warning("vllm-topkx leaves a graph as vLLM made it, after an error: %s (said once)", text)


def _restore(graph: fx.Graph, before: fx.Graph) -> None:
    nodes = list(graph.nodes)
    for node in nodes:  # a broken graph may use values before they are made
        node.args, node.kwargs = (), {}
    for node in nodes:
        graph.erase_node(node)
    graph.output(graph.graph_copy(before, {}))
