"""A fixture that asks every question: ``pytest -p compiled_sampler.conformance.pytest_plugin --sampler-adapter NAME``.

A test that takes ``conformance_result`` runs once for each question, with its answer::

    def test_my_sampler(conformance_result):
        assert conformance_result.outcome != "failed", conformance_result

``compiled_sampler/conformance/suite.py`` is that test. Questions that are not asked are skipped, with the reason.
"""

from __future__ import annotations

import pytest
import torch

from compiled_sampler.conformance.bench import Bench, effort_of
from compiled_sampler.conformance.question import Outcome, Question, Result
from compiled_sampler.conformance.suite import ask_apart, chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the command line that apply here."""
    group = parser.getgroup("sampler conformance")
    group.addoption("--sampler-adapter", help="package.module:adapter, or a shipped one")
    group.addoption("--sampler-device", default="cuda" if torch.cuda.is_available() else "cpu")
    group.addoption("--sampler-full", action="store_true", help="sixteen times as many draws, and more")
    group.addoption("--sampler-rows", type=int, metavar="N", help="to compare on every path; the command's --rows")
    group.addoption("--sampler-limit", type=float, metavar="SECONDS", help="of a question; the command's --limit")
    group.addoption("--sampler-only", action="append", metavar="NAME", help="a question, section or pattern")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each question."""
    if "conformance_question" in metafunc.fixturenames:
        questions = chosen(metafunc.config.getoption("--sampler-only") or ["*"])
        metafunc.parametrize("conformance_question", questions, ids=[question.name for question in questions])


@pytest.fixture(scope="session")
def conformance_bench(request: pytest.FixtureRequest) -> Bench:
    """The sampler under test, which each question makes in a process of its own."""
    name = request.config.getoption("--sampler-adapter")
    if name is None:
        pytest.skip("no --sampler-adapter")
    asked = [request.config.getoption(f"--sampler-{option}") for option in ("full", "rows", "limit")]
    try:
        effort = effort_of(*asked)
    except ValueError as error:
        raise pytest.UsageError(str(error).replace("--", "--sampler-", 1)) from None
    return Bench(None, name, torch.device(request.config.getoption("--sampler-device")), effort)


@pytest.fixture
def conformance_result(conformance_bench: Bench, conformance_question: Question) -> Result:
    """The answer to one question; skips where it does not apply."""
    result = ask_apart(conformance_bench, conformance_question)
    if result.outcome is Outcome.NOT_ASKED:
        pytest.skip(result.detail)
    return result
