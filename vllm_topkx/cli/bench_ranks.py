"""``vllm-topkx bench`` on W GPUs: one rank's part, and what comes of the ranks' parts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..ops.errors import ExchangeTimeoutError, TopkxError
from ..ops.exchange import reserve
from ..ranks import RankContext, RankError, RankPool
from .bench_case import BUFFERS, Case
from .bench_check import Truth, worst
from .bench_plan import Plan
from .bench_record import UNCHECKED, WRONG, Measurement, Panel, Results
from .bench_systems import Output, Systems
from .bench_timing import Graphed, nothing
from .bench_vllm import Gather, LeftOut, VllmKernels, agree, all_gather

Tensor = torch.Tensor
LONGEST_S = 600.0  # for one configuration of all systems


@dataclass(frozen=True)
class Sample:
    """One rank's times and verdict of one system, or why it was left out."""

    system: str
    times: list[float]
    verdict: str
    reason: str | None = None


def measure_on_gpus(plan: Plan, results: Results, advance: Callable[[int], None]) -> None:
    """All configurations of ``plan``, in one process group, into ``results``."""
    (world_size,) = plan.world_sizes
    with RankPool(world_size, preload=[__name__], device_type="cuda") as pool:
        for topk, scores, rows in plan.configurations():
            try:
                answers = pool.run(measure_case, plan, topk, scores, rows, timeout_s=LONGEST_S)
            except RankError as error:
                if isinstance(error.error, (TopkxError, ExchangeTimeoutError)):
                    raise error.error from None
                raise
            panel = Panel(world_size, topk, scores)
            for of_ranks in zip(*(samples for samples, _ in answers), strict=True):
                add_sample(results, panel, rows, plan.columns, of_ranks)
            for note in answers[0][1]:
                results.note(note)
            advance(1)


def add_sample(results: Results, panel: Panel, rows: int, columns: int, of_ranks: tuple[Sample, ...]) -> None:
    """Into ``results``: a call takes as long as its slowest rank."""
    first = of_ranks[0]
    if first.reason is not None:
        results.leave_out([(first.system, first.reason)])
        return
    times = [max(of_replay) for of_replay in zip(*(sample.times for sample in of_ranks), strict=True)]
    verdict = UNCHECKED
    if first.verdict != UNCHECKED:
        verdict = worst((sample.verdict for sample in of_ranks), WRONG)
    results.measurements.append(Measurement.of(first.system, panel, rows, columns, times, verdict))


def measure_case(context: RankContext, plan: Plan, topk: int, scores: str, rows: int) -> tuple[list[Sample], list[str]]:
    """One configuration of all systems on this rank: samples in the order of ``plan.systems``, and notes."""
    gather, about_vllm = _vllm_gather(context) if any(name.startswith("vllm") for name in plan.systems) else (None, "")
    n = plan.local_topk(topk, context.world_size)
    lanes = _reserve(context, plan, topk, n)
    device = str(context.device)
    case = Case(context.rank, context.world_size, rows, plan.columns, topk, scores, plan.calls, device)
    systems = Systems(context, case, n, plan.interleave, lanes, gather)
    case.refresh(0)
    graphs, reasons = {}, {}
    for name in plan.systems:
        made = _together(context, functools.partial(_graph, systems, name, plan.calls, about_vllm))
        if isinstance(made, str):
            reasons[name] = made
        else:
            graphs[name] = made
    times: dict[str, list[float]] = {name: [] for name in graphs}
    verdicts: dict[str, str] = {}
    for round_ in range(plan.rounds):
        case.refresh(1 + round_)  # the graphs' inputs are changed in place
        torch.cuda.synchronize()
        agree(context.group, None)
        truths = _truths(context, case, plan.interleave) if round_ == plan.rounds - 1 else None
        for name, graph in graphs.items():
            times[name] += graph.time(plan.replays, context.group)
            if truths is not None:
                bf16 = "bf16" in name
                verdicts[name] = _verdict(graph.outputs, functools.partial(truths, bf16), context.rank, case)
    samples = []
    for name in plan.systems:
        if name in reasons:
            samples.append(Sample(name, [], UNCHECKED, reasons[name]))
        else:
            samples.append(Sample(name, times[name], verdicts[name]))
    return samples, [f"vLLM's all-gather is {about_vllm}"] if gather is not None else []


@functools.cache
def _vllm_gather(context: RankContext) -> tuple[Gather | None, str]:
    """vLLM's all-gather and what it is; None and the reason when vLLM cannot be measured. Collective."""
    error = None
    try:
        VllmKernels.load()
    except LeftOut as raised:
        error = str(raised)
    errors = agree(context.group, error)
    if errors:
        return None, errors[0]
    torch.cuda.synchronize()
    try:
        return all_gather(context)
    except LeftOut as raised:  # on all ranks alike
        return None, str(raised)


def _graph(systems: Systems, name: str, calls: int, about_vllm: str) -> Graphed[Output]:
    if name.startswith("vllm") and systems.gather is None:
        raise LeftOut(about_vllm)
    before = systems.case.restore_lists if systems.in_place(name) else nothing
    return Graphed(systems.build(name), calls, before)


def _together(context: RankContext, build: Callable[[], Graphed[Output]]) -> Graphed[Output] | str:
    """What ``build`` makes; the first error when a rank cannot."""
    made, error = None, None
    try:
        made = build()
    except ExchangeTimeoutError:
        raise  # the CUDA context is lost
    except Exception as raised:
        error = str(raised) if isinstance(raised, TopkxError) else f"{type(raised).__name__}: {raised}"
    errors = agree(context.group, error)
    return errors[0] if errors or made is None else made


def _reserve(context: RankContext, plan: Plan, topk: int, n: int) -> tuple[int, int]:
    """Exchanges for all rows; the lanes of those for float32 and bfloat16 scores. Collective."""
    lanes = []
    for bf16, dtype in enumerate((torch.float32, torch.bfloat16)):
        # An exchange's name has neither K nor the dtype, so each pair gets a lane.
        lane = 2 * plan.topk.index(topk) + bf16
        for local_topk in sorted({n} if bf16 else {n, topk}):
            reserve(context.group, max(plan.rows), topk, local_topk=local_topk, dtype=dtype, lane=lane)
        lanes.append(lane)
    return lanes[0], lanes[1]


def _truths(context: RankContext, case: Case, interleave: int) -> Callable[[bool, int], Truth]:
    """What is right by ``(bf16, buffer)``; collective, all of it now, as systems may be checked in any order."""
    found = {}
    for bf16 in (False, True):
        for b in range(BUFFERS):
            mine = case.scores_of(b, bf16)
            everyone = mine.new_empty((context.world_size * case.rows, case.columns))
            dist.all_gather_into_tensor(everyone, mine, group=context.group)
            found[bf16, b] = Truth.of(everyone.view(-1, *mine.shape), case.topk, interleave)
    torch.cuda.synchronize()
    return lambda bf16, buffer: found[bf16, buffer]


def _verdict(outputs: list[Output], truth: Callable[[int], Truth], rank: int, case: Case) -> str:
    """On every call of the last replay."""
    verdicts = []
    for i, output in enumerate(outputs):
        if output.ids is not None:
            verdicts.append(truth(i % BUFFERS).verdict_on_ids(output.ids))
        if output.rows is not None:
            verdicts.append(truth(i % BUFFERS).verdict_on_rows(output.rows, output.valid, rank, case.kv))
    return worst(verdicts, UNCHECKED) if verdicts else UNCHECKED
