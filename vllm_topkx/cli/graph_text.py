"""An FX graph as text: one line a node, ``name: dtype[shape] = op(args)``; and graphs before and after a pass."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


@dataclass
class Recording:
    """What the exchange pass did: graphs that it met as text, before and after it, and its counts."""

    graphs: list[tuple[str, str]] = field(default_factory=list)
    rewritten: int = 0
    left_alone: Counter[str] = field(default_factory=Counter)


def marked(sign: str, text: str, other: str, coloured: bool = False) -> str:
    """``text`` indented; its lines that ``other`` does not have begin with ``sign``: red for ``-``, else green."""
    colour, plain = ("\033[31m" if sign == "-" else "\033[32m", "\033[0m") if coloured else ("", "")
    known = set(other.splitlines())
    return "\n".join(f"  {line}" if line in known else f"{colour}{sign} {line}{plain}" for line in text.splitlines())


def graph_text(graph: fx.Graph) -> str:
    """``graph``, one line a node; values have their type where tracing left it in ``meta``."""
    return "\n".join(_line(node) for node in graph.nodes)


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    value = _type(node.meta.get("val", node.meta.get("example_value")))
    left = f"{node.name}: {value}" if value else node.name
    if node.op == "placeholder":
        return f"{left} = input"
    if node.op == "get_attr":
        return f"{left} = self.{node.target}"
    if node.target is operator.getitem:
        return f"{left} = {_argument(node.args[0])}[{_argument(node.args[1])}]"
    arguments = [*map(_argument, node.args), *(f"{name}={_argument(value)}" for name, value in node.kwargs.items())]
    return f"{left} = {_operator(node)}({', '.join(arguments)})"


def _operator(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target if node.op == "call_module" else f".{node.target}"
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(node.target).removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))


def _argument(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_argument, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_argument(item)}" for key, item in value.items()) + "}"
    if isinstance(value, torch._ops.OpOverload):
        return str(value)
    return repr(value) if isinstance(value, str) else str(value)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_type(item) or type(item).__name__ for item in value)})"
    return str(value) if isinstance(value, torch.SymInt) else ""
