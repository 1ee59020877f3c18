"""A picture of cells: a panel a case, time against rows, with the floor, the targets and the baselines."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.bench.report.cells import Cell

NEEDS = "the plot needs matplotlib; pip install 'compiled-sampler[plot]', or plot the stored JSON elsewhere"

_COLUMNS, _WIDTH, _HEIGHT = 3, 4.5, 3.4

_ROOM = 6  # above the highest line, for the legend


def available() -> bool:
    """Whether matplotlib can be imported."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(cells: Sequence[Cell], path: str, title: str = "") -> None:
    """Draw a panel for each case; a line for each vocabulary, dtype and kind of logits.

    Args:
        cells: what was measured.
        path: of the PNG; missing folders are made.
        title: above all panels.

    Raises:
        SystemExit: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(NEEDS) from error
    panels: dict[tuple[str, bool], list[Cell]] = {}
    for cell in cells:
        panels.setdefault((cell.case, cell.num_drafts > 0), []).append(cell)
    lines = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(_COLUMNS * _WIDTH, max(lines, 1) * _HEIGHT), layout="constrained")
    for place, found in enumerate(panels.values(), start=1):
        _panel(figure.add_subplot(lines, _COLUMNS, place), found)
    figure.suptitle(title, fontsize=9)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _panel(axes: Any, cells: Sequence[Cell]) -> None:
    """One case: solid lines are ours, dashed ones their floors, crosses the targets, thin lines the baselines."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.rows):
        groups.setdefault(cell.group, []).append(cell)
    for i, ((_, vocab, dtype, distribution), found) in enumerate(groups.items()):
        label = f"compiled_sampler, V={vocab:,} {dtype} {distribution}"
        _line(axes, found, lambda cell: cell.us, label, color=f"C{i}", marker="o", linewidth=2, zorder=3)
        _line(axes, found, lambda cell: cell.floor_us, "floor", color=f"C{i}", linestyle="--")
        _line(axes, found, lambda cell: cell.target_us, "target", color=f"C{i}", marker="x", linestyle="")
        for place, name in enumerate(dict.fromkeys(name for cell in found for name in cell.baselines)):
            style = {"color": f"C{9 - place}", "linewidth": 0.8, "marker": "."}
            _line(axes, found, lambda cell, name=name: cell.baselines.get(name), name, **style)  # type: ignore[misc]
    counts = sorted({cell.rows for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_title(cells[0].case, fontsize=9)
    axes.set_xlabel(f"requests, K={cells[0].num_drafts}" if cells[0].num_drafts else "rows")
    axes.set_ylabel("us a call")
    axes.set_ylim(top=axes.get_ylim()[1] * _ROOM)
    axes.legend(fontsize=6, loc="upper left")
    axes.grid(visible=True, alpha=0.3)


def _line(axes: Any, cells: Sequence[Cell], time_of: Callable[[Cell], object], label: str, **style: Any) -> None:
    """A line through the cells that have such a time."""
    points = [(cell.rows, us) for cell in cells if isinstance(us := time_of(cell), int | float)]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)
