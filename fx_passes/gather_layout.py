"""Where each source rank, row and word is in a tensor derived from ``topkx::local_topk_words``.

``topkx::topk_select`` wants ``[W, T, R]``: source rank, row, word. An all-gather gives the ranks' words
concatenated along a dimension, and users bring them into that order with views, permutes, or split and cat.
Each dimension of such a tensor is a sequence of axes, outermost first, of which no op here splits one::

    words                      [(row), (word)]
    all-gather along dim 1     [(row), (rank, word)]
    view(T, W, R)              [(row), (rank), (word)]
    permute(1, 0, 2)           [(rank), (row), (word)]

Axes of size 1 are left out. Sizes may be symbolic; two are equal when that is known without a guard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .nodes import bound_args, op_name, tensor_of, value_of

RANK, ROW, WORD = "rank", "row", "word"
Dims = tuple[tuple[str, ...], ...]
Size = int | torch.SymInt

WORDS = "topkx::local_topk_words"
#: Ops whose output has its input's dimensions.
_KEEPING = {"_c10d_functional::wait_tensor"} | {f"aten::{name}" for name in ("contiguous", "clone", "alias", "detach")}
#: Ops that keep the elements in row-major order: their output's shape says how axes are grouped.
_REGROUPING = {
    f"aten::{name}" for name in ("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
}
_PERMUTING = {f"aten::{name}" for name in ("permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims")}
_SPLITTING = {f"aten::{name}" for name in ("split", "split_with_sizes", "chunk", "tensor_split")}
_GATHERING = {"_c10d_functional::all_gather_into_tensor", "vllm::all_gather"}
_JOINING = {f"aten::{name}" for name in ("cat", "concat", "stack")}


class UnknownLayoutError(Exception):
    """The words cannot be followed through a node."""

    def __init__(self, node: fx.Node) -> None:
        op = op_name(node) or node.op
        super().__init__(f"the order of the gathered words is not understood at {node.name} = {op}")


@dataclass(frozen=True)
class AllGather:
    """One all-gather node: which group, and of how many ranks."""

    node: fx.Node
    group: str
    world_size: int


@dataclass(frozen=True)
class Gathered:
    """The axes of a tensor.

    Attributes:
        words: the ``local_topk_words`` node it derives from.
        all_gather: None before the all-gather.
        dims: the axes of each dimension.
        piece: for one of W pieces along the rank axis, its source rank.
    """

    words: fx.Node
    all_gather: AllGather | None
    dims: Dims
    piece: int | None = None

    def size(self, axes: Iterable[str]) -> Size:
        """Elements along ``axes``."""
        words = tensor_of(self.words)
        assert words is not None
        size: Size = 1
        for axis in axes:
            if axis == RANK:
                assert self.all_gather is not None
                size = size * self.all_gather.world_size
            else:
                size = size * words.shape[0 if axis == ROW else 1]
        return size

    def is_select_order(self) -> bool:
        """Whether this is the ``[W, T, R]`` that ``topk_select`` wants."""
        wanted = tuple(tuple(a for a in (axis,) if any(a in dim for dim in self.dims)) for axis in (RANK, ROW, WORD))
        return self.all_gather is not None and self.piece is None and self.dims == wanted


class LayoutTracker:
    """The :class:`Gathered` of nodes of one graph, each worked out once.

    Attributes:
        sources: the nodes from which each followed node takes the words.
    """

    def __init__(self) -> None:
        self.sources: dict[fx.Node, list[fx.Node]] = {}
        self._known: dict[fx.Node, Gathered] = {}
        self._permutations: dict[tuple, list[int]] = {}

    def __call__(self, node: object) -> Gathered:
        """The axes of ``node``.

        Raises:
            UnknownLayoutError: it does not come from ``local_topk_words``, or by an op that is not understood.
        """
        assert isinstance(node, fx.Node)
        if node not in self._known:
            self._known[node] = self._follow(node)
        return self._known[node]

    def path(self, node: fx.Node) -> list[fx.Node]:
        """The nodes from the words (left out) to ``node``, sources first."""
        path: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            if node not in path and self.sources[node]:
                for source in self.sources[node]:
                    visit(source)
                path[node] = None

        visit(node)
        return list(path)

    def _follow(self, node: fx.Node) -> Gathered:
        name = op_name(node)
        if name == WORDS and (words := tensor_of(node)) is not None:
            self.sources[node] = []
            row = () if statically_known_true(words.shape[0] == 1) else (ROW,)
            return Gathered(node, None, (row, (WORD,)))
        if name in _JOINING:
            return self._join(node, new_dim=name == "aten::stack")
        if name in _KEEPING:
            return self._source(node)
        if name in _REGROUPING:
            return self._regroup(node)
        if name in _PERMUTING:
            return self._permute(node)
        if name in _SPLITTING:
            return self._split(node)
        if name == "getitem" and isinstance(node.args[1], int):
            return self._pick(node)
        if name in _GATHERING:
            return self._gather(node)
        raise UnknownLayoutError(node)

    def _source(self, node: fx.Node) -> Gathered:
        if not node.args or not isinstance(node.args[0], fx.Node):
            raise UnknownLayoutError(node)
        self.sources[node] = [node.args[0]]
        return self(node.args[0])

    def _gather(self, node: fx.Node) -> Gathered:
        before, args = self._source(node), bound_args(node)
        dim, world_size, group = args.get("dim", 0), args.get("world_size", args.get("group_size")), args["group_name"]
        constant = isinstance(dim, int) and isinstance(world_size, int) and isinstance(group, str)
        if not constant or before.all_gather is not None:
            raise UnknownLayoutError(node)
        dims = _prepend_rank(before.dims, dim)
        return replace(before, all_gather=AllGather(node, group, world_size), dims=dims)

    def _regroup(self, node: fx.Node) -> Gathered:
        before, after = self._source(node), tensor_of(node)
        if after is None or after.dtype != torch.int32:  # a view as another dtype
            raise UnknownLayoutError(node)
        axes = [axis for dim in before.dims for axis in dim]
        dims = []
        for size in after.shape:
            taken = 0
            while not statically_known_true(before.size(axes[:taken]) == size):
                taken += 1
                if taken > len(axes):
                    raise UnknownLayoutError(node)
            dims.append(tuple(axes[:taken]))
            axes = axes[taken:]
        if axes:
            raise UnknownLayoutError(node)
        return replace(before, dims=tuple(dims))

    def _permute(self, node: fx.Node) -> Gathered:
        before = self._source(node)
        key = (node.target, len(before.dims), repr((node.args[1:], node.kwargs)))
        if key not in self._permutations:
            self._permutations[key] = _permutation(node, len(before.dims))
        return replace(before, dims=tuple(before.dims[dim] for dim in self._permutations[key]))

    def _split(self, node: fx.Node) -> Gathered:
        """W equal pieces along the rank axis; each has the axes that are returned."""
        before, pieces = self._source(node), value_of(node)
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        if before.all_gather is None or before.piece is not None or not isinstance(dim, int):
            raise UnknownLayoutError(node)
        dim %= len(before.dims)
        rank, rest = before.dims[dim][:1], before.dims[dim][1:]
        if rank != (RANK,) or len(pieces) != before.all_gather.world_size:
            raise UnknownLayoutError(node)
        if not all(statically_known_true(piece.shape[dim] == before.size(rest)) for piece in pieces):
            raise UnknownLayoutError(node)
        return replace(before, dims=(*before.dims[:dim], rest, *before.dims[dim + 1 :]))

    def _pick(self, node: fx.Node) -> Gathered:
        before = self._source(node)
        if op_name(node.args[0]) not in _SPLITTING:
            raise UnknownLayoutError(node)
        return replace(before, piece=node.args[1])

    def _join(self, node: fx.Node, new_dim: bool) -> Gathered:
        parts = node.args[0] if node.args else ()
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if not isinstance(parts, (list, tuple)) or not parts or not isinstance(dim, int):
            raise UnknownLayoutError(node)
        self.sources[node] = list(parts)
        pieces = [self(part) for part in parts]
        first = pieces[0]
        in_order = pieces == [replace(first, piece=rank) for rank in range(len(pieces))]
        if not in_order or first.all_gather is None or len(pieces) != first.all_gather.world_size:
            raise UnknownLayoutError(node)
        dims = first.dims
        if new_dim:
            dim %= len(dims) + 1
            dims = (*dims[:dim], (), *dims[dim:])
        return replace(first, dims=_prepend_rank(dims, dim), piece=None)


def _prepend_rank(dims: Dims, dim: int) -> Dims:
    dim %= len(dims)
    return (*dims[:dim], (RANK, *dims[dim]), *dims[dim + 1 :])


def _permutation(node: fx.Node, dims: int) -> list[int]:
    """Which dimension of its input each dimension of a permuting node is."""
    # Ask torch, which knows every spelling: apply the op to a tensor whose strides name its dimensions.
    probe = torch.empty((2,) * dims, device="meta")
    function = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
    try:
        permuted = function(probe, *node.args[1:], **node.kwargs)
    except (TypeError, RuntimeError, IndexError):
        raise UnknownLayoutError(node) from None
    return [probe.stride().index(stride) for stride in permuted.stride()]
