"""The command that runs the tests of adapters in their engines."""

import sys
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from tools.engines import __main__ as engines
from tools.engines import published_source, transformers_step


def test_the_environment_is_made_once_and_the_arguments_reach_pytest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ENVIRONMENT", tmp_path / ".engines")
    monkeypatch.setattr(sys, "argv", ["engines", "--engine", "transformers", "--version", "5.17.0", "-k", "greedy"])

    def create(folder: Path, with_pip: bool) -> None:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()

    with mock.patch.object(engines.venv, "create", side_effect=create) as creating:
        for _ in range(2):
            with mock.patch.object(engines.subprocess, "run") as running:
                running.return_value.returncode = 3
                assert engines.main() == 3
    assert creating.call_count == 1
    installed, _, tested = (call.args[0] for call in running.call_args_list)
    assert "transformers==5.17.0" in installed
    assert tested[-3:] == [engines.TESTS, "-k", "greedy"]


def test_every_engine_is_tried_and_a_version_belongs_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    results = {"transformers": 0, "vllm": 2, "sglang": 0}
    monkeypatch.setattr(engines, "run_tests", lambda name, *rest: tried.append(name) or results[name])
    monkeypatch.setattr(sys, "argv", ["engines"])
    assert engines.main() == 2
    assert tried == list(engines.NAMES)
    monkeypatch.setattr(sys, "argv", ["engines", "--version", "5.17.0"])
    with pytest.raises(SystemExit):
        engines.main()


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
        assert {"--no-deps", "sglang==0.5.23"} <= set(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a.whl", "w") as wheel:
            for name in ("sglang/a.py", "sglang/kernel.so", "sglang-0.5.23.dist-info/METADATA"):
                wheel.writestr(name, "")

    with mock.patch.object(published_source.subprocess, "run", side_effect=download) as running:
        for _ in range(2):
            published_source.prepare(Path("python"), "sglang", None)
    assert running.call_count == 1
    assert published_source.unpacked_version("sglang") == "0.5.23"
    assert published_source.unpacked_version("other") == ""
    found = sorted(path.name for path in (tmp_path / ".engines" / "sglang").rglob("*") if path.is_file())
    assert found == ["METADATA", "a.py"]
