"""Dumps of logits: what ``vllm-topkx verify`` reads, checks and writes."""

from __future__ import annotations

import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..ops.checks import check_positions, check_topk, check_world, require
from ..ops.errors import TopkxError
from ..ops.layouts import BF16, FP32, Layout, default_local_topk

#: The whole numbers of a dump beside topk, interleave and local_topk, with their defaults; what ``fuzz`` writes.
EXTRAS = {"epoch": 0, "block_size": 0, "lists": 0}
KV_REQUESTS = 3  # in the block table that each rank has when there is a block size
LOGITS = {"logits": np.dtype(np.float32), "logits_bf16": np.dtype(np.uint16)}
DEFAULT_INTERLEAVE = 1  # vLLM's default for cp_kv_cache_interleave_size
#: What np.load and a member's decoder raise on files that are not what they seem.
_BROKEN = (ValueError, EOFError, KeyError, SyntaxError, tokenize.TokenError, NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class Dump:
    """Logits of all ranks and how to merge them; checked.

    Attributes:
        logits: ``[W, T, L]`` float32, or uint16 bits of bfloat16.
        row_ends: int32 ``[W, T]``.
        topk, interleave, local_topk: K, I and N.
        calls: rows of each call, in order; empty: as many a call as fit.
        epoch: calls that the rows took part in before the first, modulo 2**32.
        block_size: positions a block of the KV cache; 0: no KV rows are asked for.
        lists: 1: the exchange starts from each rank's local top-K (vLLM's contract), which gives no KV rows.
    """

    logits: np.ndarray
    row_ends: np.ndarray
    topk: int
    interleave: int
    local_topk: int
    calls: tuple[int, ...] = ()
    epoch: int = 0
    block_size: int = 0
    lists: int = 0

    @property
    def world_size(self) -> int:
        return self.logits.shape[0]

    @property
    def ranks(self) -> range:
        return range(self.world_size)

    @property
    def rows(self) -> int:
        return self.logits.shape[1]

    @property
    def layout(self) -> Layout:
        return FP32 if self.logits.dtype == np.float32 else BF16

    def scores(self, rows: slice) -> np.ndarray:
        """The scores of ``rows`` as float32 ``[W, rows, L]``; exact, as every bfloat16 is a float32."""
        part = self.logits[:, rows]
        return part if self.layout is FP32 else (part.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def kv_map(self, rank: int, rows: slice) -> tuple[np.ndarray, np.ndarray] | None:
        """A block table int32 ``[requests, blocks]`` of ``rank``'s own and the request of each of ``rows``.

        The same in every run; None without a block size.
        """
        if not self.block_size:
            return None
        blocks = -(-self.logits.shape[2] // self.block_size)
        table = np.random.default_rng(rank).permutation(KV_REQUESTS * blocks).reshape(KV_REQUESTS, blocks)
        return table.astype(np.int32), (np.arange(self.rows)[rows] % KV_REQUESTS).astype(np.int32)

    @property
    def block_stride(self) -> int:
        """KV rows from one block to the next."""
        return self.block_size + 1

    def save(self, path: Path) -> None:
        """Writes what :func:`load_dump` reads."""
        name = "logits" if self.layout is FP32 else "logits_bf16"
        numbers = {"topk": self.topk, "interleave": self.interleave, "local_topk": self.local_topk}
        numbers |= {name: getattr(self, name) for name in EXTRAS}
        with path.open("wb") as file:
            np.savez(file, **{name: self.logits}, row_ends=self.row_ends, calls=np.int64(self.calls), **numbers)

    @classmethod
    def checked(
        cls,
        arrays: Mapping[str, np.ndarray],
        topk: int | None = None,
        interleave: int | None = None,
        local_topk: int | None = None,
    ) -> Dump:
        """From the arrays of a dump; the numbers given here come before the dump's own.

        Raises:
            TopkxError: an array is missing or of a wrong dtype or shape, or a number is out of range.
        """
        given = [name for name in LOGITS if name in arrays]
        require(len(given) < 2, "holds both logits and logits_bf16: keep one of them")
        require(len(given) > 0, f"holds no logits (float32) and no logits_bf16 (uint16): got {_names(arrays)}")
        logits, dtype = arrays[given[0]], LOGITS[given[0]]
        require(logits.dtype == dtype, f"{given[0]} is {logits.dtype}: must be {dtype}")
        require(logits.ndim == 3, f"{given[0]} has shape {list(logits.shape)}: must be [ranks, rows, positions]")
        world_size, rows, columns = logits.shape
        check_world(world_size)
        require(rows > 0, f"{given[0]} has shape {list(logits.shape)}: no rows to verify")
        topk = _number(arrays, "topk", topk)
        if topk is None:
            raise TopkxError("holds no topk: give --topk")
        interleave = _number(arrays, "interleave", interleave, DEFAULT_INTERLEAVE)
        local_topk = _number(arrays, "local_topk", local_topk)
        if local_topk is None:
            check_topk(topk, 1)
            local_topk = default_local_topk(topk, world_size)
        check_topk(topk, local_topk)
        row_ends = _row_ends(arrays, world_size, rows, columns)
        extras = {name: _number(arrays, name, None, default) for name, default in EXTRAS.items()}
        dump = cls(logits, row_ends, topk, interleave, local_topk, _calls(arrays, rows), **extras)
        check_positions(columns, dump.layout, interleave, world_size)
        # The next two tags must not be 0, which a new exchange's slots hold.
        require(0 <= dump.epoch < (1 << 32) - 2, f"epoch {dump.epoch}: must be in 0..2**32 - 3")
        require(
            dump.block_size >= 0 and dump.block_size % interleave == 0,
            f"block_size {dump.block_size}: must be a multiple of interleave {interleave}, or 0",
        )
        require(dump.lists in (0, 1), f"lists {dump.lists}: must be 0 or 1")
        require(not (dump.lists and dump.block_size), "lists with a block_size: local top-Ks are not merged to KV rows")
        return dump


def load_dump(
    path: Path, topk: int | None = None, interleave: int | None = None, local_topk: int | None = None
) -> Dump:
    """The dump in file ``path``; see :meth:`Dump.checked`.

    Raises:
        TopkxError: not an npz file, or not a dump; the message begins with ``path``.
        OSError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            require(zipfile.is_zipfile(file), "not an npz file (numpy.savez writes one)")
        with np.load(path, allow_pickle=False) as file:
            wanted = {*LOGITS, "row_ends", "topk", "interleave", "local_topk", "calls", *EXTRAS}
            arrays = {name: file[name] for name in file.files if name in wanted}
            names = {name: arrays.get(name, np.empty(0)) for name in file.files}
        return Dump.checked(arrays if arrays.keys() & LOGITS else names, topk, interleave, local_topk)
    except TopkxError as error:
        raise TopkxError(f"{path}: {error}") from None
    except MemoryError:
        raise TopkxError(f"{path}: its arrays do not fit into memory: dump fewer rows") from None
    except (*_BROKEN, zipfile.BadZipFile, zlib.error) as error:
        raise TopkxError(f"{path}: not a readable npz file ({error})") from None


def _names(arrays: Mapping[str, np.ndarray]) -> str:
    return ", ".join(arrays) or "nothing"


def _number(arrays: Mapping[str, np.ndarray], name: str, given: int | None, default: int | None = None) -> int | None:
    """The whole number called ``name``: ``given`` if there is one, else the dump's, else ``default``."""
    if given is not None or name not in arrays:
        return default if given is None else given
    value = arrays[name]
    require(
        value.size == 1 and np.issubdtype(value.dtype, np.integer),
        f"{name} is {value.dtype} {list(value.shape)}: must be one whole number",
    )
    return int(value.reshape(()))


def _row_ends(arrays: Mapping[str, np.ndarray], world_size: int, rows: int, columns: int) -> np.ndarray:
    if "row_ends" not in arrays:
        return np.full((world_size, rows), columns, dtype=np.int32)
    ends = arrays["row_ends"]
    require(np.issubdtype(ends.dtype, np.integer), f"row_ends is {ends.dtype}: must be whole numbers (int32)")
    require(ends.shape == (world_size, rows), f"row_ends has shape {list(ends.shape)}: must be {[world_size, rows]}")
    low, high = int(ends.min()), int(ends.max())
    require(0 <= low and high <= columns, f"row_ends from {low} to {high}: must lie in 0..{columns} (the positions)")
    return ends.astype(np.int32)


def _calls(arrays: Mapping[str, np.ndarray], rows: int) -> tuple[int, ...]:
    calls = arrays.get("calls", np.empty(0, dtype=np.int64))
    require(
        np.issubdtype(calls.dtype, np.integer) and calls.ndim == 1 and (calls > 0).all(),
        f"calls is {calls.dtype} {list(calls.shape)}: must be a list of whole numbers above 0",
    )
    require(not calls.size or calls.sum() == rows, f"calls have {calls.sum()} rows in all: must be {rows}")
    return tuple(calls.tolist())


@contextmanager
def writable(path: Path | None, source: Path | None = None) -> Iterator[Path | None]:
    """A new file beside ``path`` that becomes ``path`` when the block ends well, and is removed otherwise.

    It is made when the block begins, so that a path that cannot be written is found out before the work.

    Args:
        path: where to write; None: nowhere, and the block gets None.
        source: the file that is read, which ``path`` must not be.

    Raises:
        TopkxError: ``path`` is a folder, a device, or ``source``.
        OSError: no file can be made there.
    """
    if path is None:
        yield None
        return
    final = Path(os.path.realpath(path))
    require(not final.exists() or final.is_file(), f"{path}: not a file that can be replaced; give another path")
    same = source is not None and final.exists() and final.samefile(source)
    require(not same, f"{path}: is the file that is read; give another path")
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        partial.open("xb").close()
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from None
    try:
        yield partial
        os.replace(partial, final)
    finally:
        partial.unlink(missing_ok=True)
