"""The host's part of a step: calls that take turns, the table, and on a GPU what a step asks of the driver."""

import itertools
import json

import pytest
import torch

from compiled_sampler import Sampler
from tools.bench import __main__ as bench
from tools.bench import host, python_alone
from tools.bench.host import ALONE, COPY, IN_STEP, LAUNCH, ROUND, asked_of_the_driver, bare_calls, in_turns
from tools.bench.host_steps import bound_to, num_slots, sampled_steps

ASKED = {
    "kept plan, out=": {"graphs": 1, "launches": 0, "copies": 0, "allocations": 0},
    "kept plan": {"graphs": 1, "launches": 1, "copies": 0, "allocations": 2},
    "another batch": {"graphs": 1, "launches": 0, "copies": 1, "allocations": 0},
    "one request leaves, another comes": {"graphs": 1, "launches": 0, "copies": 1, "allocations": 0},
}
"""What a step of bound tensors asks for: a copy of what the host wrote, and a copy of new results."""
BARE_US = {(COPY, ALONE): 1, (LAUNCH, ALONE): 2, (COPY, IN_STEP): 5, (LAUNCH, IN_STEP): 7}
VERIFIED = "verify, new ragged plan", "verify, other drafts of a plan", "3 drafts, verify, kept plan"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("step", ASKED)
def test_a_step_asks_the_driver_for_no_more_than_it_must(step):
    logits = torch.randn(8, 3000, device="cuda")
    sampler = Sampler(3000, num_slots(8), "cuda", buckets=[8])
    bound = bound_to(sampler, logits)
    sampler.warmup(modes=["full"])
    with sampled_steps(sampler, bound, 8) as steps:
        call = steps[step, "mixed modes"]
        for _ in range(5):
            call()
        found = asked_of_the_driver(call)
    assert {kind: found[kind] for kind in ASKED[step]} == ASKED[step]
    assert found["waits"] < 0.5  # the profiler itself waits once or twice in all


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_the_bare_calls_of_the_floor_are_one_copy_and_one_launch():
    for (call, _), bare in bare_calls(torch.device("cuda", 0)).items():
        bare()
        found = asked_of_the_driver(bare)
        assert (found["copies"], found["graphs"], found["launches"]) == ((1, 0, 0) if call == COPY else (0, 1, 0))


def test_python_between_bare_calls_does_not_count_and_takes_about_as_long_as_told():
    work = host.python_work(200)
    us = sorted(host.timed(work)() / 1e3 for _ in range(50))
    assert 100 < us[5] < 400
    assert sorted(host.after(work, lambda: None)() / 1e3 for _ in range(50))[5] < 20


def test_all_steps_of_a_size_are_stored_beside_a_floor_that_took_turns_with_them(monkeypatch, tmp_path):
    def of_the_cpu(vocab_size, slots, device, **options):
        return python_alone.replaying_nothing(Sampler(vocab_size, slots, device, backend="eager", **options))

    steps_by_size, cpu = host.steps_by_size, torch.device("cpu")
    bare = {(call, where): lambda us=us: 1000 * us for (call, where), us in BARE_US.items()}
    replaced = {
        "Sampler": of_the_cpu,
        "steps_by_size": lambda batches, verified, vocab_size, _: steps_by_size(batches, verified, vocab_size, cpu),
        "bare_calls": lambda device: bare,
        "asked_of_the_driver": lambda step: dict.fromkeys((*host._ASKED, "allocations"), 0.0),
        "floors_us": lambda device, seconds: {"copy": 1.0},
        "environment": lambda device: {"device": "none"},
        "_SECONDS": 0.0,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(host, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    host.run([2], [2, 3], 500, str(tmp_path / "host.json"))
    stored = json.loads((tmp_path / "host.json").read_text())
    assert stored["floors"] == {"copy": 1.0}
    names = {rows: {cell["step"] for cell in stored["table"] if cell["rows"] == rows} for rows in (2, 3)}
    assert names[2] == {*ASKED, *VERIFIED, COPY, LAUNCH, "torch, softmax + multinomial"}
    assert names[3] == {*VERIFIED, COPY, LAUNCH}
    assert all((each["floor_us"], each["floor_in_step_us"]) == (3.0, 12.0) for each in stored["table"])
    assert all(0.0 < each["low_us"] <= each["us"] for each in stored["table"])


def test_on_a_cpu_most_steps_replay_a_variant_in_place(monkeypatch, capsys):
    monkeypatch.setattr(python_alone, "_SECONDS", 0.0)
    made, coverage = python_alone.replaying_nothing, []

    def noted(sampler):
        coverage.append(sampler)
        return made(sampler)

    monkeypatch.setattr(python_alone, "replaying_nothing", noted)
    bench.main(["--host", "--device", "cpu", "--rows", "2", "--requests", "3"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*ASKED, *VERIFIED, "B=2", "B=3"))
    for sampler in coverage:
        served = sampler.statistics()
        assert served.direct_runs == 0
        in_place = sum(count for name, count in served.coverage.items() if name.endswith("out"))
        assert in_place > 0.3 * served.replays, served.coverage


def test_every_call_has_one_round_a_turn_after_a_wait_in_orders_that_differ(monkeypatch):
    monkeypatch.setattr("tools.bench.host.time.monotonic", itertools.count().__next__)
    made = []

    def named(name, us):
        return lambda: made.append(name) or 1000 * us

    calls = {"a": named("a", 1), "b": named("b", 2), "c": named("c", 3)}
    found = in_turns(calls, 20.0, lambda: made.append("wait"))
    assert found == {"a": [1.0] * 20, "b": [2.0] * 20, "c": [3.0] * 20}
    rounds = [made[i : i + ROUND + 1] for i in range(0, len(made), ROUND + 1)]
    assert all(each[0] == "wait" and len({*each[1:]}) == 1 for each in rounds)
    turns = ["".join(each[1] for each in rounds[i : i + 3]) for i in range(0, len(rounds), 3)]
    assert len(turns) == 21  # the first does not count
    assert {"".join(sorted(turn)) for turn in turns} == {"abc"}
    assert len({*turns}) > 3


def test_a_slow_call_of_a_round_does_not_move_its_median_and_the_low_quantile_is_of_the_fastest_tenth():
    times = itertools.cycle([1000] * (ROUND - 1) + [10**9])
    assert in_turns({"a": times.__next__}, 0.0, lambda: None) == {"a": [1.0]}
    assert host.low_of([float(n) for n in range(100, 0, -1)]) == 11.0
    assert host.low_of([3.0]) == 3.0
