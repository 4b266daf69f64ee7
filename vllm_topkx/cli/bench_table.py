"""The results of a benchmark as text."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from .bench_record import EXACT, TIES, UNCHECKED, WRONG, Measurement, Results

if TYPE_CHECKING:
    from rich.table import Table

WIDTH_WITHOUT_TERMINAL = 160
_MARKS = {EXACT: "", TIES: " ~", WRONG: " WRONG", UNCHECKED: ""}


def print_results(results: Results) -> None:
    """The tables, what was left out, and how to read it."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else int(os.environ.get("COLUMNS", WIDTH_WITHOUT_TERMINAL)))
    for name, value in results.machine.items():
        print(f"{name}: {value if value is not None else 'unknown'}")
    for title, measurements in results.tables():
        print()
        print(title)
        console.print(_table(results, measurements))
    print(_legend(results))
    for note in results.notes:
        print(f"note: {note}")
    for system, reason in results.left_out.items():
        print(f"left out: {system}: {reason}")
    for m in results.wrong:
        print(f"WRONG: {m.system}, {m.panel}, {m.rows} rows, {m.columns} columns")


def _table(results: Results, measurements: list[Measurement]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"us a call\n{results.across}")
    across = sorted({getattr(m, results.across) for m in measurements})
    for number in across:
        table.add_column(f"\n{number}", justify="right")
    for name, system in results.systems.items():
        found = {getattr(m, results.across): m for m in measurements if m.system == name}
        if found:
            cells = [_cell(results, found.get(number)) for number in across]
            table.add_row(f"{name}\n[dim]{system.title}[/dim]", *cells)
    return table


def _cell(results: Results, m: Measurement | None) -> str:
    if m is None:
        return "-"
    ratios = []
    if (ratio := results.of_baseline(m)) is not None:
        ratios.append(f"{ratio:.2f}")
    if (ratio := results.of_floor(m)) is not None:
        ratios.append(f"{ratio:.1f}x")
    return f"{m.microseconds:.2f}{_MARKS[m.verdict]}\n[dim]{' '.join(ratios)}[/dim]"


def _legend(results: Results) -> str:
    baselines = dict.fromkeys(system.baseline for system in results.systems.values() if system.baseline)
    lines = [f"below each time: its part of the baseline's ({' or '.join(baselines)})"]
    if any(system.floor for system in results.systems.values()):
        lines.append("and its multiple of the floor with the same words")
    if any(m.verdict == TIES for m in results.measurements):
        lines.append("; ~: the right scores, but ties are not broken by position")
    return ", ".join(lines[:2]) + "".join(lines[2:])
