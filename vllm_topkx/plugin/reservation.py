"""Exchanges for vLLM's merges: agreed on by all ranks of the DCP group when the first sparse layer is made.

Model construction is the point at which all ranks make the same layers in the same order, the configuration
is at hand, memory is not profiled yet, and no graph is captured. Whatever fails on one rank, all ranks learn
of it before any goes on, and all leave the merge to vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .._version import __version__
from ..ops import TopkExchange, checks, reserve
from ..ops.errors import TopkxError
from ..ops.groups import gather_from_ranks
from ..ops.layouts import FP32, default_list_topk
from ..ops.spec import MergeSpec
from ..settings import Settings
from .shadow import Shadow

log = logging.getLogger("vllm.topkx")

Result = TypeVar("Result")
#: vLLM's logits may be some columns wider than the positions they are for.
SPARE_COLUMNS = 1024
TRANSPORTS = {"cuda": "NVLink peer stores", "cpu": "shared memory"}


def _only_lane() -> int:
    return 0


@dataclass(frozen=True)
class Plan:
    """What was agreed for the merges of one group and K. All of it is the same on all ranks.

    Attributes:
        group: vLLM's name of the DCP group.
        rows: most rows of a call.
        lanes: micro-batches that may be in flight.
        lane: which of them runs now; called at every merge.
        refusal: why there is no exchange, or None.
        shadow: counts what differs from vLLM's merge, whose result is served; None to serve ours.
    """

    group: str
    world_size: int
    topk: int
    device: torch.device
    local_topk: int = 0
    rows: int = 0
    lanes: int = 1
    lane: Callable[[], int] = _only_lane
    dtype: torch.dtype = FP32.dtype
    refusal: str | None = None
    shadow: Shadow | None = field(default=None, compare=False)


#: By name of the group, and K.
plans: dict[tuple[str, int], Plan] = {}
_said: set[str] = set()


@dataclass(frozen=True)
class _Wanted:
    """What a layer's merges need, read from the layer and vLLM's configuration."""

    world_size: int
    topk: int
    interleave: int
    columns: int
    rows: int
    lanes: int


def reserve_for(layer: Any, get_dcp_group: Callable[[], Any], kpool: bool) -> None:
    """Sees to the exchange that ``layer`` will merge through, if that was not done yet; never raises.

    Args:
        layer: a ``SparseAttnIndexer`` that was just made, or its kpool variant.
        get_dcp_group: vLLM's function of that name.
        kpool: whether K and the interleave are in pools of ``index_kpool`` tokens.
    """
    try:
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config()
        if config.parallel_config.decode_context_parallel_size <= 1:
            _say_once(logging.INFO, "nothing of vLLM is taken over: decode_context_parallel_size is 1")
            return
        coordinator = get_dcp_group()
        wanted = _read(layer, config, kpool)
        name = coordinator.unique_name, wanted.topk
        if name not in plans:
            plans[name] = _apart(coordinator.device, lambda: _plan(coordinator, wanted))
    except Exception as error:
        _say_once(logging.WARNING, f"DCP merges are left to vLLM: {type(error).__name__}: {error}")


def _say_once(level: int, text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.log(level, "vllm-topkx %s: %s", __version__, text)


def _read(layer: Any, config: Any, kpool: bool) -> _Wanted:
    parallel = config.parallel_config
    unit = (getattr(config.model_config.hf_text_config, "index_kpool", None) or 1) if kpool else 1
    columns = getattr(layer, "max_pool_len" if kpool else "max_model_len")
    return _Wanted(
        world_size=parallel.decode_context_parallel_size,
        topk=layer.topk_tokens // unit,
        interleave=max(1, parallel.cp_kv_cache_interleave_size // unit),
        columns=columns,
        rows=config.scheduler_config.max_num_batched_tokens,
        lanes=parallel.num_ubatches if parallel.use_ubatching else 1,
    )


def _apart(device: torch.device, function: Callable[[], Result]) -> Result:
    """Runs ``function`` in a thread of its own, and waits for it.

    vLLM makes models under a default device and, when it can sleep, with allocations going to a pool that it
    may discard. Both are a thread's own; the epochs of an exchange must not be lost to a sleep.
    """

    def run() -> Result:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return function()

    with ThreadPoolExecutor(1, thread_name_prefix="vllm-topkx") as executor:
        return executor.submit(run).result()


def _plan(coordinator: Any, wanted: _Wanted) -> Plan:
    """Collective: reserves, compiles and tries out; the plan says what came of it."""
    facts = {
        "group": coordinator.unique_name,
        "world_size": wanted.world_size,
        "topk": wanted.topk,
        "device": coordinator.device,
    }
    cpu_group = coordinator.cpu_group
    try:
        settings, *_ = _together(cpu_group, lambda: _check(wanted))
        rows, lanes = min(wanted.rows, settings.max_rows), wanted.lanes
        local_topk = _local_topk(settings, wanted)
        exchanges = _together(
            cpu_group,
            lambda: [
                reserve(
                    coordinator.unique_name, rows, wanted.topk,
                    local_topk=local_topk, dtype=FP32.dtype, device=coordinator.device, lane=lane,
                )
                for lane in range(lanes)
            ],
            agree=False,
        )  # fmt: skip
        _together(cpu_group, lambda: _compile(exchanges[0]))
        for exchange in exchanges:
            _together(cpu_group, lambda exchange=exchange: _try_out(exchange, coordinator.unique_name))
        lane = _together(cpu_group, lambda: _lane_function(lanes), agree=False)
        shadow = _together(cpu_group, lambda: _shadow(settings, coordinator, wanted), agree=False)
    except TopkxError as error:
        _say_once(logging.WARNING, f"DCP merges of K {wanted.topk} are left to vLLM, on all ranks: {error}")
        return Plan(**facts, refusal=str(error))
    does = "takes over the DCP top-K merge of every sparse layer"
    if shadow is not None:
        does = "runs beside the DCP top-K merge of every sparse layer, and vLLM's result is served (VLLM_TOPKX=shadow)"
    _say_once(
        logging.INFO,
        f"{does}: W {wanted.world_size}, K {wanted.topk}, N {local_topk}, layout {FP32.name}, calls of up to {rows} "
        f"rows, {lanes} lane{'s' * (lanes > 1)}, {TRANSPORTS[coordinator.device.type]}, "
        f"{sum(exchange.nbytes for exchange in exchanges) / 2**20:.1f} MiB a rank",
    )
    return Plan(**facts, local_topk=local_topk, rows=rows, lanes=lanes, lane=lane, shadow=shadow)


def _together(group: dist.ProcessGroup, step: Callable[[], Result], agree: bool = True) -> Result:
    """Collective: what ``step`` returns; when it raises on one rank, or returns another value, all ranks raise."""
    result, problem = None, None
    try:
        result = step()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    values = gather_from_ranks(group, result if agree else None, problem)
    for rank, value in enumerate(values):
        if value != values[0]:
            raise TopkxError(f"ranks differ: rank 0 has {values[0]}, rank {rank} has {value}")
    return result


def _check(wanted: _Wanted) -> tuple[Settings, _Wanted, str]:
    """What all ranks must agree on; refuses what no exchange can take, so that the op refuses no call of a layer."""
    checks.check_world(wanted.world_size)
    checks.check_topk(wanted.topk, 1)
    checks.check_positions(wanted.columns + SPARE_COLUMNS, FP32, wanted.interleave, wanted.world_size)
    return Settings.from_env(), wanted, __version__


def _local_topk(settings: Settings, wanted: _Wanted) -> int:
    """N: candidates each rank sends in round 1."""
    return min(settings.local_topk or default_list_topk(wanted.topk, wanted.world_size), wanted.topk)


def _lane_function(lanes: int) -> Callable[[], int]:
    if lanes == 1:
        return _only_lane
    from vllm.v1.worker.ubatching import dbo_current_ubatch_id

    return dbo_current_ubatch_id


def _shadow(settings: Settings, coordinator: Any, wanted: _Wanted) -> Shadow | None:
    if settings.mode != "shadow":
        return None
    rank, world_size = coordinator.rank_in_group, wanted.world_size
    return Shadow.started(coordinator.device, wanted.topk, rank, world_size, coordinator.all_gather)


def _compile(exchange: TopkExchange) -> None:
    """Compiles or loads the kernels, without a launch: a peer must not wait for a rank that cannot."""
    if exchange.device.type == "cuda":
        from ..ops.cute.launch import prepare_merge_dcp_topk

        s = exchange.settings
        spec = MergeSpec(exchange.rank, exchange.world_size, s.topk, s.local_topk, 1, FP32)
        for with_starts in (False, True):
            logits, indices, starts = _sample(exchange, with_starts)
            prepare_merge_dcp_topk(exchange, logits, indices, starts, spec)


def _try_out(exchange: TopkExchange, group: str) -> None:
    """Collective: one row merged for real, with and without row starts; refuses an exchange that errs."""
    for with_starts in (False, True):
        logits, indices, starts = _sample(exchange, with_starts)
        s = exchange.settings
        torch.ops.topkx.merge_dcp_topk_(
            logits, indices, s.topk, exchange.rank, exchange.world_size, 1, starts,
            group=group, local_topk=s.local_topk, lane=exchange.lane,
        )  # fmt: skip
        if exchange.device.type == "cuda":
            exchange.synchronize()
        found = sorted(i for i in indices.flatten().tolist() if i >= 0)
        best = list(range(min(s.topk, 2 * exchange.world_size)))
        if found != best:
            raise TopkxError(f"a trial merge gave {found[:8]} instead of {best[:8]}: please report this")


def _sample(exchange: TopkExchange, with_starts: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A row of two positions a rank, at interleave 1; scores fall with the global position."""
    ranks, rank, device = exchange.world_size, exchange.rank, exchange.device
    row = [0.0, -float(rank), -float(ranks + rank)]
    indices = torch.full((1, exchange.settings.topk), -1, dtype=torch.int32, device=device)
    indices[0, :2] = torch.arange(min(2, exchange.settings.topk), dtype=torch.int32, device=device)
    starts = torch.ones(1, dtype=torch.int32, device=device) if with_starts else None
    logits = torch.tensor([row if with_starts else row[1:]], dtype=torch.float32, device=device)
    return logits, indices, starts
