"""The results of a benchmark as a picture: latency over rows or columns, one line a system."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from ..ops.errors import TopkxError
from .bench_record import Measurement, Results

#: Panels side by side, inches of each, and characters of the title above one.
ACROSS, WIDTH, HEIGHT, CHARACTERS = 3, 6.4, 5.2, 95
_MARKERS = "osD^vP*X<>ph"
#: Far apart, and none like the floors' grey.
_COLORS = (
    *("#4e79a7", "#76b7b2", "#b07aa1", "#9c755f", "#d4a6c8", "#f28e2b", "#ffbe7d"),
    *("#e15759", "#ff9d9a", "#59a14f", "#8cd17d", "#edc948", "#b6992d", "#1170aa"),
)


def require_matplotlib() -> None:
    """Refuses where it is not installed; called before the measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise TopkxError("--plot needs matplotlib: pip install matplotlib") from error


def draw(results: Results, path: Path, kind: str) -> None:
    """Writes the picture to ``path``; ``kind``: png, svg or pdf."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tables = results.tables()
    if not tables:
        return
    columns = min(ACROSS, len(tables))
    rows = math.ceil(len(tables) / columns)
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (title, measurements) in enumerate(tables):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set_title(title, fontsize="medium")
        _draw_lines(axes, results, measurements)
        _label(axes, sorted({getattr(m, results.across) for m in measurements}), results.across)
    title = textwrap.fill(f"vllm-topkx {results.name}: {_machine(results)}", round(CHARACTERS * columns))
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, format=kind, dpi=130)


def _draw_lines(axes: Any, results: Results, measurements: list[Measurement]) -> None:
    for index, (name, system) in enumerate(results.systems.items()):
        line = sorted((getattr(m, results.across), m.microseconds) for m in measurements if m.system == name)
        if line:
            is_floor = system.floor is None and name.startswith("floor")
            style = (
                {"linestyle": "--", "color": "black", "alpha": 0.5}
                if is_floor
                else {"color": _COLORS[index % len(_COLORS)]}
            )
            marker = _MARKERS[index % len(_MARKERS)]
            axes.plot(*zip(*line, strict=True), label=name, marker=marker, markersize=4, **style)


def _label(axes: Any, ticks: list[int], across: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 4096 else str(tick) for tick in ticks])
    low, high = axes.get_ylim()
    steps = [step * 10**power for power in range(-1, 6) for step in (1, 2, 5)]
    shown = [step for step in steps if low <= step <= high]
    axes.set_yticks(shown, [f"{step:g}" for step in shown])
    axes.minorticks_off()
    axes.set_xlabel(across)
    axes.set_ylabel("us a call, median")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")


def _machine(results: Results) -> str:
    """One line: the GPU and the versions."""
    return ", ".join(f"{name} {value}" for name, value in results.machine.items() if value is not None)
