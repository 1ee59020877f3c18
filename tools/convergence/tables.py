"""The distances as a table."""

from __future__ import annotations

from typing import Any

from tools.convergence.distances import FALSE_ALARM


def rendered(measured: dict[str, Any]) -> str:
    """A table of distances, and with what it was measured."""
    rows = {
        "perfect draws, expected": measured["expected"],
        f"perfect draws, exceeded with probability below {FALSE_ALARM:.0e}": measured["limit"],
        **measured["right"],
        **measured["controls"],
    }
    draws = measured["draws"]
    decades = [place for place, n in enumerate(draws) if str(n).strip("0") == "1"]
    lines = [
        f"| draws | {' | '.join(f'{draws[place]:,}' for place in decades)} |",
        f"| --- |{' ---: |' * len(decades)}",
        *(f"| {name} | {' | '.join(f'{found[place]:.4f}' for place in decades)} |" for name, found in rows.items()),
    ]
    facts = f"{measured['outcomes']} outcomes; the drafter's own law is {measured['draft_distance']:.4f} away"
    machine = f"{measured['device']}; torch {measured['torch']}, Python {measured['python']}"
    return "\n".join([*lines, "", f"{facts}; {machine}; commit {measured['commit']}, {measured['date']}."])
