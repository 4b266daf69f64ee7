"""vLLM's indexer op to this package's: see :class:`IndexerPass`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from ..ops.checks import WORLD_SIZES
from ..settings import Settings
from .cache_key import pass_uuid
from .left_alone import LeftAlone, RewritingPass, log, require
from .nodes import Call, op_call

VLLM_INDEXER, INDEXER = "vllm::sparse_attn_indexer", "topkx::sparse_attn_indexer"


@dataclass(frozen=True)
class Indexer:
    """A call of vLLM's indexer whose top-K is merged over ranks, and the op that takes its place."""

    call: Call
    op: OpOverload

    def replace(self) -> None:
        """Lets the node call ``op``: one schema, so arguments, outputs, users and ``meta`` stay what they are."""
        if self.call.functionalized:
            self.call.node.update_arg(0, self.op)
        else:
            self.call.node.target = self.op


class IndexerPass(RewritingPass):
    """Rewrites vLLM's sparse-attention indexer, where it merges over ranks, to this package's::

        ids = vllm.sparse_attn_indexer(hidden_states, ..., topk_indices_buffer, ..., dcp_world_size=2, ...)

    becomes ::

        ids = topkx.sparse_attn_indexer(hidden_states, ..., topk_indices_buffer, ..., dcp_world_size=2, ...)

    with the same arguments, functionalized or not. A ``dcp_world_size`` of 1 merges nothing and is not touched.
    Takes graphs from Dynamo and from AOTAutograd.

    Attributes:
        rewritten: calls rewritten so far.
        left_alone: calls over several ranks left alone so far, by reason.
    """

    LEFT_ALONE = f"%s stays {VLLM_INDEXER}: %s"

    def uuid(self) -> str:
        return pass_uuid("IndexerPass")

    def __call__(self, graph: fx.Graph) -> None:
        ours = getattr(torch.ops.topkx, "sparse_attn_indexer", None)
        if ours is None or Settings.from_env().mode == "0":
            log.debug("indexers stay %s: %s", VLLM_INDEXER, "VLLM_TOPKX=0" if ours else f"{INDEXER} is not defined")
            return
        found = []
        for node in graph.nodes:
            try:
                if (call := match_indexer(node)) is not None:
                    found.append(Indexer(call, ours.default))
            except LeftAlone as left:
                self.leave_alone(node, str(left))
        for match in found:
            match.replace()
        self.rewritten += len(found)
        if found:
            log.info("rewrote %d of the graph's indexers to %s", len(found), INDEXER)


def match_indexer(node: fx.Node) -> Call | None:
    """``node`` as a call of vLLM's indexer over several ranks; None for anything else.

    Raises:
        LeftAlone: it may be one, but stays vLLM's.
    """
    call = op_call(node, "vllm")
    if call is None or call.name != VLLM_INDEXER:
        return None
    world_size = call.args.get("dcp_world_size", 1)  # without the argument, the op merges nothing
    if world_size == 1:
        return None
    require(isinstance(world_size, int), "its dcp_world_size is not a constant")
    joined = f"an exchange joins {min(WORLD_SIZES)} to {max(WORLD_SIZES)}"
    require(world_size in WORLD_SIZES, f"it merges over {world_size} ranks, {joined}")
    return call
