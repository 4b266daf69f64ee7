"""Compiled kernels: in this process, and on disk for the next one.

A variant (see :mod:`.compile`) that is not in the process is loaded from an object file, or compiled and
written there. Its name is a hash of all it depends on. Processes that want the same variant at once take a
file lock, and the first compiles.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from ..errors import TopkxError
from .device import architecture, require_dsl

ENV = "VLLM_TOPKX_CACHE_DIR"
_FUNCTION = "topkx"
_in_process: dict[tuple[Variant, str], Callable[..., None]] = {}


class Variant(Protocol):
    """What a kernel is specialised on: hashable, and its ``repr`` says it all."""

    def build(self, options: str) -> Callable[..., None]:
        """Compiles it with more compile options."""


def cache_dir() -> Path:
    """``$VLLM_TOPKX_CACHE_DIR``, else ``~/.cache/vllm-topkx/kernels``."""
    return Path(os.environ.get(ENV) or Path.home() / ".cache" / "vllm-topkx" / "kernels")


def compiled(variant: Variant, device: torch.device | None = None) -> Callable[..., None]:
    """The kernel of ``variant`` for ``device``, ready to be called.

    Raises:
        TopkxError: it would have to be compiled or loaded under CUDA graph capture.
        BackendUnavailableError: there is no CuTe DSL that can.
    """
    key = (variant, architecture(device))
    kernel = _in_process.get(key)
    if kernel is None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise TopkxError(f"{variant} is not compiled yet: run the call once before you capture it in a CUDA graph")
        kernel = _in_process[key] = _load_or_build(variant, key[1])
    return kernel


def _load_or_build(variant: Variant, arch: str) -> Callable[..., None]:
    name = hashlib.sha256(repr((_fingerprint(), arch, variant)).encode()).hexdigest()[:32]
    path = cache_dir() / f"{type(variant).__name__}-{name}.o"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(path.with_suffix(".lock"))
    except OSError:  # a read-only home: every process compiles
        return variant.build(f"--gpu-arch {arch}")
    with lock:
        if path.exists() and (kernel := _load(path)) is not None:
            return kernel
        kernel = variant.build(f"--gpu-arch {arch}")
        _store(kernel, path)
        return kernel


def _load(path: Path) -> Callable[..., None] | None:
    from cutlass import cute

    try:
        return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[_FUNCTION]
    except Exception:  # a file that cannot be used is a miss, and is written anew
        path.unlink(missing_ok=True)
        return None


def _store(kernel: Callable[..., None], path: Path) -> None:
    """Writes the object file; it appears whole or not at all, so a killed process leaves nothing to load."""
    partial = path.with_suffix(f".{os.getpid()}.o")
    try:
        kernel.export_to_c(object_file_path=str(partial), function_name=_FUNCTION)
        os.replace(partial, path)
    except OSError:  # a full disk costs the next process a compilation
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _hold(fd: int) -> Iterator[None]:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)  # gives the lock back


def _locked(path: Path) -> contextlib.AbstractContextManager[None]:
    return _hold(os.open(path, os.O_RDWR | os.O_CREAT, 0o666))


@functools.cache
def _fingerprint() -> str:
    """A hash of the sources, and of what compiles them."""
    import tvm_ffi

    folder = Path(__file__).parent
    digest = hashlib.sha256(f"{require_dsl()} {tvm_ffi.__version__} {sys.version_info[:2]}".encode())
    for source in sorted([*folder.glob("*.py"), folder.parent / "layouts.py"]):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()
