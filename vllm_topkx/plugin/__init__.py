"""The vLLM plugin: found through the entry point group ``vllm.general_plugins``, name ``topkx``.

vLLM calls :func:`register` in every process, often more than once. It imports nothing of vLLM: what is
put into a vLLM module is put there when vLLM itself imports that module. Whatever fails, fails with one
warning and leaves vLLM's own path in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType

from ..settings import Settings
from . import compilation, groups, indexer, merge
from .import_hook import when_imported

# A child of vLLM's logger, so that its level and handlers apply.
log = logging.getLogger("vllm.topkx")

PATCHES: tuple[tuple[str, Callable[[ModuleType], None]], ...] = (
    ("vllm.envs", compilation.add_cache_key),
    ("vllm.compilation.backends", compilation.add_passes),
    ("vllm.distributed.parallel_state", groups.add_resolver),
    (merge.SOURCE, merge.take_over),
    (merge.SOURCE, indexer.define_op),
    (merge.KPOOL, merge.take_over_kpool),
)


def register() -> None:
    """Puts the passes in place of vLLM's merge; re-entrant, never raises."""
    try:
        if Settings.from_env().mode == "0":
            log.info("vllm-topkx is off (VLLM_TOPKX=0)")
            return
        for module, patch in PATCHES:
            when_imported(module, patch, on_error=_warn)
    except Exception as error:
        _warn("vLLM", error)


def _warn(what: str, error: Exception) -> None:
    log.warning("vllm-topkx leaves %s as it is, or a part of it: %s: %s", what, type(error).__name__, error)
