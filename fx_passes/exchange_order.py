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
    calls = defaultdict(list)
    for node in graph.nodes:
        call = topkx_call(node)
        if call is not None and mutated_args(call.op) == ["order"]:
            calls[_device(call)].append(call)
    for device, group in calls.items():
        orders = {call.args["order"] for call in group}
        if len(group) == 1 or (len(orders) == 1 and None not in orders and not any(c.functionalized for c in group)):
            continue
        _share(graph, group, device)
        for order in orders - {None}:
            if not order.users and not order.is_impure():
                graph.erase_node(order)


def _device(call: Call) -> torch.device:
    return next(t.device for arg in call.args.values() if (t := tensor_of(arg)) is not None)


def _share(graph: fx.Graph, calls: list[Call], device: torch.device) -> None:
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        # Not a constant: those are folded and merged with equal ones; empty tensors are neither.
        empty, options = torch.ops.aten.empty.memory_format, {"dtype": torch.int32, "device": device}
        order = graph.create_node("call_function", empty, ([1],), options, name="order")
    example = next(t for arg in calls[0].args.values() if (t := tensor_of(arg)) is not None)
    order.meta[value_key(calls[0].node)] = example.new_empty([1], dtype=torch.int32)
    for call in calls:
        if call.functionalized and call.outputs() is not None:
            returns = value_of(call.node)[: len(call.op._schema.returns)]
            replace_outputs(call, insert_call(call.node, call.op, call.args | {"order": order}, returns))
        elif not call.functionalized:
            call.node.update_kwarg("order", order)
