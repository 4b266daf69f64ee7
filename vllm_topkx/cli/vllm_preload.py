"""Importing this imports vLLM, without its remarks on missing CUDA libraries; environment variables are set before.

For a server process that forks ranks (``RankPool(preload=[vllm_cpu.PRELOAD])``): none of these imports starts
a thread, and each rank saves ten seconds of them. Nothing else may import this module.
"""

import importlib

from .vllm_cpu import be_quiet

be_quiet()
for name in (
    "vllm.config",
    "vllm.platforms.cpu",
    "vllm.distributed.parallel_state",
    "vllm.compilation.backends",
    "vllm.compilation.decorators",
    "torch._inductor.compile_fx",
):
    importlib.import_module(name)
