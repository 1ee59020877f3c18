"""Does README.md show what the results files and the mode table say? Rewrites its generated parts.

    python -m tools.readme [--check] [--readme FILE] [--results FOLDER]

A part stands between ``<!-- name -->`` and ``<!-- /name -->``: ``speed`` and ``determinism`` come from the files of
tools/results, ``generator`` too, ``dispatch`` from the modes themselves. With ``--check`` nothing is written, and the
exit status is 1 when README.md is not up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from compiled_sampler import SamplingParams
from compiled_sampler.modes import Mode, includes, mode_table, uncovered

ROOT = Path(__file__).resolve().parents[1]
NOT_MEASURED = "not measured yet"
BATCHES: dict[str, list[SamplingParams]] = {
    "temperature 0, or top_k 1": [SamplingParams(temperature=0.0), SamplingParams(top_k=1)],
    "temperature 0.8": [SamplingParams(temperature=0.8)],
    "min_p 0.05": [SamplingParams(min_p=0.05)],
    "top_k 50, top_p 0.9, min_p 0.05": [SamplingParams(top_k=50, top_p=0.9, min_p=0.05)],
    "top_p 0.9 alone, or top_k 1000": [SamplingParams(top_p=0.9), SamplingParams(top_k=1000)],
    "a row with min_p 0.05 beside a row with top_k 50": [SamplingParams(min_p=0.05), SamplingParams(top_k=50)],
}
"""Examples for the picture, by what the picture calls them."""


def speed(measured: dict[str, Any]) -> str:
    """A table for each vocabulary, dtype and kind of logits: a row a case, a column a number of rows."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in measured["cells"]:
        groups.setdefault((cell["vocab_size"], cell["dtype"], cell["distribution"]), []).append(cell)
    parts = []
    for (vocab_size, dtype, distribution), cells in groups.items():
        parts.append(f"Median microseconds of a call for B rows, V = {vocab_size:,}, {dtype}, {distribution} logits:")
        parts.append(_speed_table(cells))
    return "\n\n".join([*parts, measured_with(measured["environment"])])


def _speed_table(cells: list[dict[str, Any]]) -> str:
    times = {(cell["case"], cell["rows"]): cell["median_us"] for cell in cells}
    floors = {("floor", cell["rows"]): cell["floor_us"] for cell in cells}
    rows = sorted({count for _, count in times})
    found = times | floors
    body = [
        [case, *(f"{found[case, n]:.1f}" if (case, n) in found else "" for n in rows)]
        for case in dict.fromkeys(case for case, _ in found)
    ]
    return table(["case", *(f"B={n}" for n in rows)], body)


def determinism(measured: dict[str, Any]) -> str:
    """A row a path: what was compared with eager torch on the CPU, and what differed.

    Raises:
        ValueError: the file holds the control, in which rows must differ.
    """
    if measured["control"]:
        raise ValueError("determinism.json must hold the comparison, got the control; run it without --control")
    body = [[each["path"], f"{each['rows']:,}", f"{each['mismatches']:,}"] for each in measured["paths"]]
    compared = table(["path", "rows compared with eager CPU", "mismatches"], body)
    return f"{compared}\n\n{measured_with(measured['environment'])}"


def generator(measured: dict[str, Any]) -> str:
    """A row a group of tests: how many passed, were suspicious, failed."""
    counts = Counter((each["group"], each["verdict"]) for each in measured["findings"])
    groups = dict.fromkeys(group for group, _ in counts)
    verdicts = ("passed", "suspicious", "FAILED")
    body = [[group, *(str(counts[group, verdict]) for verdict in verdicts)] for group in groups]
    facts = f"Stream version {measured['stream_version']}, commit {measured['commit'][:12]}, {measured['date']}."
    return f"{table(['tests', *verdicts], body)}\n\n{facts}"


def measured_with(environment: dict[str, str]) -> str:
    """One line: device, versions, commit, date."""
    return "{device}; torch {torch}, triton {triton}, Python {python}; commit {commit}, {date}.".format_map(environment)


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *body])


def dispatch() -> str:
    """A picture: example batches, the mode that serves each, and the modes that can stand in for it."""
    modes = mode_table(151_936, "top_k")
    node = {mode.name: f"m{i}" for i, mode in enumerate(modes)}
    lines = ["flowchart LR"]
    lines += [f'    {node[mode.name]}["<b>{mode.name}</b>"]' for mode in modes]
    for i, (label, batch) in enumerate(BATCHES.items()):
        lines.append(f'    b{i}(["{label}"]) --> {node[cheapest(modes, batch).name]}')
    lines += [f"    {node[small.name]} -.-> {node[large.name]}" for small, large in next_larger(modes)]
    return "\n".join(["```mermaid", *lines, "```"])


def cheapest(modes: Sequence[Mode], batch: Sequence[SamplingParams]) -> Mode:
    """The first mode that covers every request, as a plan takes it."""
    return next(mode for mode in modes if not any(uncovered(mode, params) for params in batch))


def next_larger(modes: Sequence[Mode]) -> list[tuple[Mode, Mode]]:
    """Pairs of a mode and one that includes it, with none between them."""
    above = {mode.name: [other for other in modes if other != mode and includes(other, mode)] for mode in modes}
    return [
        (mode, other)
        for mode in modes
        for other in above[mode.name]
        if not any(other in above[between.name] for between in above[mode.name])
    ]


def generated(results: Path) -> dict[str, str]:
    """The text of every generated part, by name."""
    parts = {"dispatch": dispatch()}
    for name, file, render in (
        ("speed", "bench.json", speed),
        ("determinism", "determinism.json", determinism),
        ("generator", "generator.json", generator),
    ):
        path = results / file
        parts[name] = render(json.loads(path.read_text())) if path.exists() else NOT_MEASURED
    return parts


def rewritten(text: str, parts: dict[str, str]) -> str:
    """The text with each part between its markers.

    Raises:
        ValueError: a part whose markers do not stand in the text once.
    """
    for name, part in parts.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"<!-- {name} --> and <!-- /{name} --> must stand once in the text; put them there")
        text = pattern.sub(lambda match, part=part: f"{match[1]}\n{part}\n\n{match[2]}", text)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite or check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when not up to date")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "tools" / "results")
    options = parser.parse_args(argv)
    before = options.readme.read_text()
    after = rewritten(before, generated(options.results))
    if after == before:
        return 0
    if options.check:
        print(f"{options.readme} is not up to date; run python -m tools.readme", file=sys.stderr)
        return 1
    options.readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
