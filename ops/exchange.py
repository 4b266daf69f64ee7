"""Exchanges: what one is, how a group reserves one, and how a call finds it.

The protocol itself (slots, epochs, parity) is stated in ``docs/protocol.md``; the backends hold the code
that keeps it.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..settings import Settings
from .checks import check_memory, check_topk, check_world, require
from .errors import TopkxError
from .groups import find_group, gather_from_ranks, resolve_group
from .layouts import default_local_topk, exchange_bytes, layout_of, rescue_slots


@dataclass(frozen=True)
class ExchangeSettings:
    """What all ranks of an exchange must agree on, beside its name."""

    rows: int
    topk: int
    local_topk: int
    layout: str


class TopkExchange(ABC):
    """One group's memory for exchanging top-K candidates, and the epochs of its rows.

    Owned slots: int32 ``[2, W, rows, 4 * ll_pairs]`` (parity, source rank, row, LL pairs) written by the
    peers, and, when a rank sends fewer than K candidates, rescue lists int32
    ``[rescue_slots, rows, 4 * ll_pairs]``. Made by :func:`reserve`.

    Attributes:
        group: name of the process group.
        rank, world_size: this process's place in it, and its size.
        device: where words, slots and outputs lie.
        lane: which of several micro-batches in flight uses it.
        epoch: int32 ``[rows]``, calls each row took part in (modulo 2**32).
        list_epoch: int32 ``[rescue_slots, rows]``, times each rescue list was used.
        failure: the error after which the exchange can no longer be used, or None.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, lane: int, settings: ExchangeSettings, timeout_s: float
    ) -> None:
        self.group = group.group_name
        self.rank, self.world_size = group.rank(), group.size()
        self.device, self.lane, self.settings, self.timeout_s = device, lane, settings, timeout_s
        self.rescue_slots = rescue_slots(settings.topk, settings.local_topk)
        self.epoch = torch.zeros(settings.rows, dtype=torch.int32, device=device)
        self.list_epoch = torch.zeros(self.rescue_slots, settings.rows, dtype=torch.int32, device=device)
        self.failure: Exception | None = None
        self._process_group = weakref.ref(group)

    @property
    def rows(self) -> int:
        """Most rows of a call."""
        return self.settings.rows

    @property
    def nbytes(self) -> int:
        """Bytes of peer-visible memory on this rank."""
        s = self.settings
        return exchange_bytes(self.world_size, s.rows, s.topk, s.local_topk, s.layout)

    def belongs_to(self, group: dist.ProcessGroup) -> bool:
        """Whether ``group`` is the group it was reserved for, not a later one of the same name."""
        return self._process_group() is group

    def check_call(self, rows: int | torch.SymInt, topk: int, layout: str) -> None:
        """Refuses a call that this exchange was not reserved for."""
        if self.failure is not None:
            raise self.failure
        s = self.settings
        require(
            rows <= s.rows,
            f"{rows} rows: the exchange of group {self.group!r} has {s.rows} reserved; "
            f"call vllm_topkx.reserve(group, rows=...) with the most rows you need, before capturing CUDA graphs",
        )
        require(
            topk == s.topk and layout == s.layout,
            f"topk {topk} in layout {layout}: the exchange of group {self.group!r}, local_topk {s.local_topk}, "
            f"lane {self.lane} was reserved for topk {s.topk} in layout {s.layout}; use another lane",
        )

    @abstractmethod
    def close(self) -> None:
        """Gives the memory back. Later calls are refused."""


@dataclass(frozen=True)
class _Name:
    """What tells exchanges apart."""

    group: str
    device: torch.device
    local_topk: int
    lane: int


_exchanges: dict[_Name, TopkExchange] = {}
#: Exchanges that were outgrown: graphs that captured them may still be replayed.
_outgrown: list[TopkExchange] = []


def _device(device: torch.device | str | None) -> torch.device:
    """``device`` with its index; the current GPU, else the CPU, for None."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def reserve(
    group: dist.ProcessGroup | str,
    rows: int,
    topk: int,
    *,
    local_topk: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    lane: int = 0,
) -> TopkExchange:
    """The exchange of ``group`` for calls of up to ``rows`` rows; made when there is none that large.

    Collective, also when there is nothing to make: every rank of the group calls it with the same
    arguments, outside CUDA graph capture. When one rank cannot, all ranks raise. Growing makes a new
    exchange; the old one stays alive for graphs that captured it.

    Args:
        group: process group or its name; 2 to 16 ranks.
        rows: most query rows of one call, at most ``VLLM_TOPKX_MAX_ROWS``.
        topk: K, 1 to 4096.
        local_topk: N, candidates each rank sends in round 1; default ``default_local_topk(topk, W)``.
        dtype: of the scores, ``torch.float32`` or ``torch.bfloat16``; it fixes the word layout.
        device: of the scores; default the current GPU, else the CPU.
        lane: calls that can be in flight at once (micro-batches on two streams) use different lanes.

    Raises:
        TopkxError: a refused argument, ranks that disagree, capture, or a backend that cannot be had.
    """
    device = _device(device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise TopkxError("reserve() under CUDA graph capture: reserve the exchange before you capture")
    process_group = resolve_group(group) if isinstance(group, str) else group
    if not isinstance(group, str) and find_group(group.group_name) is not group:
        raise TopkxError(f"group {group.group_name!r} was destroyed: pass a live process group")
    world_size = process_group.size()
    check_world(world_size)
    env = Settings.from_env()
    if local_topk is None:
        local_topk = min(env.local_topk or default_local_topk(topk, world_size), topk)
    check_topk(topk, local_topk)
    require(
        1 <= rows <= env.max_rows,
        f"{rows} rows: an exchange is reserved for 1..{env.max_rows} (VLLM_TOPKX_MAX_ROWS raises the limit)",
    )
    require(lane >= 0, f"lane {lane}: must be 0 or more")
    settings = ExchangeSettings(rows, topk, local_topk, layout_of(dtype).name)
    check_memory(world_size, rows, topk, local_topk, settings.layout)
    name = _Name(process_group.group_name, device, local_topk, lane)
    old = _exchanges.get(name)
    if old is not None and old.belongs_to(process_group):
        same = (old.settings.topk, old.settings.layout) == (topk, settings.layout)
        require(
            same,
            f"group {name.group!r} has an exchange for topk {old.settings.topk}, {old.settings.layout} with "
            f"local_topk {local_topk}, lane {lane}; topk {topk}, {settings.layout} needs another lane",
        )
    usable = old is not None and old.failure is None and old.belongs_to(process_group)
    all_usable = _agree(process_group, (local_topk, lane, device.type, settings), usable)
    if old is not None and all_usable and old.rows >= rows:
        return old
    exchange = _build(process_group, device, lane, settings, env.timeout_s)
    if old is not None and all_usable:
        _outgrown.append(old)
    elif old is not None:
        old.close()
    _exchanges[name] = exchange
    return exchange


def _agree(group: dist.ProcessGroup, wanted: tuple, usable: bool) -> bool:
    """Whether every rank's present exchange is usable; raises on all ranks when they want different ones."""
    asked = gather_from_ranks(group, (wanted, usable))
    for rank, (other, _) in enumerate(asked):
        if other != asked[0][0]:
            raise TopkxError(f"reserve() differs between ranks: rank 0 asks for {asked[0][0]}, rank {rank} for {other}")
    return all(usable for _, usable in asked)


def _build(
    group: dist.ProcessGroup, device: torch.device, lane: int, settings: ExchangeSettings, timeout_s: float
) -> TopkExchange:
    if device.type == "cpu":
        from .cpu.exchange import SharedMemoryExchange

        return SharedMemoryExchange(group, device, lane, settings, timeout_s)
    if device.type == "cuda":
        from .cute.exchange import SymmetricMemoryExchange

        return SymmetricMemoryExchange(group, device, lane, settings, timeout_s)
    raise TopkxError(f"device {device}: an exchange lives on a CUDA GPU or the CPU")


def find_exchange(group: str, device: torch.device, local_topk: int, lane: int) -> TopkExchange | None:
    """The exchange that a call with these arguments uses, or None when none was reserved."""
    process_group = find_group(group)
    if process_group is None:
        return None
    exchange = _exchanges.get(_Name(process_group.group_name, _device(device), local_topk, lane))
    return exchange if exchange is not None and exchange.belongs_to(process_group) else None


def require_exchange(
    group: str,
    world_size: int,
    device: torch.device,
    rows: int | torch.SymInt,
    topk: int,
    local_topk: int,
    layout: str,
    lane: int,
) -> TopkExchange:
    """The exchange that a call with these arguments uses; refuses when the group or the reservation does not fit."""
    resolve_group(group, world_size)
    exchange = find_exchange(group, device, local_topk, lane)
    if exchange is None:
        raise TopkxError(
            f"no exchange is reserved for group {group!r} on {device} with local_topk {local_topk}, lane {lane}: "
            f"call vllm_topkx.reserve(group, rows=..., topk={topk}, local_topk={local_topk}) first, on every rank"
        )
    exchange.check_call(rows, topk, layout)
    return exchange


def reserved() -> list[str]:
    """One line an exchange: part of what compiled graphs depend on (a pass's ``uuid``)."""
    return sorted(
        f"{name.group} of {exchange.world_size} ranks, {name.device.type}, lane {name.lane}, {exchange.settings}"
        for name, exchange in _exchanges.items()
    )


def release_all() -> None:
    """Closes every exchange of this process, outgrown ones too."""
    for exchange in (*_exchanges.values(), *_outgrown):
        exchange.close()
    _exchanges.clear()
    _outgrown.clear()


def _disown() -> None:
    """In a forked child: the exchanges are its parent's, and a call would use the parent's epochs a second time."""
    for exchange in (*_exchanges.values(), *_outgrown):
        if exchange.failure is None:
            exchange.failure = TopkxError(
                f"the exchange of group {exchange.group!r} belongs to the process that forked this one: start ranks "
                f"with spawn or forkserver, and reserve in each of them"
            )


os.register_at_fork(after_in_child=_disown)
