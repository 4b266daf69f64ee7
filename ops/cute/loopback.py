"""W virtual ranks on one GPU, with slots in ordinary device memory: for tests and benchmarks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import TypeVar

import torch

from ...settings import Settings
from ..checks import check_memory, check_topk, check_world, require
from ..exchange import ExchangeSettings
from ..layouts import default_local_topk, layout_of
from ..spec import KvMap, Merged, MergeSpec
from .device import require_dsl, require_gpu
from .exchange import DeviceExchange
from .launch import Launch, prepare_exchange, prepare_merge_dcp_topk, prepare_rescue

Result = TypeVar("Result")
Tensor = torch.Tensor
_names = itertools.count()


class VirtualGroup:
    """What an exchange asks of a process group."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.group_name, self._rank, self._size = name, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class LoopbackExchange(DeviceExchange):
    """One virtual rank's exchange."""

    def _free(self) -> None:
        pass  # the buffers of all ranks are one tensor of the Loopback


class Loopback:
    """W exchanges of one GPU whose kernels run at once.

    Every rank's kernel is launched on a stream of its own, with at most multiprocessors / W blocks: so all
    blocks of all ranks are resident together, which is what the exchange's freedom from deadlock rests on.
    The kernels are those that real ranks run. Everything is allotted and compiled before the first kernel
    is launched, as either may wait for the device, and the first kernel for the last.

    Args:
        world_size: W, 2..16.
        rows: most rows of a call.
        topk: K.
        local_topk: N; default ``default_local_topk``.
        dtype: of the scores.
        device: default the current GPU.

    Attributes:
        exchanges: by rank.
    """

    def __init__(
        self,
        world_size: int,
        rows: int,
        topk: int,
        local_topk: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        check_world(world_size)
        local_topk = default_local_topk(topk, world_size) if local_topk is None else local_topk
        check_topk(topk, local_topk)
        require(
            os.environ.get("CUDA_LAUNCH_BLOCKING", "0") == "0",
            "loopback under CUDA_LAUNCH_BLOCKING: its ranks share a process and must run at once; unset it",
        )
        require_dsl()
        index = torch.device("cuda" if device is None else device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        require_gpu(self.device)
        self.layout = layout_of(dtype)
        check_memory(world_size, rows, topk, local_topk, self.layout.name)
        settings = ExchangeSettings(rows, topk, local_topk, self.layout.name)
        timeout_s = Settings.from_env().timeout_s
        name = f"loopback:{next(_names)}"
        groups = [VirtualGroup(name, rank, world_size) for rank in range(world_size)]
        self.exchanges = [LoopbackExchange(group, self.device, 0, settings, timeout_s) for group in groups]
        words = self.exchanges[0].nbytes // 4
        self._buffers = torch.zeros(world_size, words, dtype=torch.int32, device=self.device)
        bases = torch.tensor([buffer.data_ptr() for buffer in self._buffers], device=self.device)
        for exchange in self.exchanges:
            exchange.bases = bases
            exchange.max_blocks = max(1, exchange.max_blocks // world_size)
        self._streams = [torch.cuda.Stream(self.device) for _ in range(world_size)]

    def spec(self, rank: int, interleave: int) -> MergeSpec:
        """The settings of ``rank``'s merges."""
        exchange = self.exchanges[rank]
        topk, local_topk = exchange.settings.topk, exchange.settings.local_topk
        return MergeSpec(rank, exchange.world_size, topk, local_topk, interleave, self.layout)

    def exchange_merge(
        self,
        words: Sequence[Tensor],
        logits: Sequence[Tensor],
        row_ends: Sequence[Tensor],
        interleave: int = 1,
        kv: Sequence[KvMap | None] | None = None,
        emit_ids: bool = True,
    ) -> list[Merged]:
        """``topkx::exchange_merge`` of all ranks; arguments and results by rank."""
        launches = []
        for rank, exchange in enumerate(self.exchanges):
            of_rank = None if kv is None else kv[rank]
            spec = self.spec(rank, interleave)
            exchange.check_call(words[rank].shape[0], spec.topk, self.layout.name)
            launches.append(
                prepare_exchange(exchange, words[rank], logits[rank], row_ends[rank], spec, of_rank, emit_ids)
            )
        return self._run(launches)

    def merge_dcp_topk_(
        self,
        logits: Sequence[Tensor],
        topk_indices: Sequence[Tensor],
        interleave: int = 1,
        row_starts: Sequence[Tensor] | None = None,
    ) -> None:
        """``topkx::merge_dcp_topk_`` of all ranks; arguments by rank."""
        launches = []
        for rank, exchange in enumerate(self.exchanges):
            starts = None if row_starts is None else row_starts[rank]
            spec = self.spec(rank, interleave)
            exchange.check_call(topk_indices[rank].shape[0], spec.topk, self.layout.name)
            launches.append(prepare_merge_dcp_topk(exchange, logits[rank], topk_indices[rank], starts, spec))
        self._run(launches)

    def topk_rescue(
        self,
        gathered: Tensor,
        saturation: Sequence[Tensor],
        out: Sequence[Merged],
        logits: Sequence[Tensor],
        row_ends: Sequence[Tensor],
        interleave: int = 1,
        kv: Sequence[KvMap | None] | None = None,
    ) -> None:
        """``topkx::topk_rescue`` of all ranks, into ``out``; arguments by rank, but ``gathered [W, T, words]``."""
        launches = []
        for rank, exchange in enumerate(self.exchanges):
            of_rank = None if kv is None else kv[rank]
            arguments = (gathered, saturation[rank], out[rank], logits[rank], row_ends[rank])
            launches.append(prepare_rescue(exchange, *arguments, self.spec(rank, interleave), of_rank))
        self._run(launches)

    def _run(self, launches: Sequence[Launch[Result]]) -> list[Result]:
        """All launches at once, after what the current stream holds and before what it will."""
        current = torch.cuda.current_stream(self.device)
        results = []
        for stream in self._streams:
            stream.wait_stream(current)
        for stream, launch in zip(self._streams, launches, strict=True):
            with torch.cuda.stream(stream):
                results.append(launch.run())
        for stream in self._streams:
            current.wait_stream(stream)
        return results

    def synchronize(self) -> None:
        """Waits for the device; a time limit is named as such."""
        for exchange in self.exchanges:
            exchange.synchronize()
