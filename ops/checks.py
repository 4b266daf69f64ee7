"""What is refused. One check a rule, used by the fake implementations and the real ones alike.

A size may be symbolic at trace time; a rule about it is then applied when its truth is known without
a guard, and by the real implementation in any case.
"""

from __future__ import annotations

import torch

from .errors import TopkxError
from .layouts import Layout, exchange_bytes, get_layout, layout_of, packed_row_words

MAX_TOPK = 4096
WORLD_SIZES = range(2, 17)
MAX_POSITION = 2**31 - 1
#: Kernels count the 8-byte halves of a rank's buffer with 32 bits.
MAX_EXCHANGE_BYTES = 8 << 32


def require(condition: object, message: str) -> None:
    """Raises ``TopkxError(message)`` when ``condition`` is known to be false."""
    if isinstance(condition, bool):
        failed = not condition
    else:
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # sympy: half a second, when needed

        failed = statically_known_true(torch.sym_not(condition))
    if failed:
        raise TopkxError(message)


def check_world(world_size: int) -> None:
    require(
        world_size in WORLD_SIZES,
        f"world size {world_size}: an exchange joins {WORLD_SIZES.start} to {WORLD_SIZES.stop - 1} ranks; "
        f"use the all-gather form without rescue (local_topk = topk) for other sizes",
    )


def check_topk(topk: int, local_topk: int) -> None:
    require(1 <= topk <= MAX_TOPK, f"topk {topk}: allowed is 1..{MAX_TOPK}")
    require(
        1 <= local_topk <= topk,
        f"local_topk {local_topk}: each rank sends 1..topk = {topk} candidates; leave it to default_local_topk()",
    )


def check_memory(world_size: int, rows: int, topk: int, local_topk: int, layout: str) -> None:
    """An exchange for ``rows`` rows is a buffer that kernels can address."""
    a_row = exchange_bytes(world_size, 1, topk, local_topk, layout)
    require(
        rows * a_row <= MAX_EXCHANGE_BYTES,
        f"{rows} rows take {rows * a_row / 2**30:.1f} GiB of peer-visible memory a rank: allowed is "
        f"{MAX_EXCHANGE_BYTES >> 30} GiB; reserve at most {MAX_EXCHANGE_BYTES // a_row} rows",
    )


def check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...], device: torch.device
) -> None:
    """``tensor`` has ``dtype``, lies on ``device`` and has ``shape`` (None: any size)."""
    require(tensor.dtype == dtype, f"{name} is {tensor.dtype}: must be {dtype}")
    require(tensor.device == device, f"{name} is on {tensor.device}, the other arguments on {device}: move it there")
    wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
    message = f"{name} has shape {list(tensor.shape)}: must be {wanted}"
    require(tensor.dim() == len(shape), message)
    for got, want in zip(tensor.shape, shape, strict=True):
        if want is not None:
            require(got == want, message)


def check_logits(logits: torch.Tensor, interleave: int, world_size: int) -> Layout:
    """Logits ``[T, L]`` whose positions fit the layout and, unsharded, int32."""
    layout = layout_of(logits.dtype)
    require(logits.dim() == 2, f"logits have shape {list(logits.shape)}: must be [rows, positions]")
    check_positions(logits.shape[1], layout, interleave, world_size)
    return layout


def check_positions(columns: int, layout: Layout, interleave: int, world_size: int) -> None:
    """``columns`` positions a rank can be told apart in ``layout``, and their global ids are int32."""
    require(
        columns <= layout.max_positions,
        f"{columns} positions a rank: layout {layout.name} holds {layout.max_positions}"
        + ("; convert the logits to float32" if layout.max_positions < MAX_POSITION else ""),
    )
    require(interleave >= 1, f"interleave {interleave}: must be at least 1")
    # The last global id is below this bound, with equality for whole stretches.
    stretches = (columns + interleave - 1) // interleave
    require(
        stretches * interleave * world_size <= MAX_POSITION + 1,
        f"{columns} positions on each of {world_size} ranks: global positions must stay below 2**31 (ids are int32)",
    )


def check_row_ends(logits: torch.Tensor, row_ends: torch.Tensor) -> None:
    """Shape and dtype of ``row_ends``; their values where they can be read without a device sync."""
    rows, columns = logits.shape
    check_tensor("row_ends", row_ends, torch.int32, (rows,), logits.device)
    if row_ends.device.type == "cpu" and not isinstance(row_ends, torch._subclasses.FakeTensor) and row_ends.numel():
        low, high = (int(v) for v in row_ends.aminmax())
        require(0 <= low and high <= columns, f"row_ends from {low} to {high}: must lie in 0..{columns} (the columns)")


def check_words(name: str, words: torch.Tensor, lead: tuple[int | None, ...], local_topk: int, layout: Layout) -> None:
    check_tensor(name, words, torch.int32, (*lead, packed_row_words(local_topk, layout.name)), words.device)


def check_kv_rows(
    rows: int,
    interleave: int,
    block_table: torch.Tensor | None,
    req_id: torch.Tensor | None,
    block_size: int,
    block_stride: int,
    device: torch.device,
) -> None:
    """The arguments that turn local positions into KV rows: all of them, or none."""
    require((block_table is None) == (req_id is None), "block_table and req_id go together: pass both or neither")
    if block_table is None or req_id is None:
        return
    check_tensor("block_table", block_table, torch.int32, (None, None), device)
    check_tensor("req_id", req_id, torch.int32, (rows,), device)
    require(block_size >= 1, f"block_size {block_size}: must be at least 1")
    require(block_stride >= block_size, f"block_stride {block_stride}: must be at least block_size = {block_size}")
    require(
        block_size % interleave == 0,
        f"interleave {interleave} does not divide block_size {block_size}: a stretch would straddle two blocks",
    )


def check_select(gathered: torch.Tensor, rank: int, topk: int, local_topk: int, interleave: int, layout: str) -> Layout:
    """What ``topk_select`` and ``topk_rescue`` need of gathered words ``[W, T, words]``."""
    require(gathered.dim() == 3, f"gathered has shape {list(gathered.shape)}: must be [world size, rows, words]")
    world_size = gathered.shape[0]
    check_topk(topk, local_topk)
    if local_topk < topk:
        check_world(world_size)
    require(0 <= rank < world_size, f"rank {rank} is not in 0..{world_size - 1}")
    found = get_layout(layout)
    check_words("gathered", gathered, (None, None), local_topk, found)
    require(interleave >= 1, f"interleave {interleave}: must be at least 1")
    return found


def check_order(order: torch.Tensor | None, device: torch.device) -> None:
    if order is not None:
        require(order.device == device, f"order is on {order.device}, the other arguments on {device}: move it there")
