"""Cells of the benchmark: one measurement each, stored as JSON, read back and merged."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SAME_RUN = ("device", "torch", "triton", "commit", "streams")
_DIGITS = 3


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
