"""What engines are run from and timed by: a published source, and steps of transformers."""

import zipfile
from pathlib import Path
from unittest import mock

import pytest

from tools.engines import published_source, transformers_step


def test_a_step_is_the_difference_of_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(transformers_step.time, "perf_counter", lambda: now[0])

    def call(tokens: int) -> None:
        now[0] += 1.0 + 0.002 * tokens

    assert transformers_step.step_us(call, steps=10, repeats=2) == pytest.approx(2000.0)


def test_the_source_of_an_engine_is_unpacked_once_and_without_what_is_no_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_source, "ROOT", tmp_path)

    def download(command: list[str], check: bool) -> None:
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
