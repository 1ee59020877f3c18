"""The picture of times: drawn from what is stored, one line for each case that a peer was measured for."""

import json
from pathlib import Path

import pytest

from tools import pictures
from tools.readme import ROOT

RESULTS = ROOT / "tools" / "results"


def test_every_case_that_has_a_peer_has_a_line() -> None:
    found = pictures.lines(RESULTS)
    assert [len(line.rows) for line in found] == [5] * 7 + [3] * 2
    assert [line.num_drafts for line in found] == [0] * 7 + [3] * 2
    for line in found:
        assert list(line.rows) == sorted(line.rows)
        assert all(floor < us < peer for floor, us, peer in zip(line.floor_us, line.us, line.peer_us, strict=True))


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "folder" / "speed.png"
    pictures.draw(pictures.lines(RESULTS), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_trees_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "trees.png"
    pictures.draw_trees(json.loads((RESULTS / "trees.json").read_text()), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
