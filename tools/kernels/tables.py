"""Launches of a step as a table."""

from __future__ import annotations

from rich.table import Table

from tools.kernels.launches import FALLBACK, Launch


def table_of(found: list[Launch], title: str) -> Table:
    """A row a kernel, in the order of launches, and the sums; an ATen fallback is red."""
    table = Table(title=title)
    table.add_column("stage", no_wrap=True)
    table.add_column("kernel", overflow="ellipsis", no_wrap=True, max_width=34)
    table.add_column("kind", no_wrap=True)
    for name in ("launches", "registers", "spills", "read", "written", "us each"):
        table.add_column(name, justify="right", no_wrap=True)
    stage = ""
    for each in found:
        numbers = (each.registers, each.spills, _size(each.read_bytes), _size(each.written_bytes), _us(each.us))
        cells = ("" if each.stage == stage else each.stage, each.name, each.kind, each.launches, *numbers)
        style = "red" if each.kind == FALLBACK else None
        table.add_row(*("" if cell is None else str(cell) for cell in cells), style=style)
        stage = each.stage
    sums = [sum((n or 0) * each.launches for n, each in zip(column, found, strict=True)) for column in _summed(found)]
    count = sum(each.launches for each in found)
    totals = [str(count), "", "", _size(int(sums[0])), _size(int(sums[1])), _us(sums[2] or None)]
    table.add_section()
    table.add_row("all", f"{sum(each.kind == FALLBACK for each in found)} fallbacks", "", *totals)
    return table


def _summed(found: list[Launch]) -> tuple[list[float | None], ...]:
    return ([each.read_bytes for each in found], [each.written_bytes for each in found], [each.us for each in found])


def _size(count: int | None) -> str:
    if not count:
        return ""
    return f"{count} B" if count < 10_000 else f"{count / 1e3:.0f} kB" if count < 1e7 else f"{count / 1e6:.1f} MB"


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"
