"""Groups by name: what an op's ``group`` argument means in this process.

Names are those of ``torch.distributed`` process groups. A host program with group names of its own
(vLLM's ``"dcp:0"``) adds a resolver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .errors import BackendUnavailableError, TopkxError

Resolver = Callable[[str], "dist.ProcessGroup | None"]
_resolvers: list[Resolver] = []


def add_group_resolver(resolver: Resolver) -> None:
    """Adds a function from a group name to a process group, or None for names it does not know."""
    if resolver not in _resolvers:
        _resolvers.append(resolver)


def find_group(name: str) -> dist.ProcessGroup | None:
    """The live process group called ``name``, or None."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    for resolver in _resolvers:
        if (group := resolver(name)) is not None:
            return group
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError):
        return None


def resolve_group(name: str, world_size: int | None = None) -> dist.ProcessGroup:
    """The live process group called ``name``.

    Raises:
        TopkxError: the group is unknown, destroyed, or not of ``world_size`` ranks.
    """
    group = find_group(name)
    if group is None:
        raise TopkxError(
            f"group {name!r} is unknown or was destroyed: pass the group_name of a live process group of this process"
        )
    if world_size is not None and group.size() != world_size:
        raise TopkxError(f"group {name!r} has {group.size()} ranks, but the call is for world size {world_size}")
    return group


def gather_from_ranks(group: dist.ProcessGroup, value: Any, error: str | None = None, what: str = "") -> list:
    """Collective: every rank's ``value``, by rank. Ranks go on together or raise together.

    Raises:
        BackendUnavailableError: on all ranks, when one has an ``error``; it names the first, and ``what`` it
            could not do.
    """
    answers: list = [None] * group.size()
    dist.all_gather_object(answers, (value, error), group=group)
    for rank, (_, found) in enumerate(answers):
        if found is not None:
            raise BackendUnavailableError(f"rank {rank}{what}: {found}")
    return [value for value, _ in answers]
