"""The CUDA backend's host code and kernels on CPU tensors: ``ops/cute/launch.py`` with interpreted PTX."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from unittest import mock

import torch
from ptx_interpreter import Block, run_together
from ptx_program import Memory, Program

from vllm_topkx.ops.cute import compile as variants
from vllm_topkx.ops.cute import launch
from vllm_topkx.ops.cute.exchange import DeviceExchange
from vllm_topkx.ops.cute.loopback import VirtualGroup
from vllm_topkx.ops.cute.record import RECORD_WORDS, FailureRecord, RowEndRecord
from vllm_topkx.ops.exchange import ExchangeSettings, TopkExchange
from vllm_topkx.ops.layouts import default_local_topk, layout_of
from vllm_topkx.ops.spec import MergeSpec

Result = TypeVar("Result")
Tensor = torch.Tensor
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")


class InterpretedKernel:
    """A compiled variant that runs in the interpreter when it is called."""

    def __init__(self, variant: object) -> None:
        described: list = []
        compile_ = variants._compile

        def recorded(options: str, kernel: object, *arguments: object) -> object:
            described.extend(arguments)
            return compile_(options, kernel, *arguments)

        with mock.patch.object(variants, "_compile", recorded):
            self.program = Program(variant.build("--keep-ptx").__ptx__)
        self._described = described
        self._rows_are_blocks = isinstance(variant, (variants.LocalTopk, variants.Select))

    def blocks(self, arguments: Sequence, extra: Sequence[Tensor], seed: int) -> list[Block]:
        """The blocks of a launch; ``extra`` is memory that is passed by address."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        # The kernels for fixed rows have a block a row; the others are told how many blocks.
        grid = (tensors[-1].shape[0], 1) if self._rows_are_blocks else arguments[-1]
        memory = Memory([*tensors, *extra])
        packed = [part for pair in zip(self._described, arguments, strict=True) for part in _pack(*pair)]
        if self._rows_are_blocks is False:
            del packed[-2:]  # the number of blocks is the launch's, not the kernel's
        padded = [part.ljust(size, b"\0") for part, (_, size) in zip(packed, self.program.parameters, strict=True)]
        places = [(x, y) for x in range(grid[0]) for y in range(grid[1])]
        return [Block(self.program, padded, memory, at, grid, seed * 1000 + i) for i, at in enumerate(places)]


def _pack(described: object, argument: object) -> Iterator[bytes]:
    """The kernel parameters that an argument of the host function becomes."""
    if described is None:
        assert argument is None
    elif isinstance(described, tuple):
        for parts in zip(described, argument, strict=True):
            yield from _pack(*parts)
    elif isinstance(argument, Tensor):
        assert argument.dim() == len(described.shape)
        packed = struct.pack("<Q", argument.data_ptr())
        for size, got, dynamic in zip(described.shape, argument.shape, described.dynamic_shapes_mask, strict=True):
            assert dynamic or size == got, (tuple(argument.shape), described.shape)
            packed += struct.pack("<i", got) if dynamic else b""
        for size, got, dynamic in zip(described.stride, argument.stride(), described.dynamic_strides_mask, strict=True):
            assert dynamic or size == got or argument.numel() <= 1, (argument.stride(), described.stride)
            packed += b"\0" * (-len(packed) % 8) + struct.pack("<q", got) if dynamic else b""
        yield packed
    else:
        yield (argument & ((1 << described.width) - 1)).to_bytes(described.width // 8, "little")


kernel_of = functools.cache(InterpretedKernel)


class Interpreted:
    """A loopback of W ranks on CPU tensors.

    Args:
        world_size: W.
        rows: most rows of a call.
        topk, local_topk, dtype: K, N (None: the default) and the scores' dtype.
        blocks: thread blocks of each launch.
    """

    def __init__(
        self, world_size: int, rows: int, topk: int, local_topk: int | None, dtype: torch.dtype, blocks: int = 2
    ) -> None:
        local_topk = local_topk or default_local_topk(topk, world_size)
        self.layout, self.seed = layout_of(dtype), 0
        settings = ExchangeSettings(rows, topk, local_topk, self.layout.name)
        self.exchanges = [_Exchange(VirtualGroup("interpreted", r, world_size), settings) for r in range(world_size)]
        words = self.exchanges[0].nbytes // 4
        self._buffers = [torch.zeros(words, dtype=torch.int32) for _ in range(world_size)]
        bases = torch.tensor([buffer.data_ptr() for buffer in self._buffers])
        for exchange in self.exchanges:
            exchange.bases, exchange.max_blocks = bases, blocks

    def spec(self, rank: int, interleave: int) -> MergeSpec:
        s = self.exchanges[rank].settings
        return MergeSpec(rank, len(self.exchanges), s.topk, s.local_topk, interleave, self.layout)

    def run(
        self, prepare: Callable[[DeviceExchange], launch.Launch[Result]], ranks: Sequence[int] | None = None
    ) -> list:
        """What ``prepare`` launches for each exchange, all at once; the results of ``ranks`` (default: all)."""
        with interpreting():
            launches = [prepare(self.exchanges[rank]) for rank in ranks or range(len(self.exchanges))]
        return self.run_launches(launches)

    def run_launches(self, launches: Sequence[launch.Launch[Result]]) -> list:
        """All ``launches`` at once; their results."""
        self.seed += 1
        blocks: list[Block] = []
        for ready in launches:
            extra = [*self._buffers, ready.exchange.record.memory]
            blocks += ready.kernel.blocks(ready.arguments, extra, self.seed + len(blocks))
        run_together(blocks, self.seed)
        self.shared_bytes = max(block.shared.used for block in blocks)
        return [ready.result for ready in launches]


class _Exchange(DeviceExchange):
    def __init__(self, group: VirtualGroup, settings: ExchangeSettings) -> None:
        TopkExchange.__init__(self, group, torch.device("cpu"), 0, settings, 10.0)
        self.record = FailureRecord(torch.zeros(RECORD_WORDS, dtype=torch.int32))

    def _free(self) -> None:
        pass


@contextmanager
def interpreting() -> Iterator[None]:
    with mock.patch.object(launch, "compiled", lambda variant, device: kernel_of(variant)):
        yield


def run_alone(function: Callable[..., Result], *arguments: object, record: RowEndRecord | None = None) -> Result:
    """A function of ``ops/cute/launch.py`` that launches one kernel, with that kernel interpreted."""
    record = record or RowEndRecord(torch.zeros(RECORD_WORDS, dtype=torch.int32))

    def compiled(variant: object, device: torch.device) -> Callable[..., None]:
        kernel = kernel_of(variant)
        return lambda *args: run_together(kernel.blocks(args, [record.memory], 1), 1)

    with (
        mock.patch.object(launch, "compiled", compiled),
        mock.patch.object(launch, "row_end_record", lambda device: record),
    ):
        return function(*arguments)
