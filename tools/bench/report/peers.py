"""What the samplers of engines take: stored times, set beside what ``tools.bench`` measures for the same job.

They stand in ``tools/results/peers.json``, measured as ``tools.bench`` measures: on an H200, in a replayed CUDA graph,
on logits that are not in the L2 cache. ``tools.bench --baselines`` measures engines that can be imported again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench.report.cells import Cell

STORED = Path(__file__).resolve().parents[2] / "results" / "peers.json"


class Peer(NamedTuple):
    """One sampler of another library, for one case of the benchmark."""

    case: str
    name: str
    us: dict[int, float]
    """Microseconds by rows, with drafts by requests."""
    other_law: bool
    """Whether it draws from another law than the one that the parameters of the case define."""


class Peers(NamedTuple):
    """All of them, and what was measured."""

    device: str
    versions: str
    batch: tuple[int, str, str]
    """V, dtype and kind of logits."""
    peers: list[Peer]

    def beside(self, cell: Cell) -> dict[str, float]:
        """Times of those that do a cell's job, by name; none where it is another job."""
        if (cell.vocab, cell.dtype, cell.distribution) != self.batch:
            return {}
        same = (peer for peer in self.peers if peer.case == cell.case and cell.rows in peer.us)
        return {peer.name: peer.us[cell.rows] for peer in same}

    def fastest(self, cell: Cell) -> float | None:
        """The least time among those that draw from the law of the case; None where there is none."""
        others = {peer.name for peer in self.peers if peer.other_law}
        return min((us for name, us in self.beside(cell).items() if name not in others), default=None)


def stored_peers(path: Path = STORED) -> Peers:
    """What a file holds."""
    return peers_of(json.loads(path.read_text()))


def peers_of(content: dict[str, Any]) -> Peers:
    """The content of a file, in types."""
    found = [
        Peer(row["case"], row["peer"], {int(rows): us for rows, us in row["us"].items()}, row["other_law"])
        for row in content["table"]
    ]
    batch = content["vocab"], content["dtype"], content["distribution"]
    return Peers(content["device"], content["versions"], batch, found)


def with_peers(cells: Iterable[Cell], peers: Peers) -> list[Cell]:
    """The cells, with peers among their baselines."""
    return [dataclasses.replace(cell, baselines={**peers.beside(cell), **cell.baselines}) for cell in cells]
