"""The exchange pass among vLLM's own post-grad passes, and in the keys of its compile caches."""

from __future__ import annotations

import functools
import os
from types import ModuleType

from torch import fx

from ..settings import VARIABLES

#: Not a setting: a name under which vLLM's compile hash finds what our passes depend on.
CACHE_KEY = "VLLM_TOPKX_CACHE_KEY"


def add_cache_key(envs: ModuleType) -> None:
    """Makes our code and settings part of every compile cache key of vLLM.

    vLLM finds a compiled graph by a hash of its own configuration and environment variables before any
    pass is asked for its ``uuid``; a graph that was compiled without the plugin would be used with it.
    """
    from ..fx_passes.cache_key import pass_uuid

    envs.environment_variables[CACHE_KEY] = functools.partial(pass_uuid, "vllm")
    for name in VARIABLES:  # vLLM warns of VLLM_ variables that it does not know
        envs.environment_variables.setdefault(name, functools.partial(os.environ.get, name))


def add_post_grad_pass(backends: ModuleType) -> None:
    """Adds the pass wherever vLLM configures its post-grad passes (``VllmBackend.configure_post_pass``)."""
    from vllm.compilation.passes.inductor_pass import InductorPass, get_pass_context

    from ..fx_passes import ExchangeMergePass

    class TopkxPass(InductorPass):
        """:class:`ExchangeMergePass`, whose rows are bounded by the range that vLLM compiles for."""

        def __call__(self, graph: fx.Graph) -> None:
            ExchangeMergePass(max_rows=get_pass_context().compile_range.end)(graph)

        def uuid(self) -> str:
            return ExchangeMergePass(max_rows=get_pass_context().compile_range.end).uuid()

    configure = backends.VllmBackend.configure_post_pass

    @functools.wraps(configure)
    def configure_post_pass(self) -> None:
        configure(self)
        self.pass_manager.add(TopkxPass())

    backends.VllmBackend.configure_post_pass = configure_post_pass
