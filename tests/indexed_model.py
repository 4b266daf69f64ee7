"""A model of two of vLLM's sparse-attention indexers, for ranks without a GPU: what the indexer tests compile.

Layers, op, metadata and merge are vLLM's own; the GPU's kernels before the merge are stood in for, as each
would be called: the logits are the scores that the model is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

K, L, ROWS = 64, 150, 32
CACHES = ("layers.0.k_cache", "layers.1.k_cache")
UNTOUCHED = -7  # what the buffer holds where nothing was written
#: The input of the model whose dimension differs from call to call.
DYNAMIC = {"scores": 0}


class Indexed(nn.Module):
    """Scores ``[T, L]`` to the ids of both layers, int64 ``[2, T, K]``; the second layer has the negated scores.

    Args:
        world_size: the layers' ``dcp_world_size``, if not the configuration's.
        mutated: what a layer writes to: ``"buffer"``, a persistent one, as in vLLM's models; ``"slice"``, the first
            rows of it; ``"clone"``, a copy of the argument ``initial``.
    """

    def __init__(self, world_size: int | None = None, mutated: str = "buffer") -> None:
        from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

        super().__init__()
        self.mutated = mutated
        self.buffer = torch.full((ROWS, K), UNTOUCHED, dtype=torch.int32)
        self.weights = torch.ones(ROWS, 1)
        self.layers = []
        for name in CACHES:
            cache = SimpleNamespace(prefix=name, kv_cache=torch.zeros(1, 1, 1))
            self.layers.append(
                SparseAttnIndexer(cache, 128, "ue8m0", K, 1, L, L, self.buffer, skip_k_cache_insert=True)
            )
        if world_size is not None:
            for layer in self.layers:
                layer.dcp_rank, layer.dcp_world_size = 0, world_size

    def forward(self, scores: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
        ids = []
        for layer, sign in zip(self.layers, (1, -1), strict=True):
            if self.mutated == "slice":
                layer.topk_indices_buffer = self.buffer[: scores.shape[0]]
            elif self.mutated == "clone":
                layer.topk_indices_buffer = initial.clone()
            layer.forward_cuda(scores, (scores * sign).unsqueeze(1), None, self.weights)
            ids.append(layer.topk_indices_buffer[: scores.shape[0]].long())  # not + 0, which becomes an alias
        return torch.stack(ids)


def indexer_arguments(scores: torch.Tensor, rank: int, world_size: int) -> dict[str, Any]:
    """What a layer passes to the op, or a model to the op's function."""
    from vllm.utils.torch_utils import _encode_layer_name

    none = {"q_scale": None, "k": None, "use_pcp": False, "pcp_shard_decode_requests": False}
    sizes = {"quant_block_size": 128, "head_dim": 1, "max_model_len": L, "total_seq_lens": L, "topk_tokens": K}
    return none | sizes | {
        "hidden_states": scores,
        "k_cache_prefix": _encode_layer_name(CACHES[0]),
        "kv_cache": torch.zeros(1, 1, 1),
        "q_quant": scores.unsqueeze(1),
        "weights": torch.ones(ROWS, 1),
        "scale_fmt": "ue8m0",
        "topk_indices_buffer": torch.full((ROWS, K), UNTOUCHED, dtype=torch.int32),
        "skip_k_cache_insert": True,
        "dense_mha_metadata_layer_name": _encode_layer_name(""),
        "dcp_rank": rank,
        "dcp_world_size": world_size,
    }  # fmt: skip


@contextmanager
def decode_step(ends: np.ndarray, merges: bool = True) -> Iterator[None]:
    """The forward context of a decode step with this rank's row ends ``[T]``, and kernels that run on the CPU."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers import sparse_attn_indexer as source
    from vllm.v1.attention.backends.mla import indexer as metadata

    def logits(q, kv_cache, weights, seq_lens, block_table, schedule_metadata, max_model_len, indices):
        return q[0].reshape(-1, L)

    def topk(logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len):
        for row, (values, end) in enumerate(zip(logits, seq_lens.flatten().tolist(), strict=True)):
            best = values[:end].sort(descending=True, stable=True).indices[:topk_tokens]
            topk_indices[row, : len(best)] = best.to(torch.int32)

    rows, seq_lens = len(ends), torch.from_numpy(ends)
    nothing = torch.empty(0, dtype=torch.int32)
    decode = metadata.DeepSeekV32IndexerDecodeMetadata(
        block_table=nothing, seq_lens=seq_lens, decode_lens=torch.ones(rows, dtype=torch.int32),
        requires_padding=False, schedule_metadata=nothing, global_seq_lens=seq_lens if merges else None,
    )  # fmt: skip
    step = metadata.DeepseekV32IndexerMetadata(
        seq_lens=seq_lens, max_seq_len=L, slot_mapping=torch.zeros(rows, dtype=torch.int64), num_decodes=rows,
        num_decode_tokens=rows, num_prefills=0, num_prefill_tokens=0, decode=decode,
    )  # fmt: skip
    context = SimpleNamespace(
        attn_metadata=dict.fromkeys(CACHES, step),
        cudagraph_runtime_mode=CUDAGraphMode.FULL,
        skip_compiled=False,
        is_padding=None,
    )
    with (
        patch.object(source, "fp8_fp4_paged_mqa_logits", logits),
        patch.object(source, "get_indexer_topk", lambda backend: topk),
        override_forward_context(context),
    ):
        yield
