"""What a target compiles before the first question: only what is needed, only once, and an error ends nothing."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from compiled_sampler.conformance import QUICK, Bench, chosen, run
from compiled_sampler.conformance.adapters import ours, ours_preparation
from compiled_sampler.conformance.processes import parallel_run
from compiled_sampler.conformance.processes.preparation import preparations
from compiled_sampler.conformance.report import Progress
from tests.compiled_sampler.conformance.adapters.race_adapter import Race

CPU = torch.device("cpu")
HERE = "tests.compiled_sampler.conformance"
ALL = [each.name for each in chosen()]


class Prepares(Race):
    """Has one part that works and one that does not."""

    @classmethod
    def preparations(cls, device, names):
        return [functools.partial(len, names), functools.partial(int, "planted")]


@pytest.fixture
def many(monkeypatch):
    monkeypatch.setattr(parallel_run, "has_many_processors", lambda: True)


def bench_of(target, name=f"{HERE}.test_preparation:Prepares"):
    return Bench(target, name, CPU, QUICK)


def test_processes_pay_where_there_is_something_to_do_side_by_side(many):
    (single,), (deals,) = chosen(["law.greedy"]), chosen(["determinism.paths"])
    assert parallel_run.pays(bench_of(Prepares), [single])
    assert not parallel_run.pays(bench_of(Prepares, None), [single])
    assert not parallel_run.pays(bench_of(Race), [single])
    assert parallel_run.pays(bench_of(Race), [deals])
    assert parallel_run.pays(bench_of(Race), [single, deals])


def test_parts_are_not_done_where_processors_are_few(monkeypatch, capsys):
    monkeypatch.setattr(parallel_run, "has_many_processors", lambda: False)
    assert [each.outcome for each in run(bench_of(Prepares), chosen(["robustness.single_token"]), Progress())] == [
        "passed"
    ]
    assert "prepared" not in capsys.readouterr().err


class Counts(Race):
    """Has one part for the questions of each section, and one for all."""

    @classmethod
    def preparations(cls, device, names):
        return [Appends(cls.folder, each) for each in sorted({"all", *(name.partition(".")[0] for name in names)})]


@dataclass(frozen=True)
class Appends:
    """A part that leaves a line."""

    folder: str
    name: str

    def __call__(self):
        with (Path(self.folder) / self.name).open("a") as file:
            file.write("done\n")


def test_a_part_that_several_groups_need_is_done_once(many, tmp_path, monkeypatch):
    monkeypatch.setattr(Counts, "folder", str(tmp_path), raising=False)
    bench = bench_of(Counts, f"{HERE}.test_preparation:Counts")
    run(bench, chosen(["robustness.single_token", "law.greedy", "randomness.unseeded"]))
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == dict.fromkeys(
        ("all", "law", "randomness", "robustness"), "done\n"
    )
    assert preparations(bench_of(Race), ALL) == []


def test_a_part_that_fails_is_told_in_a_line_of_its_own_and_the_run_goes_on(many, capsys):
    results = run(bench_of(Prepares), chosen(["robustness.single_token"]), Progress())
    assert [each.outcome for each in results] == ["passed"]
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("prepared 1 of 2 parts in ")
    assert "ValueError: invalid literal for int() with base 10: 'planted'" in line


class Dies(Race):
    """Has a part whose process ends without a word."""

    @classmethod
    def preparations(cls, device, names):
        return [functools.partial(os._exit, 3)]


def test_a_process_that_ends_is_told_and_the_run_goes_on(many, capsys):
    results = run(bench_of(Dies), chosen(["robustness.single_token"]), Progress())
    assert [each.outcome for each in results] == ["passed"]
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("prepared 0 of 1 parts in ")
    assert "ended without an answer, with status 3" in line


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def missing(*names, compiles=True):
    asked = [each.name for each in chosen(names or ("*",))]
    return ours_preparation.missing(CPU, asked, compiles=compiles)


def test_a_part_that_was_done_is_not_done_again(empty_cache, monkeypatch):
    monkeypatch.setattr(ours_preparation, "Compiled", ours.Eager)
    before = missing("robustness.single_token")
    for part in before:
        part()
    assert before
    assert missing("robustness.single_token") == []


def test_a_part_that_fails_is_done_again(empty_cache, monkeypatch):
    monkeypatch.setattr(ours_preparation, "Compiled", lambda *_: None)
    (*_, part) = missing("robustness.single_token")
    with pytest.raises(AttributeError):
        part()
    assert len(missing("robustness.single_token")) > 0


def test_other_sources_are_other_parts(empty_cache, monkeypatch):
    part = ours_preparation.parts(CPU, compiles=True)[0]
    before = ours_preparation.mark_of(part, CPU)
    monkeypatch.setattr(ours_preparation, "_sources", lambda: "changed")
    assert ours_preparation.mark_of(part, CPU) != before
    assert Path(before).parent.name == "compiled_sampler_conformance"


def test_only_what_the_questions_need_is_prepared(empty_cache):
    assert 0 < len(missing("law.greedy")) < len(missing("law")) < len(missing())
    assert missing("determinism.twice", compiles=False) == []
    assert len(missing("determinism.paths", compiles=False)) == len(ours_preparation.MODES)


def test_parts_are_equal_to_themselves_and_named_apart(empty_cache):
    parts = missing()
    assert parts == missing()
    assert len(set(parts)) == len(parts) == len({str(each) for each in parts})
    assert {*missing("law.greedy")} < {*parts}


def test_all_parts_can_be_done(empty_cache, monkeypatch):
    """In eager torch, which takes the same arguments; of modes, only whether there are such."""
    monkeypatch.setattr(ours_preparation, "Compiled", ours.Eager)
    modes = {mode.name for mode in ours.Sampler(512, 1).modes}
    assert set(ours_preparation.MODES) == modes
    for each in ours_preparation.parts(CPU, compiles=True):
        if not each.mode:
            ours_preparation.Preparation(CPU, each, ours_preparation.mark_of(each, CPU))()
