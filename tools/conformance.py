"""Who keeps what? Puts the runs of the conformance suite side by side.

    python -m compiled_sampler.conformance --target ours-eager --device cpu --json ours.json
    python -m tools.conformance ours.json ... [--json tools/results/conformance.json]

Prints a Markdown table, a column a run; runs of one target on one machine are one column. With ``--json`` the runs are
stored, and ``python -m tools.readme`` shows them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]

SIGNS = {"passed": "yes", "failed": "**no**", "not asked": "-"}
KEPT = ("target", "semantics", "device", "versions", "date", "command", "effort", "results")
"""Parts of a run that are stored."""


def rendered(measured: dict[str, Any]) -> str:
    """A row for the questions that all runs answer alike; then how each was made, failures, and what was not asked."""
    runs: list[Run] = measured["runs"]
    found = [{each["question"]: each for each in run["results"]} for run in runs]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for results in found for name in results):
        cells = (SIGNS[results[name]["outcome"]] if name in results else "" for results in found)
        alike.setdefault((name.partition(".")[0], *cells), []).append(f"`{name}`")
    lines = [
        _line(["questions", *(f"`{run['target']}`" for run in runs)]),
        _line(["---", *("---:" for _ in runs)]),
        *(_line([", ".join(names), *cells]) for (_, *cells), names in alike.items()),
    ]
    return "\n".join([*lines, "", *map(_made, runs), _reasons(runs)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _made(run: Run) -> str:
    """How a run was made, and what failed."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if name != "commit")
    seconds = sum(each["seconds"] for each in run["results"])
    text = [f"- `{run['target']}`: {versions}; {run['device']}; {seconds:.0f} s; `{run['command']}`."]
    text += [
        f"Failed: {each['detail']} (`{each['repeat']}`)." for each in run["results"] if each["outcome"] == "failed"
    ]
    return "\n  ".join(text)


def _reasons(runs: Sequence[Run]) -> str:
    """Why something was not asked, of any of the samplers."""
    details = [each["detail"] for run in runs for each in run["results"] if each["outcome"] == "not asked"]
    reasons = dict.fromkeys(re.sub(r"^\d+ draws in \d+ s", "the draws of a quick run", each) for each in details)
    return f"- Not asked: {'; '.join(reasons) or 'nothing'}."


def merged(runs: Sequence[Run]) -> list[Run]:
    """The runs, of which those of one target, device and versions are one: their questions and commands together.

    So that what takes longer than a machine may be had can be asked section by section.
    """
    found: dict[str, Run] = {}
    for run in runs:
        key = json.dumps([run["target"], run["device"], run["versions"], run.get("effort")])
        before = found.get(key)
        if before is None:
            found[key] = run
            continue
        asked = {each["question"] for each in run["results"]}
        results = [each for each in before["results"] if each["question"] not in asked] + run["results"]
        found[key] = before | {"command": f"{before['command']}; {run['command']}", "results": results}
    return list(found.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="tools.conformance", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="JSON files of compiled_sampler.conformance")
    parser.add_argument("--json", type=Path, metavar="FILE", help="store the runs there")
    asked = parser.parse_args(arguments)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in asked.runs]
    measured = {"runs": merged([{key: run[key] for key in KEPT if key in run} for run in runs])}
    print(rendered(measured))
    if asked.json is not None:
        asked.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
