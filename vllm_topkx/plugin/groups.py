"""vLLM's names of process groups."""

from __future__ import annotations

from types import ModuleType

import torch.distributed as dist

from ..ops.groups import add_group_resolver


def add_resolver(parallel_state: ModuleType) -> None:
    """Makes the names in vLLM's graphs (``"dcp:0"``) known to the ops: their coordinator's device group."""
    groups = parallel_state._groups

    def resolve(name: str) -> dist.ProcessGroup | None:
        coordinator = groups[name]() if name in groups else None
        return None if coordinator is None else coordinator.device_group

    add_group_resolver(resolve)
