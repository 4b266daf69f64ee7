"""How long a vLLM worker compiles at its first start, and loads at the next: measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

#: What is compiled for where there is no GPU.
ARCHITECTURE = "sm_90a"
TOPK, WORLD_SIZE = 2048, 2


def measure() -> dict[str, Any]:
    """``arch``, ``kernels``, ``import_seconds`` of CuTe DSL, ``compile_seconds``; or the ``reason`` why not."""
    with tempfile.TemporaryDirectory(prefix="topkx-compile-") as cache:
        environment = {**os.environ, "VLLM_TOPKX_CACHE_DIR": cache}
        if not torch.cuda.is_available():
            environment.setdefault("CUTE_DSL_ARCH", ARCHITECTURE)
        done = subprocess.run([sys.executable, "-m", __name__], env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"reason": (done.stderr.strip() or "no output").splitlines()[-1]}
    return {**json.loads(done.stdout.splitlines()[-1]), "reason": None}


def _compile() -> dict[str, Any]:
    """The kernels of ``topkx::merge_dcp_topk_`` with and without row starts, as the plugin reserves them."""
    started = time.monotonic()
    from ..ops.cute.cache import compiled
    from ..ops.cute.compile import ListMerge
    from ..ops.cute.device import architecture
    from ..ops.cute.shape import RowShape
    from ..ops.layouts import default_list_topk

    shape = RowShape(WORLD_SIZE, TOPK, default_list_topk(TOPK, WORLD_SIZE), fp32=True)
    variants = [ListMerge(shape, with_starts) for with_starts in (False, True)]
    imported = time.monotonic()
    for variant in variants:
        compiled(variant)
    return {
        "arch": architecture(),
        "kernels": len(variants),
        "import_seconds": round(imported - started, 2),
        "compile_seconds": round(time.monotonic() - imported, 2),
    }


if __name__ == "__main__":
    print(json.dumps(_compile()))
