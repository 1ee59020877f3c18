"""What the demo prints of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from tools.model.tokenizer import Tokenizer
from tools.toy_engine.engine import Decoded, Request
from tools.toy_engine.runs import KINDS, kind_of
from tools.toy_engine.speculation import WIDTH


def texts_table(tokenizer: Tokenizer, requests: Sequence[Request], decoded: Decoded) -> Table:
    """What the first request of each kind reads like."""
    table = Table("parameters", "prompt and continuation", title="Some of the texts", box=SIMPLE, show_lines=True)
    first = {kind_of(i, len(requests)): request for i, request in reversed(list(enumerate(requests)))}
    for kind in (kind for kind in KINDS if kind in first):
        text = Text(tokenizer.decode(first[kind].prompt), style="bold")
        continuation = tokenizer.decode(decoded.streams[first[kind].request_id])
        table.add_row(kind, text.append(continuation, style="not bold"))
    return table


def modes_table(numbers: Sequence[dict[str, Any]]) -> Table:
    """How many steps each mode served."""
    modes = list(dict.fromkeys(mode for run in numbers for mode in run["mode_steps"]))
    table = Table("backend", "device", "order", *modes, "reused", title="Steps by mode", box=SIMPLE)
    for run in numbers:
        steps = (str(run["mode_steps"].get(mode, 0)) for mode in modes)
        table.add_row(run["backend"], run["device"], run["order"], *steps, str(run["slots_reused"]))
    return table


def identity_table(numbers: Sequence[dict[str, Any]]) -> Table:
    """The point of it all: every run against the first."""
    columns = ("backend", "device", "order", "most_rows", "steps", "tokens_per_s", "compared", "mismatches", "sha256")
    table = Table(
        *(name.replace("_per_", "/").replace("_", " ") for name in columns),
        title="Every run against the first",
        box=SIMPLE,
    )
    for run in numbers:
        cells = (f"{run[name]:,}" if isinstance(run[name], int | float) else run[name][:10] for name in columns)
        table.add_row(*cells, style="red" if run["mismatches"] else None)
    return table


def speculation_table(numbers: Sequence[dict[str, Any]]) -> Table:
    """What drafts save, and that ``match`` changes no token."""
    places = [f"at {place}" for place in range(1, WIDTH + 1)]
    columns = ("drafter", "rule", "drafts/step", *places, "tokens/step", "mismatches")
    title = (
        f"{numbers[0]['requests']} requests with drafts at up to {WIDTH} places a step: share accepted at each place"
    )
    table = Table(*columns, title=title, box=SIMPLE)
    for pair in numbers:
        table.add_row(
            pair["drafter"],
            pair["rule"],
            f"{pair['drafts_per_step']:.2f}",
            *("-" if share is None else f"{share:.1%}" for share in pair["accepted_share"]),
            f"{pair['tokens_per_step']:.2f}",
            "same law" if pair["compared"] is None else f"{pair['mismatches']:,} of {pair['compared']:,}",
            style="red" if pair["mismatches"] else None,
        )
    return table
