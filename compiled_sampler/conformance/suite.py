"""The test of the pytest plugin: ``pytest -p compiled_sampler.conformance.pytest_plugin --pyargs THIS_MODULE``."""

from __future__ import annotations

from compiled_sampler.conformance.question import Outcome, Result


def test_conformance(conformance_result: Result) -> None:
    """The sampler does what is asked."""
    assert conformance_result.outcome is Outcome.PASSED, f"{conformance_result.detail}\n{conformance_result.repeat}"
