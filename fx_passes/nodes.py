"""One view of FX nodes, whichever tracer made them.

A Dynamo graph calls methods, torch functions and overload packets, and keeps example values; a graph after
AOTAutograd calls ATen overloads, wraps mutable ops in ``auto_functionalized`` (v2, or v1 in vLLM), and keeps
``val``. Here, and only here, both become the same thing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import is_mutation_op
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

_FUNCTIONALIZED = (
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
)
#: ``x[i] = y``, ``x += y`` ... as Dynamo writes them.
_WRITING_OPERATORS = {operator.setitem} | {
    getattr(operator, f"__i{name}__")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
}
#: What a replacement keeps of the node that it replaces: where it came from, and its stream.
_KEPT_META = ("stack_trace", "nn_module_stack", "custom")


def value_key(node: fx.Node) -> str:
    """The ``meta`` key under which ``node``'s graph keeps fake values."""
    return "example_value" if "example_value" in node.meta and "val" not in node.meta else "val"


def value_of(node: fx.Node) -> Any:
    """The fake value of ``node``, or None."""
    return node.meta.get(value_key(node))


def tensor_of(node: object) -> torch.Tensor | None:
    """The fake tensor of ``node``, or None for anything but a node of one tensor."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def op_name(node: fx.Node) -> str:
    """``"aten::view"`` for every spelling of view, ``"getitem"``, or ``""`` for what is not an op."""
    target = node.target
    if node.op == "call_method":
        return f"aten::{target}"
    if node.op != "call_function":
        return ""
    if isinstance(target, OpOverload):
        return target._schema.name
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name
    if target is operator.getitem:
        return "getitem"
    name = getattr(target, "__name__", "")
    return f"aten::{name}" if getattr(torch, name, None) is target else ""


def may_write(node: fx.Node) -> bool:
    """Whether ``node`` may write to a tensor that it is given; which exchanges do only to what orders them."""
    target, call = node.target, topkx_call(node)
    if call is not None:
        return mutated_args(call.op) not in ([], ["order"])
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads() if not name.endswith("out")]
        return node.kwargs.get("out") is not None or any(op._schema.is_mutable for op in overloads)
    if isinstance(target, HigherOrderOperator):
        return target not in _FUNCTIONALIZED
    return target in _WRITING_OPERATORS or is_mutation_op(node)


@dataclass(frozen=True)
class Call:
    """A call of an op with every argument by its schema name, defaults filled in.

    Attributes:
        node: the node that calls it, directly or functionalized.
        functionalized: whether outputs past the op's own are the tensors that it mutates.
    """

    node: fx.Node
    op: OpOverload
    args: dict[str, Any]
    functionalized: bool

    @property
    def name(self) -> str:
        return self.op._schema.name

    def outputs(self) -> list[tuple[int, fx.Node]] | None:
        """The ``getitem`` nodes of the call with their index; None when something else uses it."""
        users = list(self.node.users)
        if any(user.target is not operator.getitem for user in users):
            return None
        return [(user.args[1], user) for user in users]


def topkx_call(node: fx.Node) -> Call | None:
    """``node`` as a call of a ``topkx::`` op, or None."""
    return op_call(node, "topkx")


def op_call(node: fx.Node, namespace: str) -> Call | None:
    """``node`` as a call of an op of ``namespace``, or None."""
    if node.op != "call_function":
        return None
    functionalized = node.target in _FUNCTIONALIZED
    op = node.args[0] if functionalized else node.target
    if isinstance(op, OpOverloadPacket):
        op = op.default if op._qualified_op_name.startswith(f"{namespace}::") else None
    if not isinstance(op, OpOverload) or op.namespace != namespace:
        return None
    if not functionalized:
        return Call(node, op, bind(op, node.args, node.kwargs), False)
    kwargs = dict(node.kwargs)
    for name in mutated_args(op):
        index = kwargs.get(f"_{name}_base_index")  # v2 moves mutated arguments into a list
        if index is not None:
            kwargs[name] = kwargs["_all_bases"][index]
    return Call(node, op, bind(op, (), kwargs), True)


def bind(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, with defaults; other names are dropped."""
    schema = op._schema.arguments
    given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def bound_args(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node that calls an op (not a method or torch function), by schema name."""
    op = node.target.default if isinstance(node.target, OpOverloadPacket) else node.target
    assert isinstance(op, OpOverload)
    return bind(op, node.args, node.kwargs)


def mutated_args(op: OpOverload) -> list[str]:
    """Names of the arguments that the schema of ``op`` marks as written."""
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def insert_call(before: fx.Node, op: OpOverload, args: dict[str, Any], value: Any) -> fx.Node:
    """A direct call of ``op`` in front of ``before``, with ``args`` by schema name and the fake ``value``."""
    schema = op._schema.arguments
    required = [a.name for a in schema if not a.has_default_value()]
    optional = {a.name: args[a.name] for a in schema if a.has_default_value() and args[a.name] != a.default_value}
    graph, name = before.graph, op._schema.name.partition("::")[2]
    with graph.inserting_before(before):
        node = graph.create_node("call_function", op, tuple(args[n] for n in required), optional, name=name)
    node.meta = {key: before.meta[key] for key in _KEPT_META if key in before.meta}
    node.meta[value_key(before)] = value
    return node


def replace_outputs(old: Call, new: fx.Node) -> None:
    """Makes the users of ``old``'s outputs use those of ``new``, erases ``old``.

    ``old.outputs()`` is not None. A functionalized call's extra outputs become the mutated arguments.
    """
    extra = [old.args[name] for name in mutated_args(old.op) if old.args[name] is not None]
    key, values = value_key(new), value_of(new)
    made: dict[int, fx.Node] = {}
    for index, output in old.outputs() or []:
        if output.users:
            if index >= len(old.op._schema.returns):
                replacement = extra[index - len(old.op._schema.returns)]
            elif index in made:
                replacement = made[index]
            else:
                with new.graph.inserting_before(output):
                    replacement = made[index] = new.graph.call_function(operator.getitem, (new, index))
                replacement.meta = {k: v for k, v in output.meta.items() if k in _KEPT_META}
                replacement.meta[key] = values[index]
            output.replace_all_uses_with(replacement)
        new.graph.erase_node(output)
    new.graph.erase_node(old.node)
