"""The table of drafters and rules: every row is measured, and a changed token is seen."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.toy_engine import end_to_end
from tools.toy_engine.engine import Decoded

OPTIONS = ["--device", "cpu", "--requests", "4", "--steps", "6", "--repeats", "1"]


pytestmark = pytest.mark.usefixtures("kept_threads")


def test_every_drafter_rule_and_width_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "numbers.json"
    assert end_to_end.main([*OPTIONS, "--json", str(path)]) == 0
    measured = json.loads(path.read_text())
    assert len(measured["table"]) == len(end_to_end.LAWS) * (1 + 5 * len(end_to_end.WIDTHS))
    for row in measured["table"]:
        assert row["tokens_per_s"] > 0
        assert 0 < row["step_ms"] <= row["step_ms_p95"]
        assert len(row["accepted_share"]) == row["width"]
        assert 1 <= row["tokens_per_step"] <= row["width"] + 1
        assert (row["mismatches"] == 0) == (row["rule"] == "match")
    assert end_to_end.rendered(measured) in capsys.readouterr().out


def test_one_changed_token_is_an_exit_status_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    original = end_to_end.Engine.run

    def tampered(*arguments: Any) -> Decoded:
        decoded = original(*arguments)
        decoded.streams[0][0] ^= 1
        return decoded

    monkeypatch.setattr(end_to_end.Engine, "run", tampered)
    monkeypatch.setattr(end_to_end, "WIDTHS", (3,))
    assert end_to_end.main(OPTIONS) == 1
