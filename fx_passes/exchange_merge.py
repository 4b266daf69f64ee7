"""NCCL form to exchange form: see :class:`ExchangeMergePass`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from ..ops.checks import check_logits, check_world
from ..ops.errors import ExchangeTimeoutError, TopkxError
from ..ops.exchange import require_exchange
from ..ops.groups import find_group
from ..settings import Settings
from .cache_key import pass_uuid
from .exchange_order import order_exchanges
from .gather_layout import AllGather, LayoutTracker, UnknownLayoutError
from .left_alone import LeftAlone, RewritingPass, log, require
from .nodes import Call, insert_call, may_write, op_name, replace_outputs, tensor_of, topkx_call, value_of

IDS, SATURATION = 2, 3  # of the outputs rows, valid, ids, saturation
#: What ``topk_select`` and ``topk_rescue`` must agree on.
_SHARED = (
    *("gathered", "rank", "topk", "local_topk", "interleave"),
    *("block_table", "req_id", "block_size", "block_stride"),
)
_CONSTANT = ("rank", "topk", "local_topk", "interleave")


@dataclass
class Chain:
    """A matched NCCL form and the call that takes its place.

    Attributes:
        select: the ``topk_select``.
        rescue: the ``topk_rescue``; None where N = K needs none.
        between: the nodes that gather the words and bring them into order, sources first.
        args: arguments of the ``exchange_merge``.
        value: its fake outputs.
    """

    select: Call
    rescue: Call | None
    between: list[fx.Node]
    args: dict[str, Any]
    value: tuple[torch.Tensor, ...]

    def replace(self) -> None:
        """Puts the exchange where the chain's last op was, and erases the chain."""
        last = self.rescue or self.select
        merge = insert_call(last.node, torch.ops.topkx.exchange_merge.default, self.args, self.value)
        replace_outputs(last, merge)
        graph = merge.graph
        if self.rescue is not None:
            for _, output in self.select.outputs() or []:
                graph.erase_node(output)
            graph.erase_node(self.select.node)
        for node in reversed(self.between):
            graph.erase_node(node)


class ExchangeMergePass(RewritingPass):
    """Rewrites all-gather, select and rescue to one ``topkx::exchange_merge``::

        words = local_topk_words(logits, row_ends, N)
        gathered = all_gather(words, ...)
        gathered = view / permute / split, cat ... (gathered)
        rows, valid, ids, saturation = topk_select(gathered, rank, K, N, ...)
        rows, valid, ids = topk_rescue(gathered, saturation, rows, valid, ids, logits, row_ends, group, ...)

    becomes ::

        words = local_topk_words(logits, row_ends, N)
        rows, valid, ids = exchange_merge(words, logits, row_ends, group, W, K, N, ...)

    and the exchanges of the graph are kept in order (:mod:`.exchange_order`). A chain that cannot become an
    exchange with the same result is left as it is; the reason is logged once and counted. Takes graphs
    from Dynamo and from AOTAutograd, before and after Inductor's own passes.

    Args:
        max_rows: the caller's promise that no call has more rows, for graphs whose row count is symbolic
            (vLLM's compile range). Without it, the bound that tracing knows counts
            (``torch._dynamo.mark_dynamic(x, 0, max=...)``).
        early: whether a later pass meets the parts of the graph again. It will order the exchanges, and say
            which chains stay.

    Attributes:
        rewritten: chains rewritten so far.
        left_alone: chains left alone so far, by reason.
    """

    LEFT_ALONE = "%s keeps its all-gather: %s"

    def __init__(self, max_rows: int | None = None, early: bool = False) -> None:
        super().__init__()
        self.max_rows, self.early = max_rows, early

    def uuid(self) -> str:
        return pass_uuid("ExchangeMergePass", self.max_rows, self.early)

    def __call__(self, graph: fx.Graph) -> None:
        layouts, rewritten = LayoutTracker(), 0
        off = Settings.from_env().mode == "0"
        for node in [node for node in graph.nodes if op_name(node) == "topkx::topk_select"]:
            try:
                require(not off, "VLLM_TOPKX=0")
                match_chain(node, layouts, self.max_rows).replace()
                rewritten += 1
            except LeftAlone as left:
                self.leave_alone(node, str(left), logging.DEBUG if self.early else logging.WARNING)
        self.rewritten += rewritten
        if rewritten:
            log.info("rewrote %d of the graph's top-K merges to exchanges", rewritten)
        if not self.early:
            order_exchanges(graph)


def match_chain(node: fx.Node, layouts: LayoutTracker, max_rows: int | None) -> Chain:
    """The chain that ends in the ``topk_select`` ``node`` and its rescue.

    Raises:
        LeftAlone: it is not the NCCL form, or the exchange would not give its results.
    """
    select = topkx_call(node)
    assert select is not None
    constant = all(isinstance(select.args[name], int) for name in _CONSTANT)
    require(constant, f"topk_select's {', '.join(_CONSTANT)} are not all constants")
    try:
        gathered = layouts(select.args["gathered"])
    except UnknownLayoutError as error:
        raise LeftAlone(str(error)) from None
    require(gathered.all_gather is not None, "the words are not all-gathered")
    require(gathered.is_select_order(), f"topk_select gets the words as {gathered.dims}, not rank, row, word")
    words = topkx_call(gathered.words)
    assert words is not None and gathered.all_gather is not None
    require(words.args["local_topk"] == select.args["local_topk"], "topk_select and the words differ in local_topk")

    rescue = _find_rescue(select)
    if rescue is None:
        # Select alone is exact only when the ranks send all K.
        exact = select.args["local_topk"] == select.args["topk"]
        require(exact, "local_topk < topk without topk_rescue is not exact, the exchange would be")
    else:
        _check_rescue(select, rescue, words)
    between = layouts.path(select.args["gathered"])
    _check_users(select, rescue, words, between)

    args = _merge_args(select, rescue, words, gathered.all_gather)
    _check_exchange(select, gathered.all_gather, args, max_rows)
    # The exchange's outputs are the chain's; ids that nobody uses are not written.
    rows, valid, ids = value_of((rescue or select).node)[: IDS + 1]
    if not args["emit_ids"]:
        ids = ids.new_empty((0, ids.shape[1]))
    return Chain(select, rescue, between, args, (rows, valid, ids))


def _find_rescue(select: Call) -> Call | None:
    outputs = select.outputs()
    require(outputs is not None, "the outputs of topk_select are used as a whole")
    users = {user for index, output in outputs or [] for user in output.users if index == SATURATION}
    calls = [call for user in users if (call := topkx_call(user)) and call.name == "topkx::topk_rescue"]
    require(len(calls) < 2, "one topk_select has several topk_rescue")
    return calls[0] if calls else None


def _check_rescue(select: Call, rescue: Call, words: Call) -> None:
    for name in _SHARED:
        require(rescue.args[name] == select.args[name], f"topk_rescue and topk_select differ in {name}")
    for name in ("logits", "row_ends"):
        require(rescue.args[name] is words.args[name], f"topk_rescue re-reads other {name} than the words are from")
    for index, name in enumerate(("rows", "valid", "ids", "saturation")):
        own = any(i == index and node is rescue.args[name] for i, node in select.outputs() or [])
        require(own, f"topk_rescue gets other {name} than topk_select gives")
    node = select.node.next
    while node is not rescue.node:  # the exchange reads once what these read twice
        require(not may_write(node), f"{node.name} between topk_select and topk_rescue may change what both read")
        node = node.next


def _check_users(select: Call, rescue: Call | None, words: Call, between: list[fx.Node]) -> None:
    """What the exchange does not compute may be used in the chain only, and the words it sends stay as they are."""
    chain = {*between, select.node, *([rescue.node] if rescue else [])}
    for user in words.node.users:
        require(user in chain or not _may_change(user, words.node), f"{user.name} may change the words in place")
    for node in between:
        others = [user.name for user in node.users if user not in chain]
        require(not others, f"{node.name} on the way from the words to topk_select is also used by {others}")
    for index, output in select.outputs() or []:
        others = [user.name for user in output.users if user not in chain]
        kept = rescue is None and index != SATURATION
        require(kept or not others, f"{output.name}, which topk_select gives, is also used by {others}")
    if rescue is not None:
        require(rescue.outputs() is not None, "the outputs of topk_rescue are used as a whole")


def _may_change(user: fx.Node, tensor: fx.Node) -> bool:
    """Whether ``user`` writes to ``tensor`` or gives a view of it, through which something may (Dynamo graphs)."""
    value, own = tensor_of(user), tensor_of(tensor)
    is_view = value is not None and own is not None and value.untyped_storage()._cdata == own.untyped_storage()._cdata
    return is_view or may_write(user)


def _merge_args(select: Call, rescue: Call | None, words: Call, all_gather: AllGather) -> dict[str, Any]:
    used = {index for index, output in (rescue or select).outputs() or [] if output.users}
    return {
        **{name: select.args[name] for name in _SHARED if name not in ("gathered", "rank")},
        "words": words.node,
        "logits": words.args["logits"],
        "row_ends": words.args["row_ends"],
        "group": rescue.args["group"] if rescue else all_gather.group,
        "world_size": all_gather.world_size,
        "emit_ids": select.args["emit_ids"] and (IDS in used or not used),
        "lane": rescue.args["lane"] if rescue else 0,
        "order": None,
    }


def _check_exchange(select: Call, all_gather: AllGather, args: dict[str, Any], max_rows: int | None) -> None:
    """There is a reserved exchange for the chain, it is the one that the chain means, and it takes these calls."""
    words, logits, world_size = tensor_of(args["words"]), tensor_of(args["logits"]), args["world_size"]
    assert words is not None and logits is not None
    rows, device, layout = words.shape[0], words.device, select.args["layout"]
    try:
        # What exchange_merge refuses and the ops of a chain without rescue do not.
        check_world(world_size)
        of_scores = check_logits(logits, args["interleave"], world_size).name
        require(of_scores == layout, f"topk_select reads words in layout {layout}, these are {of_scores}")
        exchange = require_exchange(
            args["group"], world_size, device, rows, args["topk"], args["local_topk"], layout, args["lane"]
        )
    except (TopkxError, ExchangeTimeoutError) as error:
        raise LeftAlone(str(error)) from error
    same = find_group(all_gather.group) is find_group(args["group"])
    require(same, f"the all-gather is over group {all_gather.group!r}, topk_rescue over {args['group']!r}")
    rank = select.args["rank"]
    require(rank == exchange.rank, f"topk_select is for rank {rank}, this process is rank {exchange.rank}")
    most = [bound for bound in (_upper_bound(rows), max_rows) if bound is not None]
    require(
        most and min(most) <= exchange.rows,
        f"up to {min(most) if most else 'any number of'} rows, but the exchange has {exchange.rows} reserved: "
        "reserve more, or bound the rows with torch._dynamo.mark_dynamic(..., max=) or max_rows",
    )


def _upper_bound(rows: int | torch.SymInt) -> int | None:
    if isinstance(rows, int):
        return rows
    upper = rows.node.shape_env.bound_sympy(rows.node.expr).upper
    return int(upper) if isinstance(upper, sympy.Integer) else None
