"""The picture: distance from the target's law against the number of draws, on two logarithmic axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NEEDS = "the picture needs matplotlib; pip install 'compiled-sampler[plot]', or store the numbers with --json"
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#b9cfe8", "linewidth": 6.0},
    {"color": "#0b62c4", "linewidth": 1.5, "marker": "o"},
    {"color": "#15803d", "linewidth": 1.5, "marker": "s"},
    {"color": "#7c3aed", "linewidth": 1.5, "marker": "^"},
)
_CONTROLS: tuple[dict[str, Any], ...] = ({"color": "#c2410c", "marker": "x"}, {"color": "#7f1d1d", "marker": "x"})


def draw(measured: dict[str, Any], path: Path) -> None:
    """Write the picture, on white, so that it is readable in light and dark themes.

    Args:
        measured: as ``tools.convergence`` stores it.
        path: of the PNG.

    Raises:
        SystemExit: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(NEEDS) from error
    figure = Figure(figsize=(7.6, 4.6), layout="constrained", facecolor="white")
    axes, draws = figure.subplots(), measured["draws"]
    axes.fill_between(draws, measured["expected"], measured["limit"], color="#ececec", label="perfect draws, up to")
    axes.plot(draws, measured["expected"], color="#8a8a8a", linestyle="--", label="perfect draws, expected")
    for styles, kind in ((_STYLES, "right"), (_CONTROLS, "controls")):
        for (name, distances), style in zip(measured[kind].items(), styles, strict=True):
            axes.plot(draws, distances, label=name, **{"linewidth": 1.2, "markersize": 4, **style})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("draws")
    axes.set_ylabel("total variation from the target's law")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
