"""The systems of ``vllm-topkx bench`` on one of W GPUs: what a call of each enqueues."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..ops.exchange import find_exchange
from ..ops.keys import global_position
from ..ops.layouts import BF16, FP32
from ..ops.nccl.form import merge_all_gather
from ..ops.spec import MergeSpec
from ..ranks import RankContext
from .bench_case import BUFFERS, Case
from .bench_vllm import Gather, VllmKernels, filter_and_convert

Tensor = torch.Tensor


class Output(NamedTuple):
    """What a call wrote; None what it does not write."""

    ids: Tensor | None = None
    rows: Tensor | None = None
    valid: Tensor | None = None


Call = Callable[[int], Output]


class Systems:
    """Builds the calls of a case.

    Args:
        context: this rank.
        case: its inputs.
        local_topk: N.
        interleave: I.
        lanes: of the exchanges for float32 and for bfloat16 scores.
        gather: vLLM's all-gather; None when vLLM is not measured.
    """

    def __init__(
        self,
        context: RankContext,
        case: Case,
        local_topk: int,
        interleave: int,
        lanes: tuple[int, int],
        gather: Gather | None,
    ) -> None:
        self.context, self.case, self.n, self.interleave = context, case, local_topk, interleave
        self.lanes, self.gather = lanes, gather
        self.rank, self.world_size, self.k = context.rank, context.world_size, case.topk

    def build(self, name: str) -> Call:
        """The system called ``name``, one of ``GPU_SYSTEMS``.

        Raises:
            LeftOut: it cannot run here.
        """
        kind, _, rest = name.partition(":")
        if kind.startswith("vllm"):
            return self._vllm(convert=name == "vllm+rows")
        if kind == "torch":
            return self._torch
        n = self.k if rest == "K" else self.n
        bf16 = "bf16" in rest
        if kind == "nccl":
            return self._all_gather_form(n)
        if kind == "list":
            return self._from_list(n)
        if kind == "words":
            return self._from_words(n, bf16, "+rows" in name)
        if kind == "logits":
            return self._from_logits(n, bf16)
        return self._floor(n, bf16)

    def in_place(self, name: str) -> bool:
        """Whether its calls replace the case's ``lists``."""
        return name.startswith(("vllm", "list"))

    def _vllm(self, convert: bool) -> Call:
        kernels, place = VllmKernels.load(), (self.rank, self.world_size, self.interleave)

        def call(i: int) -> Output:
            indices = self.case.lists[i]
            kernels.merge(self.case.logits[i % BUFFERS], indices, *place, self.gather)
            if not convert:
                return Output(ids=indices)
            rows, valid = filter_and_convert(indices, self.case.kv, *place)
            return Output(None, rows, valid)

        return call

    def _torch(self, i: int) -> Output:
        """As one would write it: scores and ids side by side in one collective."""
        b, count, k = i % BUFFERS, self.case.rows, self.k
        indices = self.case.best[b]
        scores = self.case.logits[b].gather(1, indices.long())
        ids = global_position(indices, self.rank, self.world_size, self.interleave)
        packed = torch.stack((scores, ids.view(torch.float32)), dim=-1)
        gathered = packed.new_empty((self.world_size * count, k, 2))
        dist.all_gather_into_tensor(gathered, packed, group=self.context.group)
        candidates = gathered.view(-1, count, k, 2).movedim(0, 1).reshape(count, self.world_size * k, 2)
        best = candidates[..., 0].topk(k, dim=-1, sorted=False).indices
        return Output(ids=candidates.view(torch.int32)[..., 1].gather(1, best))

    def _all_gather_form(self, n: int) -> Call:
        words = self.case.words_of(n)

        def call(i: int) -> Output:
            b = i % BUFFERS
            _, _, ids, _ = merge_all_gather(
                words[b], self.case.logits[b], self.case.ends, self.context.group_name, self.rank, self.world_size,
                self.k, n, self.interleave, lane=self.lanes[0],
            )  # fmt: skip
            return Output(ids=ids)

        return call

    def _from_list(self, n: int) -> Call:
        def call(i: int) -> Output:
            indices = self.case.lists[i]
            torch.ops.topkx.merge_dcp_topk_(
                self.case.logits[i % BUFFERS], indices, self.k, self.rank, self.world_size, self.interleave,
                group=self.context.group_name, local_topk=n, lane=self.lanes[0],
            )  # fmt: skip
            return Output(ids=indices)

        return call

    def _exchange(self, i: int, words: Tensor, n: int, bf16: bool, with_rows: bool) -> Output:
        kv = self.case.kv
        kv_arguments = (kv.block_table, kv.req_id, kv.block_size, kv.block_stride) if with_rows else ()
        rows, valid, ids = torch.ops.topkx.exchange_merge(
            words, self.case.scores_of(i % BUFFERS, bf16), self.case.ends, self.context.group_name, self.world_size,
            self.k, n, self.interleave, *kv_arguments, emit_ids=not with_rows, lane=self.lanes[bf16],
        )  # fmt: skip
        return Output(None, rows, valid) if with_rows else Output(ids=ids)

    def _from_words(self, n: int, bf16: bool, with_rows: bool) -> Call:
        words = self.case.words_of(n, bf16)
        return lambda i: self._exchange(i, words[i % BUFFERS], n, bf16, with_rows)

    def _from_logits(self, n: int, bf16: bool) -> Call:
        def call(i: int) -> Output:
            scores = self.case.scores_of(i % BUFFERS, bf16)
            words = torch.ops.topkx.local_topk_words(scores, self.case.ends, n)
            return self._exchange(i, words, n, bf16, False)

        return call

    def _floor(self, n: int, bf16: bool) -> Call:
        from ..ops.cute.ll_floor import prepare_floor  # not before there is a GPU: it imports CuTe DSL

        words = self.case.words_of(n, bf16)
        exchange = find_exchange(self.context.group_name, self.context.device, n, self.lanes[bf16])
        spec = MergeSpec(self.rank, self.world_size, self.k, n, self.interleave, BF16 if bf16 else FP32)

        def call(i: int) -> Output:
            prepare_floor(exchange, words[i % BUFFERS], spec).run()
            return Output()

        return call
