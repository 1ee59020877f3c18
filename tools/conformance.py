"""Who keeps what? Puts the runs of the conformance suite side by side.

    python -m compiled_sampler.conformance --target ours-eager --device cpu --json ours.json
    python -m tools.conformance ours.json ... [--json tools/results/conformance.json]

Prints a Markdown table, a column a run; runs of one target on one machine are one column. With ``--json`` the runs are
stored, and ``python -m tools.readme`` shows them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Run = dict[str, Any]

SIGNS = {"passed": "yes", "failed": "**no**", "not asked": "-"}
KEPT = ("target", "semantics", "device", "versions", "date", "command", "effort", "results")
"""Parts of a run that are stored."""


def rendered(measured: dict[str, Any]) -> str:
    """The table of all runs, then how each was made, its failures with their commands, and what was not asked."""
    runs: list[Run] = measured["runs"]
    found = [{each["question"]: each for each in run["results"]} for run in runs]
    header = ["question", "found with 99 %", *(f"`{run['target']}`" for run in runs)]
    lines = [_line(header), _line(["---", "---", *("---:" for _ in runs)])]
    for name in dict.fromkeys(name for results in found for name in results):
        cells = [SIGNS[results[name]["outcome"]] if name in results else "" for results in found]
        power = next((r[name]["power"] for r in found if name in r and r[name]["power"]), "")
        lines.append(_line([f"`{name}`", power, *cells]))
    return "\n".join([*lines, "", *(f"- {_made(run)}" for run in runs)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _made(run: Run) -> str:
    """How a run was made, what failed, and what was not asked."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    seconds = sum(each["seconds"] for each in run["results"])
    text = [f"`{run['target']}`: {versions}; {run['device']}; {seconds:.0f} s; `{run['command']}`."]
    for each in run["results"]:
        if each["outcome"] == "failed":
            text.append(f"Failed: {each['detail']} (`{each['repeat']}`).")
    reasons: dict[str, list[str]] = {}
    for each in run["results"]:
        if each["outcome"] == "not asked":
            reasons.setdefault(each["detail"], []).append(each["question"].partition(".")[2])
    text += [f"Not asked, {reason}: {', '.join(names)}." for reason, names in reasons.items()]
    return "\n  ".join(text)


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
