"""vLLM's own compile stack on the CPU: what the demo and the tests run in each rank process.

vLLM 0.33.0's CPU platform compiles without ``VllmBackend``, and the wheel for CUDA lacks the ops that its
passes name when there is no driver. Here both are put right, and nothing else is changed: backend, pass
manager, splitting, groups and caches are vLLM's.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config as functorch_config

if TYPE_CHECKING:
    import torch.distributed as dist
    from vllm.config import VllmConfig

#: What a server process imports once, so that the ranks it forks need not.
PRELOAD = f"{__package__}.vllm_preload"
#: vLLM's name of the decode context parallel group.
GROUP = "dcp:0"
#: Ops of vLLM's CUDA library that FixFunctionalizationPass compares nodes with; their schemas are enough.
_NAMED_OPS = (
    *("rotary_embedding", "fused_add_rms_norm", "fused_add_rms_norm_static_fp8_quant"),
    *("rms_norm_dynamic_per_token_quant", "rms_norm", "rms_norm_static_fp8_quant", "silu_and_mul"),
    *("silu_and_mul_quant", "silu_and_mul_nvfp4_quant", "fused_qk_norm_rope"),
)
_library: torch.library.Library | None = None


def environment(folder: str, cache: bool = False) -> dict[str, str]:
    """Environment variables to set before vLLM is imported.

    Args:
        folder: where vLLM, Inductor and Triton put what they write.
        cache: whether compiled graphs may come from ``folder``; then passes need not run.
    """
    variables = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_PLUGINS": "topkx",
        "VLLM_CACHE_ROOT": f"{folder}/vllm",
        "VLLM_CONFIG_ROOT": f"{folder}/config",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # no test programs for vector instructions: they cost most of the time
        "VLLM_DISABLE_COMPILE_CACHE": "0" if cache else "1",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0" if cache else "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # What vLLM and torch tell their developers is left out; errors are shown.
    return variables | {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_LOGS": "-all", "PYTHONWARNINGS": "ignore"}


def set_up(rank: int, world_size: int, **options: Any) -> VllmConfig:
    """Makes this process rank ``rank`` of vLLM's groups; ``options`` as :func:`make_config`. Loads no plugin."""
    be_quiet()
    # vLLM's indexer returns the buffer that it mutates. Torch warns of that, but raises where $CI is set.
    functorch_config.error_on_custom_op_aliasing = False
    define_named_ops()
    config = make_config(rank, world_size, **options)
    join_groups(config, rank, world_size)
    return config


def be_quiet() -> None:
    """Leaves of what is logged the errors, and why the plugin would not do its work."""
    for name in ("vllm", "torch", "vllm_topkx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("vllm.topkx").setLevel(logging.WARNING)


def define_named_ops() -> None:
    """Schemas for the ops that vLLM's passes name and this installation cannot load."""
    import vllm._custom_ops  # noqa: F401  (loads those that it can)

    global _library
    if _library is None:
        _library = torch.library.Library("_C", "FRAGMENT")
        for name in _NAMED_OPS:
            if not hasattr(torch.ops._C, name):
                _library.define(f"{name}(Tensor(a!) x) -> ()")


def make_config(
    rank: int,
    world_size: int,
    max_rows: int = 64,
    splitting_ops: list[str] | None = None,
    graph_partition: bool = False,
) -> VllmConfig:
    """A configuration that compiles with ``VllmBackend``, for DCP over ``world_size`` ranks.

    Args:
        rank: this process.
        world_size: ranks, all in one tensor parallel and one DCP group.
        max_rows: most tokens of a step, the end of vLLM's compile range.
        splitting_ops: ops at which the graph is split; None for vLLM's own, ``[]`` for none.
        graph_partition: let Inductor split instead of Dynamo.
    """
    from vllm import config as c

    # The optimization level turns on fusions whose classes are not imported on the CPU.
    off = {f.name: False for f in dataclasses.fields(c.PassConfig) if f.name.startswith(("fuse_", "enable_"))}
    compilation = c.CompilationConfig(
        mode=c.CompilationMode.VLLM_COMPILE,
        backend="inductor",
        cudagraph_mode=c.CUDAGraphMode.NONE,
        compile_sizes=[],  # None, the default without a model, leaves no range to compile for
        splitting_ops=splitting_ops,
        use_inductor_graph_partition=graph_partition,
        pass_config=c.PassConfig(**off),
    )
    with _compilation_kept():
        config = c.VllmConfig(
            compilation_config=compilation,
            device_config=c.DeviceConfig(device="cpu"),
            scheduler_config=c.SchedulerConfig.default_factory(
                max_model_len=max_rows, max_num_batched_tokens=max_rows, max_num_seqs=max_rows
            ),
            parallel_config=c.ParallelConfig(
                tensor_parallel_size=world_size,
                decode_context_parallel_size=world_size,
                distributed_executor_backend="external_launcher",
            ),
        )
    config.parallel_config.rank = rank
    return config


@contextmanager
def _compilation_kept() -> Iterator[None]:
    """Lets the CPU platform check a configuration, but not turn vLLM's own compilation off."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.__dict__["check_and_update_config"]

    def check(cls: type, config: VllmConfig) -> None:
        mode, backend = config.compilation_config.mode, config.compilation_config.backend
        original.__func__(cls, config)
        config.compilation_config.mode, config.compilation_config.backend = mode, backend

    platform.check_and_update_config = classmethod(check)
    try:
        yield
    finally:
        platform.check_and_update_config = original


def join_groups(config: VllmConfig, rank: int, world_size: int) -> dist.ProcessGroup:
    """vLLM's groups, over the process group that the ranks already are in; returns the DCP group."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(world_size, rank, "env://", rank, backend="gloo")
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=world_size, decode_context_model_parallel_size=world_size, backend="gloo"
        )
    group = parallel_state.get_dcp_group()
    assert group.unique_name == GROUP
    return group.device_group


def compiled(module: type[torch.nn.Module], dynamic: Mapping[str, int], config: VllmConfig, **arguments: Any) -> Any:
    """An instance ``module(**arguments)`` that vLLM compiles at its first call under ``config``.

    Args:
        module: a class; it is decorated by ``support_torch_compile``, once.
        dynamic: the dimension of each input that differs from call to call.
        config: of :func:`make_config`.
        arguments: of ``module``.
    """
    from vllm.compilation.decorators import support_torch_compile
    from vllm.config import set_current_vllm_config

    if not hasattr(module, "save_aot_compiled_function"):
        support_torch_compile(module, dynamic_arg_dims=dict(dynamic))
    with set_current_vllm_config(config):
        return module(**arguments)
