"""``vllm-topkx doctor``: what this machine and this installation can run, and why not the rest."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from ..ops.cpu.shared_memory import SHM, free_bytes
from ..ops.errors import TopkxError
from ..settings import Settings
from . import compile_time
from .machine import cpu_name, cute_dsl_problem, gpus, peer_access, version_of, versions
from .vllm_hooks import check_hooks, first_loss_of_everything, installed_root, plugin_problem

_EPILOG = """\
Exit code: 0 when at least one backend can run, else 1. Imports neither vLLM nor CuTe
DSL, allocates nothing on a GPU; --compile does, in a process of its own.

example:
  vllm-topkx doctor --json | jq .backends
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--compile", action="store_true", help="time what a vLLM worker compiles at its first start")


def run(args: argparse.Namespace) -> int:
    report = examine()
    if args.compile:
        report["compile"] = compile_time.measure()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0 if report["ok"] else 1


def examine() -> dict[str, Any]:
    """All of the report, as ``--json`` prints it; the keys stay as they are.

    ``ok``, ``versions``, ``cpu``, ``gpus``, ``peer_access``, ``symmetric_memory``, ``cute_dsl``,
    ``shared_memory``, ``backends``, ``settings``, ``vllm``. Where something is not to be had, ``reason``
    says why.
    """
    found = gpus()
    peers = peer_access(len(found))
    settings, settings_problem = _settings()
    cute, symmetric = cute_dsl_problem(), _symmetric_memory_problem(len(found), peers)
    no_gpu = _gpu_problem(found)
    backends = {
        "cuda": settings_problem or no_gpu or cute or symmetric,
        "loopback": settings_problem or no_gpu or cute,
        "cpu": settings_problem or _cpu_problem(),
        "nccl": settings_problem or _process_group_problem(bool(found)),
    }
    root = installed_root()
    hooks = [] if root is None else check_hooks(root)
    plugin = plugin_problem(os.environ.get("VLLM_TOPKX", "1")) or first_loss_of_everything(hooks)
    return {
        "ok": any(problem is None for problem in backends.values()),
        "versions": versions(),
        "cpu": cpu_name(),
        "gpus": [asdict(gpu) for gpu in found],
        "peer_access": peers,
        "symmetric_memory": _answer(symmetric),
        "cute_dsl": {"version": version_of("nvidia-cutlass-dsl"), **_answer(cute)},
        "shared_memory": _shared_memory(),
        "backends": {name: _answer(problem) for name, problem in backends.items()},
        "settings": {"values": settings, "reason": settings_problem},
        "vllm": {
            "version": version_of("vllm"),
            "plugin": _answer(plugin),
            "hooks": [hook.as_dict() for hook in hooks],
        },
    }


def _answer(problem: str | None) -> dict[str, Any]:
    return {"available": problem is None, "reason": problem}


def _settings() -> tuple[dict[str, Any], str | None]:
    """The package's variables as they are understood, and what is wrong with them."""
    try:
        s = Settings.from_env()
    except TopkxError as error:
        return {name: value for name, value in os.environ.items() if name.startswith("VLLM_TOPKX")}, str(error)
    return {
        "VLLM_TOPKX": s.mode,
        "VLLM_TOPKX_MAX_ROWS": s.max_rows,
        "VLLM_TOPKX_TIMEOUT_S": s.timeout_s,
        "VLLM_TOPKX_LOCAL_TOPK": s.local_topk,
    }, None


def _gpu_problem(found: list) -> str | None:
    if not found:
        built = torch.version.cuda is not None
        return "no CUDA GPU is visible" if built else f"torch {torch.__version__} is built without CUDA"
    if not all(gpu.supported for gpu in found):
        old = next(gpu for gpu in found if not gpu.supported)
        return f"GPU {old.index} ({old.name}) has compute capability {old.compute_capability}: Hopper (9.0) is needed"
    return None


def _symmetric_memory_problem(count: int, peers: list[list[bool]]) -> str | None:
    if not count:
        return "no CUDA GPU is visible"
    if not hasattr(getattr(torch._C, "_distributed_c10d", None), "_SymmetricMemory"):
        return f"torch {torch.__version__} has no symmetric memory"
    if count < 2:
        return "one GPU is visible: an exchange joins 2 to 16"
    apart = [(i, j) for i in range(count) for j in range(count) if not peers[i][j]]
    return f"GPU {apart[0][0]} cannot map the memory of GPU {apart[0][1]}" if apart else None


def _cpu_problem() -> str | None:
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    if not os.access(SHM, os.W_OK):
        return f"{SHM} cannot be written"
    return _process_group_problem(False)


def _process_group_problem(on_gpu: bool) -> str | None:
    if not dist.is_available():
        return f"torch {torch.__version__} is built without torch.distributed"
    if not (dist.is_gloo_available() or (on_gpu and dist.is_nccl_available())):
        return "torch.distributed has neither gloo nor, for GPUs, NCCL"
    return None


def _shared_memory() -> dict[str, Any]:
    try:
        return {"path": str(SHM), "free_bytes": free_bytes()}
    except OSError:
        return {"path": str(SHM), "free_bytes": None}


def _print(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 120)

    def table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
        made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for column in columns:
            made.add_column(column, overflow="fold")
        for row in rows:
            made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
        console.print(made)

    def mark(yes: bool) -> Text:
        return Text("yes", style="green") if yes else Text("no", style="red")

    def answer(name: str, found: dict[str, Any]) -> list[Any]:
        return [name, mark(found["available"]), found["reason"] or ""]

    table("Versions", ["", "version"], [[name, found or "-"] for name, found in report["versions"].items()])
    free = report["shared_memory"]["free_bytes"]
    machine = [["CPU", report["cpu"]], ["/dev/shm free", "-" if free is None else f"{free / 2**30:.1f} GiB"]]
    for gpu in report["gpus"]:
        machine.append(
            [f"GPU {gpu['index']}", f"{gpu['name']}, sm {gpu['compute_capability']}, {gpu['memory_gib']} GiB"]
        )
    table("Machine", ["", ""], machine)
    if len(report["gpus"]) > 1:
        header = ["GPU", *(str(j) for j in range(len(report["gpus"])))]
        matrix = [[i, *(mark(cell) for cell in row)] for i, row in enumerate(report["peer_access"])]
        table("Peer access", header, matrix)
    kernels = [answer(name, report[key]) for name, key in _KERNEL_ROWS]
    table("What the kernels need", ["", "available", "why not"], kernels)
    table("Backends", ["", "available", "why not"], [answer(*item) for item in report["backends"].items()])
    values = [[name, "-" if value is None else value] for name, value in report["settings"]["values"].items()]
    wrong = report["settings"]["reason"]
    table("Settings", ["", "value"], values + ([[Text("refused", style="red"), wrong]] if wrong else []))
    if (compiled := report.get("compile")) is not None:
        table("Compile time", ["", ""], [[name, value] for name, value in compiled.items() if value is not None])
    vllm = report["vllm"]
    title = f"vLLM {vllm['version'] or '(not installed)'}"
    table(title, ["", "takes over", "why not"], [answer("plugin", vllm["plugin"])])
    unknown = Text("-")
    hooks = [
        [hook["hook"], unknown if hook["holds"] is None else mark(hook["holds"]), hook["reason"] or "", hook["lost"]]
        for hook in vllm["hooks"]
    ]
    if hooks:
        table("What the plugin hooks into", ["", "found", "why not", "lost without it"], hooks)


_KERNEL_ROWS = (("CuTe DSL", "cute_dsl"), ("symmetric memory", "symmetric_memory"))
