"""What comparisons print and store."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.exactness.comparison import reported
from tools.exactness.determinism import Count


def counts(mismatches: int) -> list[Count]:
    return [Count("a", 5, 0, 1.0), Count("b", 5, mismatches, 1.0), Count("a", 5, 0, 1.0)]


def test_a_run_that_is_cut_off_has_stored_what_it_found(tmp_path: Path) -> None:
    def cut_off() -> Iterator[Count]:
        yield from counts(2)
        raise KeyboardInterrupt

    path = tmp_path / "counts.json"
    with pytest.raises(KeyboardInterrupt):
        reported(cut_off(), control=False, path=str(path))
    paths = json.loads(path.read_text())["paths"]
    assert [(each["path"], each["rows"], each["mismatches"]) for each in paths] == [("a", 10, 0), ("b", 5, 2)]


@pytest.mark.parametrize(("control", "mismatches", "status"), [(False, 0, 0), (False, 1, 1), (True, 1, 1)])
def test_a_difference_is_wrong_and_of_a_control_each_path_without_one(
    control: bool, mismatches: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reported(counts(mismatches), control, path=None) == status
    assert "against eager torch" in capsys.readouterr().out
