"""Time against rows, with the floor, the targets and the baselines: a PNG of what ``tools.bench`` stored.

    python -m tools.bench.plot RESULTS.json [RESULTS.json ...] PICTURE.png [--peers]

Needs matplotlib: ``pip install 'compiled-sampler[plot]'``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tools.bench.report import panels
from tools.bench.report.cells import cells_of
from tools.bench.report.peers import stored_peers, with_peers


def main() -> None:
    """Read, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("picture")
    parser.add_argument("--peers", action="store_true", help="only cells that peers were measured for, and their lines")
    options = parser.parse_args()
    contents = [json.loads(path.read_text()) for path in options.results]
    cells = [cell for content in contents for cell in cells_of(content)]
    if options.peers:
        peers = stored_peers()
        cells = with_peers([cell for cell in cells if peers.beside(cell)], peers)
    facts = dict.fromkeys("{device}, torch {torch}, commit {commit}".format_map(content) for content in contents)
    panels.plot(cells, options.picture, "; ".join(facts))


if __name__ == "__main__":
    main()
