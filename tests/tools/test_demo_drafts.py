"""The demo with speculative drafts: what it shows and stores, and that a changed token is seen."""

import json
from pathlib import Path

import pytest

from tools import demo
from tools.toy_engine.drafters import Drafter
from tools.toy_engine.speculation import Speculated, SpeculativeEngine

OPTIONS = ["--backend", "eager", "--device", "cpu", "--requests", "10", "--steps", "6"]


pytestmark = pytest.mark.usefixtures("kept_threads")


def test_the_demo_shows_and_stores_every_pairing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "numbers.json"
    assert demo.main([*OPTIONS, "--json", str(path)]) == 0
    output, stored = capsys.readouterr().out, json.loads(path.read_text())
    assert "share accepted at each place" in output
    assert [pair["rule"] for pair in stored["speculation"]] == ["match", "match", "rejection", "block", "match"]
    assert all(f"{pair['tokens_per_step']:.2f}" in output for pair in stored["speculation"])
    compared = sum(run["compared"] or 0 for run in stored["runs"][1:] + stored["speculation"])
    assert f"{compared:,} tokens compared, all identical" in output


def test_the_demo_leaves_drafts_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "numbers.json"
    assert demo.main([*OPTIONS, "--no-drafts", "--json", str(path)]) == 0
    assert "share accepted" not in capsys.readouterr().out
    assert json.loads(path.read_text())["speculation"] == []


def test_one_token_changed_by_drafts_is_an_exit_status_of_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = SpeculativeEngine.run

    def tampered(self: SpeculativeEngine, draft: Drafter, rule: str, *args: object) -> Speculated:
        result = original(self, draft, rule, *args)  # type: ignore[arg-type]
        result.decoded.streams[0][0] ^= 1
        return result

    monkeypatch.setattr(SpeculativeEngine, "run", tampered)
    assert demo.main([*OPTIONS]) == 1
    assert "1 of " in capsys.readouterr().out
