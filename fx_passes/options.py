"""How user code runs the passes: by Inductor's options, or by a backend without Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from .exchange_merge import ExchangeMergePass

GraphPass = Callable[[fx.Graph], None]


class PassSequence(CustomGraphPass):
    """Runs ``passes`` in turn. Inductor caches what they compile when each of them has a ``uuid``."""

    def __init__(self, passes: Sequence[GraphPass]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> tuple | None:
        uuids = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes)
        return None if None in uuids else uuids


def compile_options(post_pass: GraphPass | None = None) -> dict[str, Any]:
    """Options for ``torch.compile``: exchanges in place of all-gather, select and rescue.

    Example::

        f = torch.compile(f, options=vllm_topkx.compile_options())
        f = torch.compile(f, options={**vllm_topkx.compile_options(my_pass), "max_autotune": True})

    Args:
        post_pass: a post-grad pass of yours, which runs first. The default is the one that
            ``torch._inductor.config.post_grad_custom_post_pass`` names, since an option hides it.
    """
    merge = ExchangeMergePass()
    own = config.post_grad_custom_post_pass if post_pass is None else post_pass
    if own is None:
        return {"post_grad_custom_post_pass": merge}
    passes = own if isinstance(own, (list, tuple)) else (own,)
    return {"post_grad_custom_post_pass": PassSequence((*passes, merge))}


def aot_eager(
    gm: fx.GraphModule, example_inputs: Sequence[torch.Tensor], *, graph_pass: GraphPass | None = None
) -> Callable[..., Any]:
    """A ``torch.compile`` backend like ``"aot_eager"`` that runs the pass: ``torch.compile(f, backend=aot_eager)``.

    Args:
        graph_pass: by default a new :class:`ExchangeMergePass`. Bind one with ``functools.partial`` to read its
            counters.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    run_pass = ExchangeMergePass() if graph_pass is None else graph_pass

    def compile_graph(gm: fx.GraphModule, _: Sequence[torch.Tensor]) -> Callable[..., Any]:
        for module in gm.modules():
            if isinstance(module, fx.GraphModule):  # it, and nested regions, as in Inductor
                run_pass(module.graph)
                module.recompile()
        return make_boxed_func(gm.forward)

    return aot_autograd(fw_compiler=compile_graph)(gm, example_inputs)
