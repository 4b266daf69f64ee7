"""vLLM's own merge, the function ``_merge_dcp_topk_global``, replaced by the exchange.

It is the one place through which every sparse layer goes, compiled or eager. The function that is put there
decides from values that all ranks of the group share (shapes, dtypes, W, and what they agreed on in
:mod:`.reservation`), as a rank that took vLLM's path alone would wait for the others for ever.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..ops.errors import TopkxError
from .reservation import Plan, plans, reserve_for
from .shadow_rows import Rows

log = logging.getLogger("vllm.topkx")

SOURCE = "vllm.model_executor.layers.sparse_attn_indexer"
#: The variant of GLM-5.x, which merges pools of tokens. It imports the function by name.
KPOOL = "vllm.models.glm5next.nvidia.sparse_indexer"
FUNCTION = "_merge_dcp_topk_global"
PARAMETERS = ("logits", "topk_indices", "topk_tokens", "dcp_rank", "dcp_world_size", "cp_interleave", "row_starts")

#: Calls of the replaced function with more than one rank in this process, by what became of them:
#: ``"exchange"``, ``"shadow"``, or the key of the reason in :data:`LEFT_ALONE`. A replayed CUDA graph calls nothing.
calls: Counter[str] = Counter()

LEFT_ALONE = {
    "unreserved": "no exchange was reserved for this group and K",
    "refused": "see the warning above",
    "rows": "more rows than the exchange holds (VLLM_TOPKX_MAX_ROWS)",
    "tensors": "the exchange takes float32 logits [rows, positions] and int32 indices [rows, K] on its own device",
    "lane": "a micro-batch without a lane",
}

Merge = Callable[..., None]


def take_over(module: ModuleType) -> None:
    """Replaces the function in ``module`` (:data:`SOURCE`) and wherever it was imported by name before.

    Modules that import it later get the replacement, which :func:`.import_hook.when_imported` puts in place
    before any import of ``module`` returns.
    """
    original = getattr(module, FUNCTION, None)
    if original is None:
        raise TopkxError(f"it has no {FUNCTION}")
    if original_of(original) is not None:
        return
    found = tuple(inspect.signature(original).parameters)
    if found != PARAMETERS:
        raise TopkxError(f"{FUNCTION} has other parameters than are known: {', '.join(found)}")
    _check_names(module, "SparseAttnIndexer", "get_dcp_group")
    merge = _replacement(module, original)
    _reserve_at_construction(module, module.SparseAttnIndexer, kpool=False)
    setattr(module, FUNCTION, merge)
    for name, importer in list(sys.modules.items()):
        if name.startswith("vllm.") and getattr(importer, "__dict__", {}).get(FUNCTION) is original:
            setattr(importer, FUNCTION, merge)


def take_over_kpool(module: ModuleType) -> None:
    """Reserves for the layers of ``module`` (:data:`KPOOL`), whose function :func:`take_over` replaced."""
    if original_of(getattr(module, FUNCTION, None)) is None:
        raise TopkxError(f"its {FUNCTION} is not the one that was replaced in {SOURCE}")
    _check_names(module, "SparseAttnIndexerKpool", "get_dcp_group")
    _reserve_at_construction(module, module.SparseAttnIndexerKpool, kpool=True)


def original_of(function: object) -> Merge | None:
    """vLLM's function that ``function`` replaced; None for any other."""
    return getattr(function, "topkx_original", None)


def _check_names(module: ModuleType, *names: str) -> None:
    for name in names:
        if not hasattr(module, name):
            raise TopkxError(f"it has no {name}")


def _reserve_at_construction(module: ModuleType, layer: type, kpool: bool) -> None:
    """Lets every layer see to its exchange when it is made: before memory is profiled and graphs are captured."""
    construct = layer.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        reserve_for(self, module.get_dcp_group, kpool)

    layer.__init__ = init


def _replacement(module: ModuleType, original: Merge) -> Merge:
    @functools.wraps(original)
    def merge(
        logits: torch.Tensor,
        topk_indices: torch.Tensor,
        topk_tokens: int,
        dcp_rank: int,
        dcp_world_size: int,
        cp_interleave: int,
        row_starts: torch.Tensor | None = None,
    ) -> None:
        call = (logits, topk_indices, topk_tokens, dcp_rank, dcp_world_size, cp_interleave, row_starts)
        if dcp_world_size <= 1:
            return original(*call)
        plan = plans.get((module.get_dcp_group().unique_name, topk_tokens))
        reason = _left_alone(plan, logits, topk_indices, dcp_world_size)
        if reason is not None:
            _count(reason, topk_indices)
            return original(*call)
        if plan.shadow is None:
            calls["exchange"] += 1
            return _exchange(plan, *call)
        calls["shadow"] += 1
        local_ids = topk_indices.clone(memory_format=torch.contiguous_format)
        ours = local_ids.clone()
        _exchange(plan, logits, ours, *call[2:])
        original(*call)
        rows = Rows(logits, local_ids, row_starts, ours, topk_indices, dcp_rank, dcp_world_size, cp_interleave)
        plan.shadow.compare(rows)
        return None

    merge.topkx_original = original
    return merge


def _left_alone(plan: Plan | None, logits: torch.Tensor, topk_indices: torch.Tensor, world_size: int) -> str | None:
    """Why vLLM's own function is called, a key of :data:`LEFT_ALONE`; None for a call that the exchange takes.

    Nothing here may differ between ranks. How many positions there are, strides and whether there are
    ``row_starts`` may: a rank whose shard is empty has other logits than its peers.
    """
    if plan is None or world_size != plan.world_size:
        return "unreserved"
    if plan.refusal is not None:
        return "refused"
    if (
        logits.dtype is not plan.dtype
        or topk_indices.dtype is not torch.int32
        or logits.dim() != 2
        or topk_indices.dim() != 2
        or topk_indices.shape[1] != plan.topk
        or logits.shape[0] != topk_indices.shape[0]
        or logits.device != plan.device
        or topk_indices.device != plan.device
    ):
        return "tensors"
    if topk_indices.shape[0] > plan.rows:
        return "rows"
    return None if plan.lane() < plan.lanes else "lane"


def _count(reason: str, topk_indices: torch.Tensor) -> None:
    calls[reason] += 1
    if calls[reason] == 1 and reason != "refused":
        # Large prefill chunks are expected, the rest is not.
        level = logging.INFO if reason == "rows" else logging.WARNING
        log.log(
            level,
            "vllm-topkx leaves a DCP merge of shape %s to vLLM: %s (said once, counted from here)",
            list(topk_indices.shape),
            LEFT_ALONE[reason],
        )


def _exchange(
    plan: Plan,
    logits: torch.Tensor,
    topk_indices: torch.Tensor,
    topk: int,
    rank: int,
    world_size: int,
    interleave: int,
    row_starts: torch.Tensor | None,
) -> None:
    # vLLM's function takes any strides and row starts of any integer type; none of them is what ranks share,
    # so a copy is made here where the kernels need one. vLLM 0.26 to 0.33 never passes such a tensor.
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if row_starts is not None and row_starts.dtype is not torch.int32:
        row_starts = row_starts.to(torch.int32)
    ids = topk_indices if topk_indices.stride(1) == 1 else topk_indices.contiguous()
    torch.ops.topkx.merge_dcp_topk_(
        logits, ids, topk, rank, world_size, interleave, row_starts,
        group=plan.group, local_topk=plan.local_topk, lane=plan.lane(),
    )  # fmt: skip
    if ids is not topk_indices:
        topk_indices.copy_(ids)
