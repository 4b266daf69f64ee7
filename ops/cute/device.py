"""What the machine and the installed packages must offer, and what a kernel is compiled for."""

from __future__ import annotations

import functools
import os
import re

import torch

from ..errors import BackendUnavailableError

#: CuTe DSL releases the kernels are compiled and tested with.
OLDEST_DSL, FIRST_UNTESTED_DSL = (4, 6), (4, 9)
#: Hopper: the first with system-scope 16-byte stores over NVLink that the protocol was measured on, and
#: with programmatic dependent launch.
OLDEST_CAPABILITY = (9, 0)


@functools.cache
def require_dsl() -> str:
    """The version of CuTe DSL; refuses a missing one, an untested one, and a missing TVM-FFI."""
    try:
        import cutlass
        import tvm_ffi  # noqa: F401  (launches go through it)
    except ImportError as error:
        raise BackendUnavailableError(
            f"the CUDA backend needs {error.name}: pip install 'nvidia-cutlass-dsl>=4.6,<4.9' apache-tvm-ffi"
        ) from error
    version = tuple(int(part) for part in re.findall(r"\d+", cutlass.__version__)[:2])
    if not OLDEST_DSL <= version < FIRST_UNTESTED_DSL:
        raise BackendUnavailableError(
            f"nvidia-cutlass-dsl {cutlass.__version__} is installed: the kernels need 4.6 to 4.8; "
            f"pip install 'nvidia-cutlass-dsl>=4.6,<4.9'"
        )
    return cutlass.__version__


def require_gpu(device: torch.device) -> None:
    """Refuses a GPU older than Hopper."""
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        raise BackendUnavailableError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}: "
            f"the CUDA backend needs 9.0 (Hopper) or newer"
        )


def architecture(device: torch.device | None = None) -> str:
    """What kernels are compiled for: ``CUTE_DSL_ARCH`` where set, else the GPU's ``sm_90a``, ``sm_100a``, ..."""
    if (given := os.environ.get("CUTE_DSL_ARCH")) is not None:
        return given
    return _architecture_of(torch.device("cuda", torch.cuda.current_device()) if device is None else device)


@functools.cache
def _architecture_of(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
