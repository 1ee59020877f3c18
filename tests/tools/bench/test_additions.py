"""What edits and logprobs add to a step: each timed step is compared with eager torch, and a wrong one ends the run."""

import json

import pytest
import torch

from compiled_sampler import Logprobs
from tests.builders.sampler import V, stages_stay_eager
from tools.bench import __main__ as bench
from tools.bench import additions, custom_edits
from tools.bench.additions import Addition, AdditionCell
from tools.bench.batches import WrongAnswer

CUSTOM = ["no digits", "no digits, eager before"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A small vocabulary, short histories, few additions of each kind, and stages that take no compiler."""
    monkeypatch.setattr(additions, "edits_of", lambda vocab_size: {"no digits": None})
    monkeypatch.setattr(additions, "TARGET_VOCAB_SIZE", V)
    monkeypatch.setattr(additions, "PROMPT", 20)
    monkeypatch.setattr(additions, "OUTPUT", 10)
    monkeypatch.setattr(additions, "ROWS", {"cpu": [8]})
    monkeypatch.setattr(additions, "EDITS", {"mask": Addition(is_masked=True), "consumed": Addition(consumes=True)})
    monkeypatch.setattr(additions, "LOGPROBS", {"raw": Addition(logprobs=Logprobs(rank=True))})
    with stages_stay_eager():
        yield


@pytest.mark.parametrize(("option", "names"), [("--edits", ["mask", "consumed", *CUSTOM]), ("--logprobs", ["raw"])])
def test_the_tool_stores_a_cell_for_each_addition_beside_the_step_without(option, names, tmp_path, capsys):
    path = tmp_path / "cells.json"
    bench.main(f"{option} --device cpu --cases greedy --json {path}".split())
    cells = [AdditionCell(**each) for each in json.loads(path.read_text())["table"]]
    assert [each.addition for each in cells] == ["nothing", *names]
    assert cells[0].us > 0  # others are differences of times, which a busy machine moves
    assert cells[0].over_us == 0
    assert names[-1] in capsys.readouterr().out


def test_each_step_that_consumes_gets_its_logits_as_they_were(monkeypatch):
    seen = []
    right = additions.Sampler.sample

    def noted(sampler, plan, logits, *args, **options):
        if options.get("consume_logits"):
            seen.append(logits.clone())
        return right(sampler, plan, logits, *args, **options)

    monkeypatch.setattr(additions.Sampler, "sample", noted)
    consumed = {"consumed": Addition({"frequency_penalty": 1.0}, consumes=True)}
    list(additions.measure(consumed, [8], ["greedy"], "cpu", torch.float32))
    originals = additions.rotated_logits(8, V, torch.device("cpu"), torch.float32)
    assert len(seen) > 2 * len(originals)
    assert all(torch.equal(each, originals[n % len(originals)]) for n, each in enumerate(seen))


def test_what_consumes_is_compared_with_a_step_that_copies_too(monkeypatch):
    us = {"nothing": 10.0, "nothing but copies": 15.0, "mask": 12.0, "consumed": 18.0}
    monkeypatch.setattr(additions, "_step_us", lambda name, *_: us[name])
    cells = additions.measure(additions.EDITS, [8], ["greedy"], "cpu", torch.float32)
    assert [(each.us, each.over_us) for each in cells] == [(10.0, 0.0), (12.0, 2.0), (13.0, 3.0)]


@pytest.mark.parametrize(
    ("field", "name"),
    [("token", "nothing"), ("rank", "raw"), ("consumed", "nothing but copies"), ("token", "guidance, edit")],
)
def test_wrong_tokens_and_wrong_logprobs_end_the_run(field, name, monkeypatch):
    right = additions.Sampler.sample

    def wrong(sampler, *args, **options):
        made = right(sampler, *args, **options)
        is_wrong = {"token": True, "rank": made.logprobs, "consumed": options.get("consume_logits")}[field]
        if sampler.backend == "compiled" and is_wrong:
            (made.logprobs.rank if field == "rank" else made.token_ids).add_(1)
        return made

    def timed():
        if name == "guidance, edit":
            return custom_edits.custom_us("guidance", "greedy", 9, torch.device("cpu"), torch.float32, V)
        return additions.measure({**additions.EDITS, **additions.LOGPROBS}, [8], ["greedy"], "cpu", torch.float32)

    monkeypatch.setattr(additions.Sampler, "sample", wrong)
    with pytest.raises(WrongAnswer, match=name):
        list(timed())


@pytest.mark.parametrize("name", custom_edits.edits_of(1))
def test_each_edit_of_a_user_is_timed_in_the_sampler_and_before_it(name):
    found = custom_edits.custom_us(name, "greedy", 9, torch.device("cpu"), torch.float32, V)
    assert {*found} == {"plain", "edit", "before"}
    assert min(found.values()) > 0.0
