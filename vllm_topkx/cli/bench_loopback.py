"""``vllm-topkx bench --backend loopback``: what the merge of W ranks computes, on one GPU.

One virtual rank's kernels run alone, on slots that hold the words of all W ranks with the tags they wait for;
so a call pushes, reads and selects, and waits for nobody. vLLM's select gets the same candidates, packed by
vLLM's own kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..ops.errors import ExchangeTimeoutError, TopkxError
from ..ops.exchange import ExchangeSettings
from ..ops.layouts import BF16, FP32, Layout, exchange_bytes, packed_row_words
from ..ops.spec import MergeSpec
from ..settings import Settings
from .bench_case import fill_scores, local_topk, restore
from .bench_check import Truth, worst
from .bench_plan import Plan
from .bench_record import UNCHECKED, Measurement, Panel, Results
from .bench_systems import Call, Output
from .bench_timing import Graphed, nothing
from .bench_vllm import LeftOut, VllmKernels

Tensor = torch.Tensor

#: Fewer than on W GPUs: a buffer holds the words of W ranks.
BUFFERS = 4
#: Seeds tried for scores that saturate no rank, as no rank would answer.
TRIES = 4
#: The tag of all words, and what every call's epochs are set to before a replay.
TAG, EPOCH_BEFORE = 1, 0
RANK = 0


def measure_loopback(plan: Plan, results: Results, advance: Callable[[int], None]) -> None:
    """All configurations of ``plan``, into ``results``."""
    from ..ops.cute.device import require_dsl, require_gpu

    require_dsl()
    require_gpu(torch.device("cuda", torch.cuda.current_device()))
    results.note("loopback: one rank's kernels alone, the words of all ranks there already")
    for world_size in plan.world_sizes:
        for topk, scores, rows in plan.configurations():
            _measure(plan, results, Panel(world_size, topk, scores), rows)
            torch.cuda.empty_cache()
            advance(1)


def _measure(plan: Plan, results: Results, panel: Panel, rows: int) -> None:
    case = LoopbackCase(plan, panel, rows, torch.device("cuda", torch.cuda.current_device()))
    graphs: dict[str, Graphed[Output]] = {}
    for name in plan.systems:
        try:
            call, before = case.build(name)
            graphs[name] = Graphed(call, plan.calls, before)
        except ExchangeTimeoutError:
            raise  # the CUDA context is lost
        except TopkxError as error:
            results.leave_out([(name, str(error))])
        except Exception as error:  # vLLM's kernels refuse in their own ways
            results.leave_out([(name, f"{type(error).__name__}: {error}")])
    times: dict[str, list[float]] = {name: [] for name in graphs}
    verdicts: dict[str, str] = {}
    for round_ in range(plan.rounds):
        case.refresh(1 + round_)
        for name, graph in graphs.items():
            if ":N" in name and case.saturated:
                continue
            times[name] += graph.time(plan.replays)
            if round_ == plan.rounds - 1:
                verdicts[name] = case.verdict(graph.outputs, "bf16" in name)
    for name, of_name in times.items():
        if of_name:
            verdict = verdicts.get(name, UNCHECKED)
            results.measurements.append(Measurement.of(name, panel, rows, plan.columns, of_name, verdict))


class LoopbackCase:
    """The candidates of W virtual ranks in rotating buffers; :meth:`refresh` changes them in place.

    Attributes:
        words: by N and whether of bfloat16 scores, ``[B, W, T, words]``.
        saturated: whether some row of N words needs a rescue.
    """

    def __init__(self, plan: Plan, panel: Panel, rows: int, device: torch.device) -> None:
        self.plan, self.panel, self.rows = plan, panel, rows
        self.world_size, self.k = panel.world_size, panel.topk
        self.n = plan.local_topk(self.k, self.world_size)
        self.device = device
        self.ends = torch.full((rows,), plan.columns, dtype=torch.int32, device=self.device)
        shape = BUFFERS, self.world_size, rows
        self.scores = torch.zeros(*shape, plan.columns, device=self.device)
        self.words = {
            (n, bf16): torch.zeros(*shape, packed_row_words(n, _layout(bf16).name), dtype=torch.int32, device=device)
            for n, bf16 in {(self.k, False), (self.n, False), (self.n, True)}
        }
        self.packed: Tensor | None = None
        self.slots: dict[tuple[int, bool], list[Tensor]] = {}
        self.epochs = torch.zeros(plan.calls, rows, dtype=torch.int32, device=self.device)
        #: This rank's local top-K of each buffer, and for each call a copy that it replaces by its result.
        self.best = torch.zeros(BUFFERS, rows, self.k, dtype=torch.int32, device=device)
        self.lists = torch.zeros(plan.calls, rows, self.k, dtype=torch.int32, device=device)
        self.saturated = False
        self.refresh(0)

    def refresh(self, seed: int) -> None:
        """New scores in all buffers, and all that comes of them."""
        for attempt in range(TRIES):
            for b in range(BUFFERS):
                for r in range(self.world_size):
                    scores = self.scores[b, r]
                    fill_scores(scores, self.panel.scores, r, self.world_size, (seed * TRIES + attempt) * BUFFERS + b)
                    for (n, bf16), words in self.words.items():
                        of_dtype = scores.bfloat16() if bf16 else scores
                        words[b, r].copy_(torch.ops.topkx.local_topk_words(of_dtype, self.ends, n))
            self.saturated = self._saturated()
            if not self.saturated or self.panel.scores == "skewed":
                break
        for b in range(BUFFERS):
            self.best[b].copy_(local_topk(self.scores[b, RANK], self.k))
        for key, buffers in self.slots.items():
            self._fill(buffers, self.words[key])
        if self.packed is not None:
            self._pack()

    def _saturated(self) -> bool:
        """Whether a rank would have to send more than N candidates of a row."""
        found = False
        for bf16 in (False, True):
            settings = (RANK, self.k, self.n, self.plan.interleave, _layout(bf16).name)
            for words in self.words[self.n, bf16]:
                saturation = torch.ops.topkx.topk_select(words, *settings, emit_ids=False)[3]
                found = found or bool((saturation != 0).any())
        return found

    def build(self, name: str) -> tuple[Call, Callable[[], None]]:
        """A call of the system called ``name``, one of ``LOOPBACK_SYSTEMS``, and what to do before a replay.

        Raises:
            LeftOut: it cannot run here.
        """
        kind, _, rest = name.partition(":")
        if kind == "vllm":
            return self._vllm_select(), nothing
        bf16, n = "bf16" in rest, self.k if rest == "K" else self.n
        if kind == "select":
            return self._select(n), nothing
        if self.saturated and n != self.k:
            raise LeftOut("rows of these scores are rescued, which needs ranks that answer: --backend cuda")
        launches = self._launches(kind, n, bf16)

        def call(i: int) -> Output:
            merged = launches[i].run()
            return Output() if merged is None else Output(ids=merged if kind == "list" else merged.ids)

        return call, self._restore_lists if kind == "list" else self._restore_epochs

    def _restore_epochs(self) -> None:
        self.epochs.fill_(EPOCH_BEFORE)

    def _restore_lists(self) -> None:
        self._restore_epochs()
        restore(self.lists, self.best)

    def _vllm_select(self) -> Call:
        kernels = VllmKernels.load()
        rows, candidates = self.rows, self.world_size * self.k
        if self.packed is None:
            self.packed = torch.zeros(BUFFERS, rows, candidates, 2, device=self.device)
            self._pack()
        return lambda i: Output(ids=kernels.select(self.packed[i % BUFFERS], self.k))

    def _pack(self) -> None:
        """The candidates as vLLM's ranks would have packed and gathered them."""
        place = self.world_size, self.plan.interleave
        kernels = VllmKernels.load()
        for b in range(BUFFERS):
            of_ranks = [
                kernels.packed(self.scores[b, r], local_topk(self.scores[b, r], self.k), r, *place)
                for r in range(self.world_size)
            ]
            self.packed[b].copy_(torch.cat(of_ranks, dim=1))

    def _select(self, n: int) -> Call:
        words = self.words[n, False]
        settings = (RANK, self.k, n, self.plan.interleave, FP32.name)
        return lambda i: Output(ids=torch.ops.topkx.topk_select(words[i % BUFFERS], *settings)[2])

    def _launches(self, kind: str, n: int, bf16: bool) -> list:
        """One prepared call each for the graph: with epochs of its own, so that all wait for the same tag."""
        from ..ops.cute.launch import prepare_exchange, prepare_merge_dcp_topk
        from ..ops.cute.ll_floor import prepare_floor
        from ..ops.cute.loopback import LoopbackExchange, VirtualGroup

        layout = _layout(bf16)
        group = VirtualGroup("bench", RANK, self.world_size)
        settings = ExchangeSettings(self.rows, self.k, n, layout.name)
        exchange = LoopbackExchange(group, self.device, 0, settings, Settings.from_env().timeout_s)
        spec = MergeSpec(RANK, self.world_size, self.k, n, self.plan.interleave, layout)
        bases = self._bases(n, bf16)
        unread = self.scores[0, RANK].to(layout.dtype)  # what a rescue would read
        launches = []
        for i in range(self.plan.calls):
            exchange.epoch, exchange.bases = self.epochs[i], bases[i % BUFFERS]
            words = self.words[n, bf16][i % BUFFERS, RANK]
            if kind == "floor":
                launches.append(prepare_floor(exchange, words, spec))
            elif kind == "list":
                scores = self.scores[i % BUFFERS, RANK]
                launches.append(prepare_merge_dcp_topk(exchange, scores, self.lists[i], None, spec))
            else:
                launches.append(prepare_exchange(exchange, words, unread, self.ends, spec, None, True))
        return launches

    def _bases(self, n: int, bf16: bool) -> list[Tensor]:
        """The ranks' buffers of each rotating buffer: this rank's, and one that all pushes to others go to."""
        size = exchange_bytes(self.world_size, self.rows, self.k, n, _layout(bf16).name) // 4
        if (n, bf16) not in self.slots:
            buffers = [torch.zeros(size, dtype=torch.int32, device=self.device) for _ in range(BUFFERS + 1)]
            self.slots[n, bf16] = buffers
            self._fill(buffers, self.words[n, bf16])
        *own, others = self.slots[n, bf16]
        rest = [others.data_ptr()] * (self.world_size - 1)
        return [torch.tensor([buffer.data_ptr(), *rest], device=self.device) for buffer in own]

    def _fill(self, buffers: list[Tensor], words: Tensor) -> None:
        """Stores what all ranks would have pushed: LL pairs ``(word, tag, word, tag)`` of the tag's parity."""
        for buffer, of_ranks in zip(buffers[:-1], words, strict=True):
            slots = buffer[: 2 * 2 * of_ranks.numel()].view(2, *of_ranks.shape[:2], -1, 4)[TAG & 1]
            slots[..., 0::2] = of_ranks.view(*of_ranks.shape[:2], -1, 2)
            slots[..., 1::2] = TAG

    def verdict(self, outputs: list[Output], bf16: bool) -> str:
        """On every call of the last replay."""
        verdicts = []
        for b in range(BUFFERS):
            scores = self.scores[b].bfloat16() if bf16 else self.scores[b]
            truth = Truth.of(scores, self.k, self.plan.interleave)
            verdicts += [truth.verdict_on_ids(output.ids) for output in outputs[b::BUFFERS] if output.ids is not None]
        return worst(verdicts, UNCHECKED)


def _layout(bf16: bool) -> Layout:
    return BF16 if bf16 else FP32
