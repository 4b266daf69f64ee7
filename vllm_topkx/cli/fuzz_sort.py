"""The reference of :mod:`vllm_topkx.ops.reference` by stable sorts on a device, for many long rows."""

from __future__ import annotations

import numpy as np
import torch

from .dump import Dump


def sort_on_device(dump: Dump, device: torch.device) -> np.ndarray:
    """int32 ``[T, K]``: what ``sort_dump`` gives."""
    scores = torch.from_numpy(dump.scores(slice(None))).to(device)
    ends = torch.from_numpy(dump.row_ends).to(device)
    world_size, rows, columns = scores.shape
    j, rank = torch.arange(columns, device=device), torch.arange(world_size, device=device)[:, None]
    g = (j // dump.interleave * world_size + rank) * dump.interleave + j % dump.interleave
    g, by_position = g.flatten().sort()
    valid = (j < ends[..., None]) & ~scores.isnan()
    scores, valid = (tensor.transpose(0, 1).flatten(1)[:, by_position] for tensor in (scores, valid))
    order = torch.arange(world_size * columns, device=device).expand(rows, -1)
    # By position already; then +0.0 before -0.0; then by score; then what is no candidate goes last.
    for key in (scores.signbit().to(torch.uint8), -scores.where(valid, 0.0), (~valid).to(torch.uint8)):
        order = order.gather(1, key.gather(1, order).sort(dim=-1, stable=True).indices)
    best = order[:, : dump.topk]
    found = torch.full((rows, dump.topk), -1, dtype=torch.int32, device=device)
    found[:, : best.shape[1]] = torch.where(valid.gather(1, best), g[best], -1).to(torch.int32)
    return found.cpu().numpy()
