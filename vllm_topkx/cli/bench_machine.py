"""What a benchmark ran on: GPUs, links, driver, versions."""

from __future__ import annotations

import subprocess
from collections import Counter

import torch

from .machine import gpus, version_of, versions


def machine() -> dict[str, str | None]:
    """By name; None where it cannot be found out."""
    found = Counter(gpu.name for gpu in gpus())
    named = {
        "GPU": ", ".join(f"{count}x {name}" for name, count in found.items()) or None,
        "links": links(_ask("nvidia-smi", "nvlink", "--status", "-i", "0")),
        "driver": (_ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0") or "").strip()
        or None,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
    }
    others = {name: version for name, version in versions().items() if name not in named}
    others["triton"] = version_of("triton")
    return named | others


def links(status: str | None) -> str | None:
    """From ``nvidia-smi nvlink --status`` of one GPU: how many NVLinks, and of what rate."""
    rates = Counter(line.partition(":")[2].strip() for line in (status or "").splitlines() if "GB/s" in line)
    return ", ".join(f"{count} NVLinks of {rate}" for rate, count in rates.items()) or None


def _ask(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
