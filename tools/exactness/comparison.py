"""How a comparison ends: counts of mismatches added up by path, stored, printed, and an exit status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tools.measuring.environment import environment, write_json


def reported(counts: Iterable[NamedTuple], control: bool, path: str | None) -> int:
    """Print what was compared; the exit status: 1 where something differs, or should have.

    Args:
        counts: of a batch on a path, with its number of ``mismatches``. Those of the same path are added up, and stored
            after each, so that a run which is cut off has said what it found.
        control: whether every path must differ.
        path: of the JSON file; None stores nothing.
    """
    compared: list[dict[str, Any]] = []
    facts = environment()
    with Console().status("preparing") as status:
        for compared in summed(counts):
            wrong = sum(row["mismatches"] for row in compared)
            status.update(f"{len(compared)} paths, {wrong:,} mismatches so far")
            if path:
                write_json(path, {"environment": facts, "control": control, "paths": compared})
    table = Table(*compared[0], title="against eager torch on the CPU")
    for row in compared:
        table.add_row(*map(_shown, row.values()))
    Console().print(table)
    return int(any((row["mismatches"] > 0) != control for row in compared))


def summed(counts: Iterable[NamedTuple]) -> Iterator[list[dict[str, Any]]]:
    """After each count the totals so far: numbers of counts whose strings are the same are added up."""
    totals: dict[tuple[str, ...], dict[str, Any]] = {}
    for count in counts:
        names = tuple(value for value in count if isinstance(value, str))
        before = totals.get(names, {})
        totals[names] = {
            name: value if isinstance(value, str) else before.get(name, 0) + value
            for name, value in count._asdict().items()
        }
        yield list(totals.values())


def _shown(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}"
