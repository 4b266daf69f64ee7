"""What of vLLM the plugin can take over, read from vLLM's source without importing it."""

from __future__ import annotations

import ast
import importlib.util
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..plugin import merge
from .machine import version_of

ENTRY_POINTS, PLUGIN = "vllm.general_plugins", "topkx"
BACKENDS, INDUCTOR_PASS = "compilation/backends.py", "compilation/passes/inductor_pass.py"
INDEXER = "model_executor/layers/sparse_attn_indexer.py"


@dataclass(frozen=True)
class Hook:
    """A path of vLLM's: whether what the plugin hooks into is there, and whether it takes over; else the reason."""

    path: str
    hook: str
    found: bool
    taken_over: bool
    reason: str | None


def plugin_problem(mode: str) -> str | None:
    """Why vLLM will not load the plugin, or why it will do nothing; None when it takes over.

    Args:
        mode: the setting ``VLLM_TOPKX``.
    """
    if version_of("vllm") is None:
        return "vLLM is not installed: pip install 'vllm-topkx[vllm]'"
    if PLUGIN not in {entry.name for entry in metadata.entry_points(group=ENTRY_POINTS)}:
        return f"no entry point {PLUGIN!r} in the group {ENTRY_POINTS}: reinstall vllm-topkx"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed!r} leaves {PLUGIN!r} out"
    return "VLLM_TOPKX=0 turns it off" if mode == "0" else None


def find_hooks(problem: str | None) -> list[Hook]:
    """The hooks in the installed vLLM's source.

    Args:
        problem: why the plugin is off as a whole, or None.
    """
    spec = importlib.util.find_spec("vllm")  # finds a top-level package without importing it
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    hooks = []
    for path, name, find_problem in (
        ("eager and compiled: merge function", merge.FUNCTION, _merge_problem),
        ("compiled: post-grad passes", "VllmBackend.configure_post_pass", _backend_problem),
    ):
        missing = find_problem(Path(roots[0])) if roots else "vLLM is not installed"
        reason = missing or problem
        hooks.append(Hook(path, name, missing is None, reason is None, reason))
    return hooks


def _merge_problem(root: Path) -> str | None:
    tree = _parse(root / INDEXER)
    if tree is None:
        return f"this vLLM has no {INDEXER}"
    function = _definition(tree, ast.FunctionDef, merge.FUNCTION)
    if function is None:
        return f"{INDEXER} has no {merge.FUNCTION}"
    arguments = function.args
    names = tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    if names != merge.PARAMETERS or arguments.vararg or arguments.kwarg:
        return f"{merge.FUNCTION} has other parameters than are known: {', '.join(names)}"
    return None


def _backend_problem(root: Path) -> str | None:
    tree = _parse(root / BACKENDS)
    if tree is None or not (root / INDUCTOR_PASS).is_file():
        return f"this vLLM has no {BACKENDS if tree is None else INDUCTOR_PASS}"
    backend = _definition(tree, ast.ClassDef, "VllmBackend")
    if backend is None:
        return f"{BACKENDS} has no class VllmBackend"
    if _definition(backend, ast.FunctionDef, "configure_post_pass") is None:
        return f"VllmBackend in {BACKENDS} has no method configure_post_pass"
    return None


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _definition(tree: ast.Module | ast.ClassDef, kind: type, name: str):
    return next((node for node in tree.body if isinstance(node, kind) and node.name == name), None)
