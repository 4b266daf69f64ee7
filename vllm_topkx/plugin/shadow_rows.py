"""The rows of one merge in shadow mode, and why the exchange and vLLM's own merge select other ids in some.

Nothing here reads a tensor on the host, makes a tensor whose shape depends on values, or waits: it runs in
every step, under the capture of a CUDA graph too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ops.keys import owner_and_local

#: Why a row may differ. A row is of the first kind that fits, judged by what all ranks brought.
KINDS = (
    "NaN scores",  # a score that some rank brought is NaN: never selected here
    "repeated ids",  # a rank brought a position twice
    "ids past the logits",  # a rank brought a position that has no column
    "ids past 2^24",  # vLLM passes ids through float32
    "equal scores",  # both sets have the same scores: other members of a tie
    "unexplained",
)


@dataclass(frozen=True)
class Rows:
    """One rank's part of a merge, and both results.

    Attributes:
        logits: float32 ``[T, L]``.
        local_ids: int32 ``[T, K]``, this rank's local top-K as it was before the merge.
        starts: integers ``[T]``, the column of position 0, or None for 0.
        ours, theirs: int32 ``[T, K]``, the global ids of the exchange and of vLLM.
    """

    logits: torch.Tensor
    local_ids: torch.Tensor
    starts: torch.Tensor | None
    ours: torch.Tensor
    theirs: torch.Tensor
    rank: int
    world_size: int
    interleave: int

    def differ(self) -> torch.Tensor:
        """bool ``[T]``: whether the ids differ as sets."""
        return _unequal(self.ours, self.theirs)

    def report(self) -> torch.Tensor:
        """What the other ranks need of this one to tell kinds: int32 ``[T, 2K + 3]``, to be summed over the ranks.

        The bits of the scores of the ids in ``ours`` and ``theirs`` that this rank owns, 0 for others; then
        whether this rank brought a NaN, a position twice, and a position without a column.
        """
        present = self.local_ids >= 0
        nan = (self.scores(self.local_ids).isnan() & present).any(dim=1)
        ordered = self.local_ids.sort(dim=1).values
        repeated = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(dim=1)
        past = (present & (self._columns(self.local_ids) >= self.logits.shape[1])).any(dim=1)
        flags = torch.stack([nan, repeated, past], dim=1).to(torch.int32)
        return torch.cat([self._own_bits(self.ours), self._own_bits(self.theirs), flags], dim=1)

    def kinds(self, gathered: torch.Tensor) -> torch.Tensor:
        """bool ``[T, kinds]``: of which kind a differing row is; all False where the ids do not differ.

        Args:
            gathered: int32 ``[T, W * (2K + 3)]``, the ranks' reports side by side.
        """
        rows, topk = self.ours.shape
        total = gathered.view(rows, self.world_size, 2 * topk + 3).sum(dim=1, dtype=torch.int32)
        our_scores, their_scores, flags = total.split([topk, topk, 3], dim=1)
        far = (torch.maximum(self.ours, self.theirs) >= 1 << 24).any(dim=1)
        equal = ~_unequal(our_scores, their_scores)
        equal &= (self.ours >= 0).sum(dim=1) == (self.theirs >= 0).sum(dim=1)
        fits = torch.stack([*(flags != 0).unbind(dim=1), far, equal, torch.ones_like(far)], dim=1)
        return fits & (fits.cumsum(dim=1) == 1) & self.differ()[:, None]

    def record(self, index: torch.Tensor) -> torch.Tensor:
        """Rows ``index`` (int64 ``[n]``) as int32 ``[n, 4K + 2]``, which :func:`unpack` takes apart."""
        starts = torch.zeros_like(index) if self.starts is None else self.starts.index_select(0, index)
        picked = [
            tensor.index_select(0, index)
            for tensor in (self.local_ids, _bits(self.scores(self.local_ids)), self.ours, self.theirs)
        ]
        return torch.cat([*picked, torch.stack([index, starts], dim=1).to(torch.int32)], dim=1)

    def scores(self, local_ids: torch.Tensor) -> torch.Tensor:
        """float32 ``[T, K]``; columns are clamped to those there are, as vLLM's merge does."""
        if self.logits.shape[1] == 0:
            return torch.zeros_like(local_ids, dtype=self.logits.dtype)
        return self.logits.gather(1, self._columns(local_ids).clamp_(0, self.logits.shape[1] - 1))

    def _columns(self, local_ids: torch.Tensor) -> torch.Tensor:
        columns = local_ids.to(torch.int64)
        return columns if self.starts is None else columns + self.starts[:, None]

    def _own_bits(self, ids: torch.Tensor) -> torch.Tensor:
        """int32 ``[T, K]``: the bits of the scores of the ids that this rank owns, 0 for others."""
        owner, local = owner_and_local(ids, self.world_size, self.interleave)
        return torch.where((ids >= 0) & (owner == self.rank), _bits(self.scores(local)), 0)


def unpack(record: torch.Tensor) -> dict[str, torch.Tensor]:
    """The columns of :meth:`Rows.record`: ``local_ids``, ``scores``, ``ours``, ``theirs``, ``row``, ``start``."""
    topk = record.shape[1] // 4
    local_ids, scores, ours, theirs, rest = record.split([topk, topk, topk, topk, 2], dim=1)
    row, start = rest.unbind(dim=1)
    scores = scores.contiguous().view(torch.float32)
    return {"local_ids": local_ids, "scores": scores, "ours": ours, "theirs": theirs, "row": row, "start": start}


def _unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool ``[T]``: whether the rows differ as multisets."""
    return (a.sort(dim=1).values != b.sort(dim=1).values).any(dim=1)


def _bits(scores: torch.Tensor) -> torch.Tensor:
    return scores.view(torch.int32)
