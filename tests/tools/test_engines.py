"""What engines are run from, timed by and judged by: a published source, steps of transformers, rows of SGLang."""

import zipfile
from pathlib import Path
from unittest import mock

import pytest

from tools.engines import published_source, transformers_step
from tools.engines.sglang_gpu import compared
from tools.engines.sglang_process import REQUESTS


def test_a_step_is_the_difference_of_two_calls(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(transformers_step.time, "perf_counter", lambda: now[0])

    def call(tokens):
        now[0] += 1.0 + 0.002 * tokens

    assert transformers_step.step_us(call, steps=10, repeats=2) == pytest.approx(2000.0)


def test_the_source_of_an_engine_is_unpacked_once_and_without_what_is_no_python(tmp_path, monkeypatch):
    monkeypatch.setattr(published_source, "ROOT", tmp_path)

    def download(command, check):
        assert {"--no-deps", "sglang==0.5.17"} <= set(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a.whl", "w") as wheel:
            for name in ("sglang/a.py", "sglang/kernel.so", "sglang-0.5.17.dist-info/METADATA"):
                wheel.writestr(name, "")

    with mock.patch.object(published_source.subprocess, "run", side_effect=download) as running:
        for _ in range(2):
            published_source.prepare(Path("python"), "sglang", None)
    assert running.call_count == 1
    assert published_source.unpacked_version("sglang") == "0.5.17"
    assert published_source.unpacked_version("other") == ""
    found = sorted(path.name for path in (tmp_path / ".engines" / "sglang").rglob("*") if path.is_file())
    assert found == ["METADATA", "a.py"]


FIRST = len(REQUESTS[0][0])


def runs(tokens, digests):
    logits = {str(FIRST + place): digest for place, digest in enumerate(digests)}
    return {"rows": {"0": {"tokens": tokens, "logits": logits}}, "cached": 0}


def test_a_row_of_the_same_logits_and_another_token_is_counted_and_one_of_other_logits_is_not():
    alone = {"alone 0": runs([4, 5, 6], ["a", "b", "c"])}
    same = compared({"ours": alone, "ours_eager": {"alone 0": runs([4, 5, 6], ["a", "b", "c"])}})
    assert same["ours"] == {"rows": 3, "seen again": 3, "with the same logits and another token": 0}
    other = compared({"ours": alone, "ours_eager": {"alone 0": runs([4, 9, 8], ["a", "b", "d"])}})
    assert other["ours"] == {"rows": 4, "seen again": 2, "with the same logits and another token": 1}


def test_an_engine_that_did_not_answer_is_named():
    assert compared({"ours": {"error": "late"}, "stock_seeded": {"batch": {"error": "ended"}}}) == {
        "ours": "late",
        "stock_seeded batch": "ended",
    }
