"""Keeps the exchanges of a graph in program order.

An exchange advances epochs that no argument shows, so two of them must not change places. Each op that
communicates can name a tensor ``order`` as written (it writes nothing): all that name the same one have a
write-after-write dependence, which every compiler, Inductor's scheduler included, keeps.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from .nodes import Call, insert_call, mutated_args, replace_outputs, tensor_of, topkx_call, value_key, value_of


def order_exchanges(graph: fx.Graph) -> None:
    """Gives the communicating ops of ``graph`` one order tensor a device; a lone op needs none.

    ::

        a = exchange_merge(...)           order = empty([1])
        b = exchange_merge(...)     =>    a = exchange_merge(..., order=order)
                                          b = exchange_merge(..., order=order)

    Functionalized calls become direct ones: nothing but ``order`` is mutated, and nothing reads it.
    """
    calls: dict[torch.device, list[Call]] = defaultdict(list)
    for node in graph.nodes:
        call = topkx_call(node)
        if call is not None and mutated_args(call.op) == ["order"] and (example := _example(call)) is not None:
            calls[example.device].append(call)
    for group in calls.values():
        orders = {call.args["order"] for call in group}
        if len(group) == 1 or (len(orders) == 1 and None not in orders and not any(c.functionalized for c in group)):
            continue
        _share(graph, [call.node for call in group])


def _example(call: Call) -> torch.Tensor | None:
    """A fake tensor on the call's device; None in a graph without fake values."""
    return next((t for arg in call.args.values() if (t := tensor_of(arg)) is not None), None)


def _share(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    example = _example(topkx_call(nodes[0]))
    # Not a constant: those are folded and merged with equal ones; empty tensors are neither.
    empty, options = torch.ops.aten.empty.memory_format, {"dtype": torch.int32, "device": example.device}
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        order = graph.create_node("call_function", empty, ([1],), options, name="order")
    order.meta[value_key(nodes[0])] = example.new_empty([1], dtype=torch.int32)
    replaced = set()
    for node in nodes:
        call = topkx_call(node)  # now: an argument may be an output of the one before, which was replaced
        replaced.add(call.args["order"])
        if call.functionalized:
            returns = value_of(node)[: len(call.op._schema.returns)]
            replace_outputs(call, insert_call(node, call.op, call.args | {"order": order}, returns))
        else:
            node.update_kwarg("order", order)
    for old in replaced - {None}:
        if not old.users and not old.is_impure():
            graph.erase_node(old)
