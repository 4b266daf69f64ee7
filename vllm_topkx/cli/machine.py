"""What this machine and this installation are: GPUs, versions, shared memory. Imports neither vLLM nor CuTe DSL."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from .._version import __version__
from ..ops.cute.device import FIRST_UNTESTED_DSL, OLDEST_CAPABILITY, OLDEST_DSL

#: Distributions that decide what runs, beside this one.
DISTRIBUTIONS = ("torch", "nvidia-cutlass-dsl", "vllm")


@dataclass(frozen=True)
class Gpu:
    """A visible GPU; ``supported``: Hopper or newer."""

    index: int
    name: str
    compute_capability: str
    memory_gib: float
    supported: bool


def version_of(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions by distribution name, Python's and CUDA's among them; None where there is none."""
    found = {name: version_of(name) for name in DISTRIBUTIONS}
    return {"vllm-topkx": __version__, **found, "python": platform.python_version(), "cuda": torch.version.cuda}


def cute_dsl_problem() -> str | None:
    """Why the installed CuTe DSL will not do, or None."""
    version, low, high = version_of("nvidia-cutlass-dsl"), OLDEST_DSL, FIRST_UNTESTED_DSL
    wanted = f"needed is {low[0]}.{low[1]} to below {high[0]}.{high[1]}: pip install -U vllm-topkx"
    if version is None:
        return f"nvidia-cutlass-dsl is not installed; {wanted}"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    return None if low <= numbers < high else f"nvidia-cutlass-dsl {version}; {wanted}"


def gpus() -> list[Gpu]:
    """The visible GPUs. Asks the driver for properties, which makes no CUDA context."""
    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        capability = (p.major, p.minor)
        memory = round(p.total_memory / 2**30, 1)
        found.append(Gpu(index, p.name, f"{p.major}.{p.minor}", memory, capability >= OLDEST_CAPABILITY))
    return found


def peer_access(count: int) -> list[list[bool]]:
    """``[i][j]``: GPU i can map GPU j's memory (and its own)."""
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]


def cpu_name() -> str:
    """The CPU's model and how many of its cores this process may use."""
    model = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model}, {len(os.sched_getaffinity(0))} cores"
