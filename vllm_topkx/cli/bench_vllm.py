"""vLLM's own merge, imported from the installed vLLM (0.26 to 0.33); its kernels need no compiled extension."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..ops.errors import TopkxError
from ..ops.groups import gather_from_ranks
from ..ops.spec import KvMap
from ..ranks import RankContext

Tensor = torch.Tensor
Gather = Callable[[Tensor], Tensor]

#: The same names in 0.26.0 and 0.33.0; what they are built from changed.
_MERGE = "vllm.model_executor.kernels.attention.dsa.dcp_indexer_cutedsl"
_CONVERT = "vllm.v1.attention.backends.mla.sparse_utils"


class LeftOut(TopkxError):
    """A system cannot run here; says why."""


def _import(module: str, *names: str) -> list[Callable]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # not a line a rank about what it is without
    try:
        loaded = importlib.import_module(module)
        return [getattr(loaded, name) for name in names]
    except Exception as error:  # an import of vLLM runs much code of others
        raise LeftOut(f"{module} cannot be imported: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class VllmKernels:
    """The two kernels of vLLM's merge."""

    pack: Callable
    select: Callable

    @classmethod
    @functools.cache
    def load(cls) -> VllmKernels:
        """Raises ``LeftOut`` where they cannot be imported."""
        names = "pack_dcp_topk_candidates_cutedsl", "stable_topk_from_gathered_candidates_cutedsl"
        return cls(*_import(_MERGE, *names))

    def packed(self, logits: Tensor, indices: Tensor, rank: int, world_size: int, interleave: int) -> Tensor:
        """``[T, K, 2]``, allotted as ``_merge_dcp_topk_global`` does."""
        packed = torch.empty((*indices.shape, 2), dtype=torch.float32, device=indices.device)
        self.pack(logits, indices, packed, rank, world_size, interleave, None)
        return packed

    def merge(
        self, logits: Tensor, indices: Tensor, rank: int, world_size: int, interleave: int, gather: Gather
    ) -> None:
        """The body of ``_merge_dcp_topk_global``, on its two kernels: replaces ``indices`` by the global top-K."""
        gathered = gather(self.packed(logits, indices, rank, world_size, interleave))
        self.select(gathered, indices.shape[1], out=indices)


def filter_and_convert(
    indices: Tensor, kv: KvMap, rank: int, world_size: int, interleave: int
) -> tuple[Tensor, Tensor]:
    """vLLM's next step: rows and valid counts of this rank's own positions."""
    return _convert()(
        kv.req_id,
        kv.block_table,
        indices,
        dcp_size=world_size,
        dcp_rank=rank,
        cp_kv_cache_interleave_size=interleave,
        BLOCK_SIZE=kv.block_size,
        NUM_TOPK_TOKENS=indices.shape[1],
        return_valid_counts=True,
    )


@functools.cache
def _convert() -> Callable:
    return _import(_CONVERT, "triton_filter_and_convert_dcp_index")[0]


# the all-gather


def all_gather(context: RankContext) -> tuple[Gather, str]:
    """``get_dcp_group().all_gather(x, dim=1)``, as near to vLLM's as can be had here, and what it is.

    Collective: vLLM's group; else vLLM's NCCL communicator and else torch's, with the copy that
    vLLM's group makes after it.
    """
    refused = []
    for build, what in (
        (_group_coordinator, "vLLM's GroupCoordinator"),
        (_pynccl, "vLLM's PyNcclCommunicator, with the reorder copy of its group"),
        (_torch, "torch.distributed's NCCL group, with the reorder copy of vLLM's group"),
    ):
        gather, error = None, None
        try:
            gather = build(context)
            _try(gather, context)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        errors = agree(context.group, error)
        if gather is not None and not errors:
            return gather, what + ("; " + "; ".join(refused) if refused else "")
        refused.append(f"{what.split(',')[0]} failed ({errors[0]})" if errors else "")
    raise LeftOut(f"no all-gather: {'; '.join(refused)}")


def agree(group: dist.ProcessGroup, error: str | None) -> list[str]:
    """The ranks' errors, without None. Collective, so a barrier too."""
    return [" ".join(found.split()) for found in gather_from_ranks(group, error) if found is not None]


def _try(gather: Gather, context: RankContext) -> None:
    mine = torch.full((3, 2, 2), float(context.rank), device=context.device)
    wanted = torch.arange(context.world_size, device=context.device).repeat_interleave(2).float()
    torch.cuda.synchronize()
    got = gather(mine)
    torch.cuda.synchronize()
    if not torch.equal(got[1, :, 1], wanted):
        raise RuntimeError(f"it gathers {got[1, :, 1].tolist()}")


def _on_this_stream() -> None:
    """vLLM replaces ``torch.cuda.set_stream`` to keep track, and makes a stream of its own when it was told none."""
    importlib.import_module("vllm.utils.torch_utils")
    torch.cuda.set_stream(torch.cuda.current_stream())


def _group_coordinator(context: RankContext) -> Gather:
    state = importlib.import_module("vllm.distributed.parallel_state")
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cuda():  # known on all ranks alike, before anything collective
        raise RuntimeError("it finds no CUDA platform")
    _on_this_stream()
    ranks = dist.get_process_group_ranks(context.group)
    group = state.GroupCoordinator(
        group_ranks=[ranks],
        local_rank=context.rank,
        torch_distributed_backend="nccl",
        use_device_communicator=True,
        group_name="dcp",
    )
    nccl = getattr(group.device_communicator, "pynccl_comm", None)
    if nccl is None or nccl.disabled:
        raise RuntimeError("it has no NCCL communicator")
    return lambda packed: group.all_gather(packed, dim=1)


def _pynccl(context: RankContext) -> Gather:
    module = importlib.import_module("vllm.distributed.device_communicators.pynccl")
    _on_this_stream()
    gloo = dist.new_group(dist.get_process_group_ranks(context.group), backend="gloo")
    nccl = module.PyNcclCommunicator(gloo, context.device)
    if nccl.disabled:
        raise RuntimeError("it is disabled")

    def gather(packed: Tensor) -> Tensor:
        gathered = packed.new_empty((context.world_size * packed.shape[0], *packed.shape[1:]))
        nccl.all_gather(gathered, packed, stream=torch.cuda.current_stream())
        return _reordered(gathered, packed, context.world_size)

    return gather


def _torch(context: RankContext) -> Gather:
    def gather(packed: Tensor) -> Tensor:
        gathered = packed.new_empty((context.world_size * packed.shape[0], *packed.shape[1:]))
        dist.all_gather_into_tensor(gathered, packed, group=context.group)
        return _reordered(gathered, packed, context.world_size)

    return gather


def _reordered(gathered: Tensor, packed: Tensor, world_size: int) -> Tensor:
    """What vLLM's communicators do to put the ranks' parts along dimension 1."""
    rows, topk, two = packed.shape
    return gathered.reshape(world_size, rows, topk, two).movedim(0, 1).reshape(rows, world_size * topk, two)


# the local top-K


def local_topk_kernel(name: str) -> Callable[[Tensor, Tensor, Tensor], None]:
    """vLLM's compiled ``persistent_topk`` or ``top_k_per_row_decode`` as ``f(logits, lengths, out)``."""
    _import("vllm._custom_ops")
    if not hasattr(torch.ops._C, name):
        raise LeftOut(f"the installed vLLM has no compiled {name} (vllm._C)")
    kernel = getattr(torch.ops._C, name)

    def persistent(logits: Tensor, lengths: Tensor, out: Tensor) -> None:
        kernel(logits, lengths, out, workspace(logits.device), out.shape[1], logits.shape[1])

    def per_row(logits: Tensor, lengths: Tensor, out: Tensor) -> None:
        kernel(logits, 1, lengths, out, logits.shape[0], logits.stride(0), logits.stride(1), out.shape[1])

    @functools.cache
    def workspace(device: torch.device) -> Tensor:
        return torch.zeros(1024 * 1024, dtype=torch.uint8, device=device)  # RADIX_TOPK_WORKSPACE_SIZE

    return persistent if name == "persistent_topk" else per_row
