"""Cells of the benchmark in words: a line for the log, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tools.bench.report.cells import Cell

CPU_SPEED_UP = 5
"""How many times faster than eager torch the compiled library should be on a CPU, for 8 rows of 151,936 logits."""


def tables_of(cells: Sequence[Cell]) -> list[Table]:
    """A table for each vocabulary, dtype and kind of logits; a line a cell and a line a baseline."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    return [_table(found) for found in groups.values()]


def line_of(cell: Cell) -> str:
    """A cell in words, for the log."""
    name = f"{cell.case}, {cell.rows} {'requests' if cell.num_drafts else 'rows'}, V={cell.vocab}, {cell.dtype}"
    target = "" if cell.target_us is None else f", target {cell.target_us:.1f} {_verdict(cell)}"
    eager = "" if cell.eager_us is None else f", eager {cell.eager_us:.1f} us ({cell.eager_us / cell.us:.1f} x slower)"
    time = f"{cell.us:.1f} us ({cell.ratio:.1f} x the floor of {cell.floor_us:.1f}, {cell.floor_kind})"
    return f"{name}, {cell.distribution}: {time}{target}{eager}"


def _table(cells: Sequence[Cell]) -> Table:
    first = cells[0]
    on_cpu = any(cell.eager_us is not None for cell in cells)
    count = f"requests, K={first.num_drafts}" if first.num_drafts else "rows"
    last = ("eager us", f"speed-up (target {CPU_SPEED_UP} x)") if on_cpu else ("target us", "")
    title = f"us a call, V={first.vocab:,}, {first.dtype}, {first.distribution} logits"
    table = Table("case", count, "us", "floor us", "what binds", "x floor", *last, title=title)
    for i in (1, 2, 3, 5, 6):
        table.columns[i].justify = "right"
    for i, cell in enumerate(cells):
        ends = i + 1 == len(cells) or cells[i + 1].case != cell.case
        times = (f"{cell.us:.1f}", f"{cell.floor_us:.1f}", cell.floor_kind, f"{cell.ratio:.1f}")
        table.add_row(cell.case, str(cell.rows), *times, *_last(cell, on_cpu), end_section=ends and not cell.baselines)
        for place, (name, us) in enumerate(cell.baselines.items(), start=1):
            entries = _others(us, cell.floor_us)
            table.add_row(f"  {name}", str(cell.rows), *entries, style="dim", end_section=place == len(cell.baselines))
    return table


def _others(us: float | str, floor_us: float) -> tuple[str, ...]:
    """A baseline's time and its ratio to the floor, or why there is none."""
    return ("", "", us, "") if isinstance(us, str) else (f"{us:.1f}", "", "", f"{us / floor_us:.1f}")


def _last(cell: Cell, on_cpu: bool) -> tuple[str, str]:
    if on_cpu:
        return ("", "") if cell.eager_us is None else (f"{cell.eager_us:.1f}", f"{cell.eager_us / cell.us:.1f} x")
    return ("", "") if cell.target_us is None else (f"{cell.target_us:.1f}", _verdict(cell))


def _verdict(cell: Cell) -> str:
    return "met" if cell.target_us is not None and cell.us <= cell.target_us else "missed"
