"""The golden results: recorded once, drawn again by the definition, by eager torch and, some of them, compiled."""

import json

import pytest

from compiled_sampler.core import noise
from compiled_sampler.selfcheck import __main__ as selfcheck
from compiled_sampler.selfcheck.cases import LAYOUTS, QUICK, REQUESTS, WAYS, cases_of


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", selfcheck.DRAWS_ALL)
def test_backends_draw_the_golden_results(backend, layout):
    assert selfcheck.differing(list(cases_of(layout, backend, "cpu")), selfcheck.golden()) == []


def test_what_is_recorded_is_what_is_drawn():
    names = [case.name for case in selfcheck.chosen_cases("eager", "cpu", every=False)]
    assert names == list(selfcheck.golden())
    assert len(names) == len(LAYOUTS) * len(REQUESTS) * (4 + len(WAYS)) + 2 * 5
    assert len(selfcheck.chosen_cases("compiled", "cpu", every=False)) == len(QUICK)


def test_compiled_stages_draw_the_golden_results(capsys):
    assert selfcheck.main(["--device", "cpu", "--backend", "compiled"]) == 0
    assert f"{len(QUICK)} cases, 0 differ" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_gpu_draws_the_golden_results():
    assert selfcheck.main(["--device", "cuda"]) == 0


def test_another_stream_is_told_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(selfcheck, "LAYOUTS", LAYOUTS[:1])
    monkeypatch.setattr(noise, "STREAM_VERSION", 2)
    assert selfcheck.main(["--device", "cpu", "--backend", "eager"]) == 1
    assert "differs: V=129 top_k float32 no_filter, sample" in capsys.readouterr().out


def test_a_record_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(selfcheck, "LAYOUTS", LAYOUTS[:1])
    assert selfcheck.main(["--device", "cpu", "--record", str(tmp_path / "x.json")]) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert found == {name: result for name, result in selfcheck.golden().items() if name in found}
    assert len(found) == len(REQUESTS) * (4 + len(WAYS)) + 5


def test_golden_results_are_of_every_kind():
    results = selfcheck.golden()
    accepted = {each for name, result in results.items() if "rejection" in name for each in result[2]}
    flags = {flag for name, result in results.items() if name.endswith("one_hot") for flag in result[4]}
    assert accepted == {0, 1, 2, 3}
    assert all(any(flag & bit for flag in flags) for bit in (1, 2, 4, 16))
    bases = [results[f"V=1000 {base} float32 full, probs"] for base in ("top_k", "all")]
    assert bases[0] != bases[1]
