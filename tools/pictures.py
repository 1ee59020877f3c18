"""How long does a call take beside the fastest peer, and what do trees of drafts give? Draws docs/pictures/*.png.

    python -m tools.pictures [--results FOLDER] [--pictures FOLDER]

speed.png has a panel for each case, with three lines: this library, its floor, and the fastest peer that draws from the
law of the case. trees.png has one for each law: tokens a step of full trees, by way of drafting and children of a node.
Needs matplotlib: ``pip install 'compiled-sampler[plot]'``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.readme import ROOT, Cell, cells_of, stored_peers

_COLUMNS = 5
_OURS, _PEER, _FLOOR = "#0b62c4", "#c2410c", "#8a8a8a"
_DRAFTERS = {
    "coupled, match": _OURS,
    "likeliest, match": "#0f8a5f",
    "independent, match": _FLOOR,
    "independent, multi-round rejection": "#d9a441",
    "independent, recursive rejection": _PEER,
}
_MARKERS = {1: "o", 2: "s", 4: "^"}
_FULL = ("comb", 1), ("full", 2), ("full", 4)  # a chain is a full tree of one child


class Line(NamedTuple):
    """The times of one case, by ascending rows."""

    case: str
    num_drafts: int
    rows: tuple[int, ...]
    us: tuple[float, ...]
    floor_us: tuple[float, ...]
    peer_us: tuple[float, ...]


def lines(results: Path) -> list[Line]:
    """A line for each case that a peer was measured for, from the stored files of a folder."""
    peers = stored_peers()
    cells = cells_of(json.loads((results / "bench.json").read_text()))
    cases: dict[str, list[tuple[Cell, float]]] = {}
    for cell in sorted(cells, key=lambda cell: cell.rows):
        if fastest := peers.fastest(cell):
            cases.setdefault(cell.case, []).append((cell, fastest))
    order = dict.fromkeys(cell.case for cell in cells if cell.case in cases)
    return [_line(cases[case]) for case in order]


def _line(compared: Sequence[tuple[Cell, float]]) -> Line:
    cells = [cell for cell, _ in compared]
    return Line(
        cells[0].case,
        cells[0].num_drafts,
        tuple(cell.rows for cell in cells),
        tuple(cell.us for cell in cells),
        tuple(cell.floor_us for cell in cells),
        tuple(us for _, us in compared),
    )


def draw(found: Sequence[Line], picture: Path) -> None:
    """Write the picture: panels of one scale, on white, so that it is readable in light and dark themes."""
    from matplotlib.figure import Figure

    count = -(-len(found) // _COLUMNS)
    figure = Figure(figsize=(2.3 * _COLUMNS, 2.3 * count + 0.4), layout="constrained", facecolor="white")
    panels = list(figure.subplots(count, _COLUMNS, sharey=True, squeeze=False).flat)
    for axes, line in zip(panels, found, strict=False):
        _panel(axes, line)
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=10)
    figure.supylabel("microseconds of a call", fontsize=10)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def _panel(axes: Any, line: Line) -> None:
    axes.plot(line.rows, line.peer_us, color=_PEER, marker="s", markersize=3.5, linewidth=1.5, label="fastest peer")
    axes.plot(line.rows, line.us, color=_OURS, marker="o", markersize=4.5, linewidth=2.2, label="this library")
    axes.plot(line.rows, line.floor_us, color=_FLOOR, linestyle="--", linewidth=1.2, label="floor of this library")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(line.rows, [str(rows) for rows in line.rows])
    axes.minorticks_off()
    axes.set_title(line.case.replace("rejection by probabilities, ", "rejection, "), fontsize=9)
    axes.set_xlabel(f"requests, {line.num_drafts} drafts each" if line.num_drafts else "rows", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_trees(records: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Write the picture of what ``tools.trees`` measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 3.6), layout="constrained", facecolor="white")
    laws = [*dict.fromkeys(record["law"] for record in records)]
    panels = figure.subplots(1, len(laws), sharey=True, squeeze=False)[0]
    for axes, law in zip(panels, laws, strict=True):
        for record in (each for each in records if each["law"] == law and (each["shape"], each["width"]) in _FULL):
            depths, tokens = zip(
                *((int(depth), each) for depth, each in record["tokens_per_step"].items()), strict=True
            )
            way, width = record["drafter"], record["width"]
            style = {"color": _DRAFTERS[way], "marker": _MARKERS[width], "label": f"{way}, {width}"}
            axes.plot(depths, tokens, markersize=4, linewidth=1.5, **style)
        axes.set_title(law, fontsize=9)
        axes.set_xlabel("depth", fontsize=8)
        axes.grid(visible=True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8, title="children of a node")
    figure.supylabel("tokens a step", fontsize=10)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Read, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "tools" / "results")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "pictures")
    options = parser.parse_args()
    draw(lines(options.results), options.pictures / "speed.png")
    draw_trees(json.loads((options.results / "trees.json").read_text())["records"], options.pictures / "trees.png")


if __name__ == "__main__":
    main()
