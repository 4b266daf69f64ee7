"""The ``topkx::`` ops: registration (opcheck) and every refusal, at run time and at trace time alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import vllm_topkx
from vllm_topkx.ops.errors import TopkxError
from vllm_topkx.ops.keys import owner_and_local
from vllm_topkx.ranks import RankContext, RankPool

W, T, L, K, N, INTERLEAVE = 2, 3, 40, 8, 4, 2
ops = torch.ops.topkx


@dataclass
class Call:
    """An op and arguments it accepts; ``with_`` changes some of them."""

    op: Callable[..., Any]
    args: dict[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Call:
        return Call(self.op, {**self.args, **changes})

    def __call__(self) -> Any:
        return self.op(**self.args)


def good_calls(ctx: RankContext) -> dict[str, Call]:
    """One good call of every op, with all optional arguments, on every rank of a group of two."""
    vllm_topkx.reserve(ctx.group, rows=T, topk=K, local_topk=N)
    random = torch.Generator().manual_seed(ctx.rank)
    logits = torch.randn(T, L, generator=random)
    ends = torch.tensor([L, 5, 0], dtype=torch.int32)
    words = ops.local_topk_words(logits, ends, N)
    pieces = [torch.empty_like(words) for _ in range(W)]
    dist.all_gather(pieces, words, group=ctx.group)
    gathered = torch.stack(pieces)
    kv = {
        "block_table": torch.randint(0, 50, (4, L // 4), generator=random, dtype=torch.int32),
        "req_id": torch.tensor([2, 0, 3], dtype=torch.int32),
        "block_size": 4,
        "block_stride": 6,
    }
    select = {"rank": ctx.rank, "topk": K, "local_topk": N, "interleave": INTERLEAVE}
    rows, valid, ids, saturation = ops.topk_select(gathered, layout="fp32", **select, **kv)
    order = torch.zeros(1)
    return {
        "local_topk_words": Call(ops.local_topk_words.default, {"logits": logits, "row_ends": ends, "local_topk": N}),
        "topk_select": Call(ops.topk_select.default, {"gathered": gathered, "layout": "fp32", **select, **kv}),
        "topk_rescue": Call(
            ops.topk_rescue.default,
            {
                "gathered": gathered,
                "saturation": saturation,
                "rows": rows,
                "valid": valid,
                "ids": ids,
                "logits": logits,
                "row_ends": ends,
                "group": ctx.group_name,
                **select,
                **kv,
                "order": order,
            },
        ),
        "exchange_merge": Call(
            ops.exchange_merge.default,
            {
                "words": words,
                "logits": logits,
                "row_ends": ends,
                "group": ctx.group_name,
                "world_size": W,
                **{name: value for name, value in select.items() if name != "rank"},
                **kv,
                "order": order,
            },
        ),
        "merge_dcp_topk_": Call(
            ops.merge_dcp_topk_.default,
            {
                "logits": logits,
                "topk_indices": torch.arange(T * K, dtype=torch.int32).reshape(T, K),
                "world_size": W,
                "row_starts": torch.tensor([0, 3, 8], dtype=torch.int32),
                "group": ctx.group_name,
                **select,
            },
        ),
    }


OPS = ["local_topk_words", "topk_select", "topk_rescue", "exchange_merge", "merge_dcp_topk_"]
COMMUNICATE = ["topk_rescue", "exchange_merge", "merge_dcp_topk_"]


def positional(call: Call) -> tuple[tuple, dict[str, Any]]:
    """Arguments as opcheck wants them: positional where the schema allows."""
    args, kwargs = [], {}
    for argument in call.op._schema.arguments:
        if argument.name in call.args:
            if argument.kwarg_only:
                kwargs[argument.name] = call.args[argument.name]
            else:
                args.append(call.args[argument.name])
    return tuple(args), kwargs


def run_opcheck(ctx: RankContext, name: str) -> dict[str, str]:
    call = good_calls(ctx)[name]
    args, kwargs = positional(call)
    return torch.library.opcheck(call.op, args, kwargs)


@pytest.mark.parametrize("name", OPS)
def test_opcheck(pool: RankPool, name: str) -> None:
    for results in pool.run(run_opcheck, name, world_size=W):
        assert set(results.values()) == {"SUCCESS"}
        assert len(results) >= 4


def select_and_rescue_and_exchange(ctx: RankContext) -> tuple[list, list]:
    calls = good_calls(ctx)
    in_two_steps = calls["topk_rescue"]()
    at_once = calls["exchange_merge"]()
    return [t.tolist() for t in in_two_steps], [t.tolist() for t in at_once]


def test_both_forms_give_rows_valid_and_ids_alike(pool: RankPool) -> None:
    forms = pool.run(select_and_rescue_and_exchange, world_size=W)
    for rank, (in_two_steps, at_once) in enumerate(forms):
        assert in_two_steps == at_once
        rows, valid, ids = at_once
        for t in range(T):
            owner, local = owner_and_local(torch.tensor(ids[t]), W, INTERLEAVE)
            own = local[(owner == rank) & (torch.tensor(ids[t]) >= 0)]
            assert valid[t] == len(own)
            assert rows[t][valid[t] :] == [-1] * (K - valid[t])
            assert [row % 6 for row in rows[t][: valid[t]]] == (own % 4).tolist()
    assert [f[1][2] for f in forms] == [forms[0][1][2]] * W  # the same ids in the same order


def kv_rows_by_definition(ctx: RankContext) -> tuple[list, list]:
    call = good_calls(ctx)["exchange_merge"]
    rows, valid, ids = call()
    table, req, size, stride = (call.args[n] for n in ("block_table", "req_id", "block_size", "block_stride"))
    expected = []
    for t in range(T):
        owner, local = owner_and_local(ids[t], W, INTERLEAVE)
        own = local[(owner == ctx.rank) & (ids[t] >= 0)].tolist()
        expected.append([int(table[req[t], j // size]) * stride + j % size for j in own])
    return [rows[t, : valid[t]].tolist() for t in range(T)], expected


def test_kv_rows_are_block_table_rows_of_own_positions(pool: RankPool) -> None:
    for got, expected in pool.run(kv_rows_by_definition, world_size=W):
        assert got == expected


def bad_calls(ctx: RankContext) -> dict[str, tuple[Call, str, bool]]:
    """Calls to refuse: (call, part of the message, whether tensor values decide)."""
    good = good_calls(ctx)
    words, select, rescue, exchange, dcp = (good[name] for name in OPS)
    logits, ends, gathered = words.args["logits"], words.args["row_ends"], select.args["gathered"]
    narrow = torch.zeros(1, 1)
    cases: dict[str, tuple[Call, str, bool]] = {}

    def add(name: str, call: Call, message: str, by_value: bool = False) -> None:
        cases[name] = (call, message, by_value)

    for call, name in ((select, "select"), (rescue, "rescue"), (exchange, "exchange"), (dcp, "dcp")):
        add(f"{name}: K 0", call.with_(topk=0), "topk 0: allowed is 1..4096")
        add(f"{name}: K 4097", call.with_(topk=4097), "topk 4097: allowed is 1..4096")
        add(f"{name}: N 0", call.with_(local_topk=0), "local_topk 0: each rank sends 1..topk")
        add(f"{name}: N > K", call.with_(local_topk=K + 1), f"local_topk {K + 1}: each rank sends 1..topk = {K}")
        add(f"{name}: interleave 0", call.with_(interleave=0), "interleave 0: must be at least 1")
    for call, name in ((select, "select"), (rescue, "rescue"), (exchange, "exchange")):
        add(f"{name}: interleave, blocks", call.with_(interleave=3), "interleave 3 does not divide block_size 4")
        add(f"{name}: table alone", call.with_(req_id=None), "block_table and req_id go together")
        add(
            f"{name}: int64 table",
            call.with_(block_table=call.args["block_table"].long()),
            "block_table is torch.int64",
        )
        add(f"{name}: flat table", call.with_(block_table=ends), "block_table has shape [3]")
        add(f"{name}: req_id shape", call.with_(req_id=ends[:2]), "req_id has shape [2]: must be [3]")
        add(f"{name}: block_size", call.with_(block_size=0), "block_size 0: must be at least 1")
        add(f"{name}: stride", call.with_(block_stride=3), "block_stride 3: must be at least block_size = 4")
    for call, name in ((words, "words"), (rescue, "rescue"), (exchange, "exchange"), (dcp, "dcp")):
        add(f"{name}: fp16", call.with_(logits=logits.half()), "logits are torch.float16: only torch.bfloat16 and")
        add(f"{name}: 1-D logits", call.with_(logits=logits[0]), "logits have shape [40]: must be [rows, positions]")
        too_wide = narrow.to(torch.bfloat16).expand(T, (1 << 17) + 1)
        add(f"{name}: bf16 width", call.with_(logits=too_wide), "131073 positions a rank: layout bf16 holds 131072")
    for call, name in ((rescue, "rescue"), (exchange, "exchange"), (dcp, "dcp")):
        beyond = narrow.expand(T, (1 << 30) + 1)
        add(f"{name}: int32 ids", call.with_(logits=beyond), "global positions must stay below 2**31")
        add(f"{name}: unknown group", call.with_(group="nowhere"), "group 'nowhere' is unknown or was destroyed")
        add(f"{name}: lane", call.with_(lane=7), "no exchange is reserved for group")
    add("words: int32 ids", words.with_(logits=narrow.expand(T, (1 << 31) + 1)), "2147483649 positions")
    for call, name in ((words, "words"), (rescue, "rescue"), (exchange, "exchange")):
        add(f"{name}: int64 ends", call.with_(row_ends=ends.long()), "row_ends is torch.int64: must be torch.int32")
        add(f"{name}: ends shape", call.with_(row_ends=ends[:2]), "row_ends has shape [2]: must be [3]")
        add(f"{name}: end > L", call.with_(row_ends=ends + 1), "row_ends from 1 to 41: must lie in 0..40", True)
        add(f"{name}: end < 0", call.with_(row_ends=ends - 1), "row_ends from -1 to 39: must lie in 0..40", True)
    add("words: N", words.with_(local_topk=4097), "local_topk 4097: each rank sends 1..topk = 4096")
    add("select: rank", select.with_(rank=W), "rank 2 is not in 0..1")
    add(
        "select: words", select.with_(gathered=gathered[..., :4]), "gathered has shape [2, 3, 4]: must be [any, any, 8]"
    )
    add("select: int64", select.with_(gathered=gathered.long()), "gathered is torch.int64")
    add("select: 2-D", select.with_(gathered=gathered[0]), "must be [world size, rows, words]")
    add("select: layout", select.with_(layout="fp8"), "unknown word layout 'fp8': use one of bf16, fp32")
    for size in (1, 17):
        many = gathered[:1].expand(size, T, -1)
        add(f"select: W {size}", select.with_(gathered=many, rank=0), f"world size {size}: an exchange joins 2 to 16")
        add(f"rescue: W {size}", rescue.with_(gathered=many, rank=0), f"world size {size}: an exchange joins 2 to 16")
        add(f"exchange: W {size}", exchange.with_(world_size=size), f"world size {size}: an exchange joins 2 to 16")
        add(f"dcp: W {size}", dcp.with_(world_size=size), f"world size {size}: an exchange joins 2 to 16")
    add("rescue: rank", rescue.with_(rank=1 - ctx.rank), f"this process is rank {ctx.rank} of group")
    add(
        "rescue: W 3",
        rescue.with_(gathered=gathered[:1].expand(3, T, -1)),
        "has 2 ranks, but the call is for world size 3",
    )
    for output in ("rows", "valid", "ids", "saturation"):
        add(f"rescue: {output}", rescue.with_(**{output: rescue.args[output].long()}), f"{output} is torch.int64")
    add("rescue: rows", rescue.with_(logits=logits[:2], row_ends=ends[:2]), "has shape")
    add("exchange: W 3", exchange.with_(world_size=3), "has 2 ranks, but the call is for world size 3")
    add(
        "exchange: words", exchange.with_(words=exchange.args["words"][:, :4]), "words has shape [3, 4]: must be [3, 8]"
    )
    add("exchange: float words", exchange.with_(words=exchange.args["words"].float()), "words is torch.float32")
    more = {name: exchange.args[name].repeat_interleave(2, 0) for name in ("words", "logits", "row_ends", "req_id")}
    add("exchange: rows", exchange.with_(**more), "6 rows: the exchange of group")
    add("exchange: N", exchange.with_(local_topk=3), "no exchange is reserved for group")
    add("exchange: K", exchange.with_(topk=K + 1), "was reserved for topk 8 in layout fp32; use another lane")
    add("exchange: device", exchange.with_(row_ends=ends.to("meta")), "row_ends is on meta, the other arguments on cpu")
    add("exchange: order", exchange.with_(order=torch.zeros(1, device="meta")), "order is on meta")
    add("dcp: rank", dcp.with_(rank=1 - ctx.rank), f"this process is rank {ctx.rank} of group")
    add("dcp: ids", dcp.with_(topk_indices=dcp.args["topk_indices"].long()), "topk_indices is torch.int64")
    add("dcp: ids shape", dcp.with_(topk_indices=dcp.args["topk_indices"][:, :4]), "topk_indices has shape [3, 4]")
    add("dcp: starts", dcp.with_(row_starts=ends.long()), "row_starts is torch.int64")
    rows = dcp.args["topk_indices"]
    add("dcp: rows", dcp.with_(logits=logits.repeat(2, 1), topk_indices=rows.repeat(2, 1), row_starts=None), "6 rows")
    return cases


def outcome(call: Call) -> str:
    try:
        call()
    except TopkxError as error:
        return str(error)
    return "accepted"


def refusals(ctx: RankContext) -> tuple[dict[str, tuple[str, str, str, bool]], list[bool]]:
    """Per bad call: expected text, what eager says, what the fake says; and whether state was left alone."""
    exchange = vllm_topkx.reserve(ctx.group, rows=T, topk=K, local_topk=N)
    cases = bad_calls(ctx)
    epoch = exchange.epoch.clone()
    indices = cases["dcp: K 0"][0].args["topk_indices"]
    before = indices.clone()
    found = {}
    for name, (call, message, by_value) in cases.items():
        eager = outcome(call)
        with FakeTensorMode() as mode:
            fake_args = {n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for n, v in call.args.items()}
            fake = outcome(Call(call.op, fake_args))
        found[name] = (message, eager, fake, by_value)
    untouched = [torch.equal(exchange.epoch, epoch), torch.equal(indices, before)]
    dist.barrier(ctx.group)
    return found, untouched


def test_refusals_say_the_same_at_run_time_and_at_trace_time(pool: RankPool) -> None:
    for found, untouched in pool.run(refusals, world_size=W):
        assert len(found) > 90
        for name, (message, eager, fake, by_value) in found.items():
            assert message in eager, name
            assert fake == ("accepted" if by_value else eager), name  # a trace has no values to look at
        assert untouched == [True, True]


def compiled_refusal(ctx: RankContext) -> str:
    call = good_calls(ctx)["exchange_merge"].with_(topk=5000)
    try:
        torch.compile(call, backend="eager", fullgraph=True)()
    except Exception as error:
        return str(error)
    return "accepted"


def test_a_bad_call_fails_while_it_is_compiled(pool: RankPool) -> None:
    for message in pool.run(compiled_refusal, world_size=W):
        assert "topk 5000: allowed is 1..4096" in message
