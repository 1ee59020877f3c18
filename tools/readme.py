"""Do README.md and docs/ show what the results files and the mode table say? Rewrites their generated parts.

    python -m tools.readme [--check] [--pages FOLDER] [--results FOLDER]

A part stands between ``<!-- name -->`` and ``<!-- /name -->``, once in README.md or in a page of docs. ``dispatch``
comes from the modes, every other part that ``generated`` names from a file of tools/results. With ``--check`` nothing
is written, and the exit status is 1 when a page is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compiled_sampler import SamplingParams
from compiled_sampler.modes import Mode, includes, mode_table, uncovered
from tools import conformance
from tools.bench import additions
from tools.bench.cells import Cell, Peers, cells_of, stored_peers
from tools.engines import continuous_batching

ROOT = Path(__file__).resolve().parents[1]
NOT_MEASURED = "not measured yet"
_MARKED = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", re.DOTALL)
BATCHES: dict[str, list[SamplingParams]] = {
    "temperature 0, or top_k 1": [SamplingParams(temperature=0.0), SamplingParams(top_k=1)],
    "temperature 0.8": [SamplingParams(temperature=0.8)],
    "min_p 0.05": [SamplingParams(min_p=0.05)],
    "top_k 50, top_p 0.9, min_p 0.05": [SamplingParams(top_k=50, top_p=0.9, min_p=0.05)],
    "top_k 1000": [SamplingParams(top_k=1000)],
    "top_p 0.9 alone": [SamplingParams(top_p=0.9)],
    "one row with min_p 0.05, another with top_k 50": [SamplingParams(min_p=0.05), SamplingParams(top_k=50)],
}
"""Examples for the picture, by what the picture calls them."""

REFERENCES = {"ours-eager": "eager CPU", "ours-compiled": "compiled CUDA"}  # what paths are compared with, by target


def speed_up(measured: dict[str, Any]) -> str:
    """A row a case that was timed on the CPU: compiled, eager, and how many times faster."""
    cells = [(cell["case"], cell["rows"], cell["us"], cell["eager_us"]) for cell in measured["table"]]
    body = [[case, str(rows), f"{us:.0f}", f"{eager:.0f}", f"{eager / us:.1f}"] for case, rows, us, eager in cells]
    compared = table(["case", "B", "compiled us", "eager us", "times faster"], body)
    return f"{compared}\n\n{measured_with(measured)}"


def compared(cells: Sequence[Cell], peers: Peers, *, verifies: bool = False) -> str:
    """A table of microseconds: what a cell takes here, and what the fastest peer takes.

    Args:
        cells: what was measured here.
        peers: what was measured of others.
        verifies: whether the table is of calls that verify drafts, instead of calls that sample.
    """
    found = [(cell, us) for cell in cells if (cell.num_drafts > 0) == verifies and (us := peers.fastest(cell))]
    times = {(cell.case, cell.rows): f"{cell.us:.1f} / {us:g}" for cell, us in found}
    return _by_rows(times, sorted({cell.rows for cell, _ in found}), "requests" if verifies else "B")


def replays(measured: dict[str, Any]) -> str:
    """A table of microseconds of the GPU: what a cell's kernels take, and what the sampler's own replay takes."""
    cells = [cell for cell in cells_of(measured) if cell.replay_us is not None]
    times = {(cell.case, cell.rows): f"{cell.us:.1f} / {cell.replay_us:.1f}" for cell in cells}
    if not times:
        return NOT_MEASURED
    return f"{_by_rows(times, sorted({cell.rows for cell in cells}))}\n\n{measured_with(measured)}"


def _columns(cells: Sequence[dict[str, Any]]) -> list[int]:
    return sorted({cell["rows"] for cell in cells})


def _by_rows(found: dict[tuple[str, int], str], rows: Sequence[int], count: str = "B") -> str:
    lines = dict.fromkeys(line for line, _ in found)
    return table(
        ["case", *(f"{count}={n}" for n in rows)], [[line, *(found.get((line, n), "") for n in rows)] for line in lines]
    )


def compared_paths(measured: dict[str, Any], what: str) -> str:
    """A row a path of a run of the conformance suite: what was compared, and what differed; then how it was made.

    Args:
        measured: the run, as ``python -m compiled_sampler.conformance --json`` writes it.
        what: was compared.
    """
    counts = [each for result in measured["results"] for each in result["counts"]]
    body = [[each["path"], f"{each['compared']:,}", f"{each['mismatches']:,}"] for each in counts]
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items() if name != "commit")
    header = ["path", f"{what} compared with {REFERENCES[measured['target']]}", "mismatches"]
    return f"{table(header, body)}\n\n{measured['device']}; {versions}; `{measured['command']}`."


def host(measured: dict[str, Any]) -> str:
    """A row a step: microseconds of the host by rows; without bare calls of the driver, which are no step."""
    cells = [cell for cell in measured["table"] if not cell["step"].startswith("bare")]
    columns = _columns(cells)
    times = {(cell["step"], cell["requests"], cell["rows"]): f"{cell['us']:.0f}" for cell in cells}
    steps = dict.fromkeys((cell["step"], cell["requests"]) for cell in cells)
    body = [[", ".join(step), *(times.get((*step, n), "") for n in columns)] for step in steps]
    return f"{table(['step', *(f'B={n}' for n in columns)], body)}\n\n{measured_with(measured)}"


def measured_with(environment: dict[str, str]) -> str:
    """One line: device and versions; the results file has the commit and the date."""
    return "{device}; torch {torch}, triton {triton}, Python {python}.".format_map(environment)


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
        ("speed_cpu", "bench_cpu.json", speed_up),
        ("determinism", "determinism.json", partial(compared_paths, what="rows")),
        ("streams", "streams.json", partial(compared_paths, what="requests")),
        ("host", "host.json", host),
        ("replays", "bench.json", replays),
        ("edits", "edits_h100.json", additions.rendered),
        ("logprobs", "logprobs_h100.json", additions.rendered),
        ("conformance", "conformance.json", conformance.rendered),
        ("continuous_batching", "continuous_batching.json", continuous_batching.rendered),
    ):
        path = results / file
        parts[name] = render(json.loads(path.read_text())) if path.exists() else NOT_MEASURED
    path = results / "bench.json"
    cells, peers = cells_of(json.loads(path.read_text())) if path.exists() else [], stored_peers()
    for name, show in (("peers", compared), ("peers_verify", partial(compared, verifies=True))):
        parts[name] = show(cells, peers) if any(map(peers.beside, cells)) else NOT_MEASURED
    return parts


def pages(root: Path) -> list[Path]:
    """README.md and the pages of docs that hold generated parts or may: all but what lies in folders of docs."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def rewritten(texts: Mapping[Path, str], parts: Mapping[str, str]) -> dict[Path, str]:
    """The texts by page, with each part between its markers.

    Raises:
        ValueError: a part whose markers do not stand once in all pages, or markers of no part.
    """
    found = Counter(name for text in texts.values() for name, _ in _MARKED.findall(text))
    for name in found.keys() | parts.keys():
        if name not in parts:
            raise ValueError(f"<!-- {name} --> is no generated part; these are: {', '.join(parts)}")
        if found[name] != 1:
            raise ValueError(
                f"<!-- {name} --> and <!-- /{name} --> must stand once in README.md or docs; put them there"
            )
    fill = partial(_filled, parts=parts)
    return {path: _MARKED.sub(fill, text) for path, text in texts.items()}


def _filled(match: re.Match[str], parts: Mapping[str, str]) -> str:
    """The markers with the part that belongs between them."""
    name = match[1]
    return f"<!-- {name} -->\n\n{parts[name]}\n\n<!-- /{name} -->"


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite or check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when not up to date")
    parser.add_argument("--pages", type=Path, default=ROOT, help="the folder of README.md and docs")
    parser.add_argument("--results", type=Path, default=ROOT / "tools" / "results")
    options = parser.parse_args(argv)
    before = {path: path.read_text() for path in pages(options.pages)}
    after = rewritten(before, generated(options.results))
    stale = [path for path in before if after[path] != before[path]]
    if not options.check:
        for path in stale:
            path.write_text(after[path])
        return 0
    for path in stale:
        print(f"{path} is not up to date; run python -m tools.readme", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
