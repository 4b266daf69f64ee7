"""What ``vllm-topkx bench`` measures and what it found: systems, measurements, ratios, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class System:
    """Something that is measured.

    Attributes:
        title: what it does, in a few words.
        baseline: the system it replaces: ratios are taken to it.
        floor: the floor of the words that it sends.
    """

    title: str
    baseline: str | None = None
    floor: str | None = None


#: On W GPUs. K, N: candidates that a rank sends, N as the exchange chooses it.
GPU_SYSTEMS = {
    "vllm": System("vLLM: pack + all-gather + select", None, "floor:K"),
    "vllm+rows": System("vLLM, then filter-and-convert", None, "floor:K"),
    "torch": System("torch: all-gather + topk", "vllm", "floor:K"),
    "nccl:K": System("all-gather form, K words", "vllm", "floor:K"),
    "nccl:N": System("all-gather form, N words", "vllm", "floor:N"),
    "list:K": System("exchange from a local top-K, all sent", "vllm", "floor:K"),
    "list:N": System("exchange from a local top-K, N sent", "vllm", "floor:N"),
    "words:K": System("exchange from K words", "vllm", "floor:K"),
    "words:N": System("exchange from N words", "vllm", "floor:N"),
    "words:N:bf16": System("exchange from N words, bf16", "vllm", "floor:N:bf16"),
    "words:N+rows": System("exchange from N words, rows written", "vllm+rows", "floor:N"),
    "words:N:bf16+rows": System("exchange from N words, bf16, rows written", "vllm+rows", "floor:N:bf16"),
    "logits": System("local top-N + exchange", "vllm", "floor:N"),
    "logits:bf16": System("local top-N + exchange, bf16", "vllm", "floor:N:bf16"),
    "floor:K": System("LL floor: push + poll, K words", "vllm"),
    "floor:N": System("LL floor: push + poll, N words", "vllm"),
    "floor:N:bf16": System("LL floor: push + poll, N words, bf16", "vllm"),
}
#: On one GPU, with the words of W ranks there already: what a merge computes.
LOOPBACK_SYSTEMS = {
    "vllm:select": System("vLLM: select", None, "floor:K"),
    "select:K": System("select of gathered K words", "vllm:select", "floor:K"),
    "select:N": System("select of gathered N words", "vllm:select", "floor:N"),
    "merge:K": System("merge kernel, K words", "vllm:select", "floor:K"),
    "merge:N": System("merge kernel, N words", "vllm:select", "floor:N"),
    "merge:N:bf16": System("merge kernel, N words, bf16", "vllm:select", "floor:N:bf16"),
    "list:K": System("merge kernel, a local top-K", "vllm:select", "floor:K"),
    "floor:K": System("push + read, K words", "vllm:select"),
    "floor:N": System("push + read, N words", "vllm:select"),
    "floor:N:bf16": System("push + read, N words, bf16", "vllm:select"),
}
#: ``bench local``.
LOCAL_SYSTEMS = {
    "vllm": System("vLLM: persistent_topk", "torch"),
    "vllm:row": System("vLLM: top_k_per_row_decode", "torch"),
    "torch": System("torch.topk"),
    "torch:bf16": System("torch.topk, bf16", "torch"),
    "topkx": System("local_topk_words", "torch"),
    "topkx:bf16": System("local_topk_words, bf16", "torch"),
}

#: Verdicts on what a system computed: the exact set; the right scores, but ties not broken by position;
#: neither; nothing to compare.
EXACT, TIES, WRONG, UNCHECKED = "exact", "ties differ", "wrong", "-"


@dataclass(frozen=True)
class Panel:
    """What measurements that are compared with each other have in common."""

    world_size: int
    topk: int
    scores: str

    def __str__(self) -> str:
        ranks = f"{self.world_size} ranks, " if self.world_size > 1 else ""
        return f"{ranks}K = {self.topk}, {self.scores} scores"


@dataclass(frozen=True)
class Measurement:
    """Microseconds a call of one system: the median, and what 10 % and 90 % of the replays stay below."""

    system: str
    panel: Panel
    rows: int
    columns: int
    microseconds: float
    low: float
    high: float
    verdict: str

    @classmethod
    def of(
        cls, system: str, panel: Panel, rows: int, columns: int, times: Sequence[float], verdict: str
    ) -> Measurement:
        """From microseconds a call, one a replay."""
        ordered = sorted(times)
        last = len(ordered) - 1
        low, median, high = (ordered[round(part * last)] for part in (0.1, 0.5, 0.9))
        return cls(system, panel, rows, columns, round(median, 3), round(low, 3), round(high, 3), verdict)


def _count(number: int, of: str) -> str:
    """``1 row``, ``4 rows``."""
    return f"{number} {of if number != 1 else of.removesuffix('s')}"


@dataclass
class Results:
    """What a benchmark found.

    Attributes:
        name: of the benchmark.
        machine: what it ran on, and versions.
        settings: what it was asked for.
        systems: what can be measured, in the order of the table.
        across: the number that a table's columns and a plot's x axis are, ``rows`` or ``columns``.
        left_out: reasons by system.
        notes: what a reader must know.
    """

    name: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    systems: dict[str, System]
    across: str = "rows"
    measurements: list[Measurement] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[Measurement]:
        return [m for m in self.measurements if m.verdict == WRONG]

    def leave_out(self, reasons: Iterable[tuple[str, str]]) -> None:
        for system, reason in reasons:
            self.left_out.setdefault(system, " ".join(reason.split()))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def beside(self) -> str:
        """The number that is the same in all of a table."""
        return "columns" if self.across == "rows" else "rows"

    def tables(self) -> list[tuple[str, list[Measurement]]]:
        """What is shown together, with a title, in the order measured."""
        found: dict[tuple[Panel, int], list[Measurement]] = {}
        for m in self.measurements:
            found.setdefault((m.panel, getattr(m, self.beside)), []).append(m)
        return [(f"{panel}, {_count(number, self.beside)}", part) for (panel, number), part in found.items()]

    def get(self, system: str | None, panel: Panel, rows: int, columns: int) -> Measurement | None:
        for m in self.measurements:
            if (m.system, m.panel, m.rows, m.columns) == (system, panel, rows, columns):
                return m
        return None

    def of_baseline(self, m: Measurement) -> float | None:
        """The time as a part of its baseline's."""
        return self._ratio(m, self.systems[m.system].baseline)

    def of_floor(self, m: Measurement) -> float | None:
        """The time as a multiple of its floor's."""
        return self._ratio(m, self.systems[m.system].floor)

    def _ratio(self, m: Measurement, to: str | None) -> float | None:
        other = self.get(to, m.panel, m.rows, m.columns)
        return None if other is None or other.microseconds == 0 else m.microseconds / other.microseconds

    def to_json(self) -> str:
        def row(m: Measurement) -> dict[str, Any]:
            flat = {"system": m.system, **asdict(m.panel), **asdict(m)}
            del flat["panel"]
            ratios = {"of_baseline": self.of_baseline(m), "of_floor": self.of_floor(m)}
            return flat | {name: None if ratio is None else round(ratio, 4) for name, ratio in ratios.items()}

        found = {
            "benchmark": self.name,
            "machine": self.machine,
            "settings": self.settings,
            "systems": {name: asdict(system) for name, system in self.systems.items()},
            "measurements": [row(m) for m in self.measurements],
            "left_out": self.left_out,
            "notes": self.notes,
        }
        return json.dumps(found, indent=2) + "\n"
