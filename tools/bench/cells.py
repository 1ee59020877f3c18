"""Cells of the benchmark: one measurement each, stored, read back, set beside stored times of peers, and shown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

SAME_RUN = ("device", "torch", "triton", "commit", "streams")
_DIGITS = 3
CPU_SPEED_UP = 5
"""How many times faster than eager torch the compiled library should be on a CPU, for 8 rows of 151,936 logits."""
STORED = Path(__file__).resolve().parents[1] / "results" / "peers.json"
"""Times of the samplers of engines, taken as ``tools.bench`` takes them."""


@dataclass(frozen=True)
class Cell:
    """One measurement; times are microseconds of a call."""

    case: str
    mode: str
    rows: int
    """R, with drafts the number of requests N."""
    num_drafts: int
    """K; 0 for sampling."""
    vocab: int
    dtype: str
    distribution: str
    us: float
    floor_us: float
    floor_kind: str
    num_kernels: int
    target_us: float | None = None
    eager_us: float | None = None
    """Of the pipeline in eager torch; measured on the CPU alone."""
    replay_us: float | None = None
    """Of the sampler's own replay on the GPU: ``us``, and what its launch and what its graph fetches take besides."""
    baselines: dict[str, float | str] = field(default_factory=dict)
    """Times by name, or why there is none."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What is measured."""
        return self.case, self.rows, self.num_drafts, self.vocab, self.dtype, self.distribution

    @property
    def ratio(self) -> float:
        """Times the floor."""
        return self.us / self.floor_us

    @property
    def group(self) -> tuple[Any, ...]:
        """What stands in one table."""
        return self.num_drafts > 0, self.vocab, self.dtype, self.distribution


def content_of(environment: dict[str, str], cells: Iterable[Cell]) -> dict[str, Any]:
    """What is stored."""
    return {**environment, "table": [_rounded({**asdict(cell), "ratio": cell.ratio}) for cell in cells]}


def cells_of(content: dict[str, Any]) -> list[Cell]:
    """What was stored."""
    return [Cell(**{name: value for name, value in row.items() if name != "ratio"}) for row in content["table"]]


def stored(path: str, environment: dict[str, str]) -> list[Cell]:
    """The cells of a file; none where there is no file.

    Raises:
        ValueError: they were measured with something else.
    """
    if not Path(path).is_file():
        return []
    content = json.loads(Path(path).read_text())
    for name in SAME_RUN:
        there, here = content.get(name), environment.get(name)
        if there != here:
            raise ValueError(
                f"{path} must hold results of the same {name}, got {there!r} there and {here!r} now; "
                "store into another file"
            )
    return cells_of(content)


def merged(cells: Iterable[Cell], others: Iterable[Cell]) -> list[Cell]:
    """All cells; one of ``others`` takes the place of one that measured the same."""
    return list({cell.key: cell for cell in (*cells, *others)}.values())


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return round(value, _DIGITS) if isinstance(value, float) else value


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
    return [replace(cell, baselines={**peers.beside(cell), **cell.baselines}) for cell in cells]


def tables_of(cells: Sequence[Cell]) -> list[Table]:
    """A table for each vocabulary, dtype and kind of logits; a line a cell and a line a baseline."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    return [_table(found) for found in groups.values()]


def line_of(cell: Cell) -> str:
    """A cell in words, for the log."""
    name = f"{cell.case}, {cell.rows} {'requests' if cell.num_drafts else 'rows'}, V={cell.vocab}, {cell.dtype}"
    target = "" if cell.target_us is None else f", target {cell.target_us:.1f} {_verdict(cell)}"
    eager = "" if cell.eager_us is None else f", eager {cell.eager_us:.1f} us ({cell.eager_us / cell.us:.1f} x slower)"
    time = f"{cell.us:.1f} us ({cell.ratio:.1f} x the floor of {cell.floor_us:.1f}, {cell.floor_kind})"
    replay = "" if cell.replay_us is None else f", replayed by the sampler {cell.replay_us:.1f}"
    return f"{name}, {cell.distribution}: {time}{replay}{target}{eager}"


def _table(cells: Sequence[Cell]) -> Table:
    first = cells[0]
    on_cpu = any(cell.eager_us is not None for cell in cells)
    count = f"requests, K={first.num_drafts}" if first.num_drafts else "rows"
    last = ("eager us", f"speed-up (target {CPU_SPEED_UP} x)") if on_cpu else ("target us", "")
    replayed = any(cell.replay_us is not None for cell in cells)
    title = f"us a call, V={first.vocab:,}, {first.dtype}, {first.distribution} logits"
    table = Table("case", count, "us", "floor us", "what binds", "x floor", *last, title=title)
    if replayed:
        table.add_column("replayed us", justify="right")
    for i in (1, 2, 3, 5, 6):
        table.columns[i].justify = "right"
    for i, cell in enumerate(cells):
        ends = i + 1 == len(cells) or cells[i + 1].case != cell.case
        times = (f"{cell.us:.1f}", f"{cell.floor_us:.1f}", cell.floor_kind, f"{cell.ratio:.1f}")
        replay = () if not replayed else ("" if cell.replay_us is None else f"{cell.replay_us:.1f}",)
        row = cell.case, str(cell.rows), *times, *_last(cell, on_cpu), *replay
        table.add_row(*row, end_section=ends and not cell.baselines)
        for place, (name, us) in enumerate(cell.baselines.items(), start=1):
            entries = _others(us, cell.floor_us)
            table.add_row(f"  {name}", str(cell.rows), *entries, style="dim", end_section=place == len(cell.baselines))
    return table


def _others(us: float | str, floor_us: float) -> tuple[str, ...]:
    """A baseline's time and its ratio to the floor, or why there is none."""
    return ("", "", us, "") if isinstance(us, str) else (f"{us:.1f}", "", "", f"{us / floor_us:.1f}")


def _last(cell: Cell, on_cpu: bool) -> tuple[str, str]:
    if on_cpu:
        return ("", "") if cell.eager_us is None else (f"{cell.eager_us:.1f}", f"{cell.eager_us / cell.us:.1f} x")
    return ("", "") if cell.target_us is None else (f"{cell.target_us:.1f}", _verdict(cell))


def _verdict(cell: Cell) -> str:
    return "met" if cell.target_us is not None and cell.us <= cell.target_us else "missed"
