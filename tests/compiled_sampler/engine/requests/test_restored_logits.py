"""Logits that edits write and the step restores: the results are those of a copy, and the logits keep every bit."""

import random
from contextlib import contextmanager, nullcontext
from itertools import count
from unittest import mock

import pytest
import torch

from compiled_sampler import Logprobs, Sampler, Verification
from compiled_sampler.core.stage import Run, call
from compiled_sampler.edits.changes import take_back
from compiled_sampler.modes import RULES
from tests.builders.edits import (
    BOUNDED_EDITS,
    OF_EDIT,
    Request,
    V,
    edited_sampler,
    hard_logits,
    random_mask,
    random_request,
)
from tests.builders.filters import same_bits
from tests.builders.logprobs import EVERYTHING, bare, differing
from tests.builders.sampler import nothing_compiles, only_replays, recorded, same, stages_stay_eager
from tests.chunked import chunks_of

RESTORE = {"consume_logits": "restore"}
LISTS = ("logit_bias", "min_tokens", "penalties", "dry", "bad_words")
"""The edits that write a few tokens of each row."""
ROWS = 6


def requests_of(seed: int, edits=BOUNDED_EDITS, rows: int = ROWS) -> list[Request]:
    """Random requests, of which the first has every list of tokens."""
    source = random.Random(seed)
    found = [random_request(source, V, edits) for _ in range(rows)]
    while not {*LISTS} <= {*found[0].params.edits}:
        found[0] = random_request(source, V, edits)
    return found


def calls_of(sampler: Sampler, requests: list[Request], seed: int):
    """By name, a call of the sampler for these requests and the logits that it reads."""
    source = random.Random(seed)
    slots, positions = [each.added(sampler) for each in requests], torch.tensor([each.position for each in requests])
    rows, plan, drafted = len(slots), sampler.plan(slots), sampler.plan(slots, num_drafts=[1] * len(slots))
    drafts = torch.randint(V, (rows, 1), generator=torch.Generator().manual_seed(seed))
    calls = {"sample": (lambda x, **options: sampler.sample(plan, x, positions, **options), hard_logits(source, rows))}
    for rule in RULES:
        calls[rule] = (
            lambda x, rule=rule, **options: sampler.verify(drafted, x, drafts, positions, rule, **options),
            hard_logits(source, 2 * rows),
        )
    return calls


@pytest.mark.parametrize("is_masked", [False, True], ids=["bare", "masked"])
@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_steps_leave_the_logits_as_they_found_them(backend, is_masked):
    """Twice on one tensor, part of wider rows, and in chunks; the definition edits a copy. Consumed, it is written."""
    for seed in range(4 if backend == "eager" else 1):
        sampler = edited_sampler(backend, ROWS)
        for name, (step, logits) in calls_of(sampler, requests_of(seed), seed).items():
            mask = random_mask(random.Random(seed), len(logits), V) if is_masked else None
            wide = torch.randn(len(logits), V + 7)
            wide[:, :V] = logits
            before, wanted = wide.clone(), step(logits.clone(), token_bitmask=mask)
            for in_chunks in (False, False, True):
                with chunks_of(2) if in_chunks else nullcontext():
                    assert same(step(wide, token_bitmask=mask, **RESTORE), wanted), name
                assert same_bits(wide, before), name
            assert same(step(wide, token_bitmask=mask, consume_logits=True), wanted), name
            assert same_bits(wide, before) == (backend == "reference")
            assert same_bits(wide[:, V:], before[:, V:])


@pytest.mark.parametrize("asked", EVERYTHING, ids=[each.of for each in EVERYTHING])
def test_logprobs_are_those_of_a_copy(asked):
    """Of the law "raw" too, which is read when the logits have their bits again."""
    sampler = edited_sampler("eager", ROWS)
    for name, (step, logits) in calls_of(sampler, requests_of(7, LISTS), 7).items():
        wanted, restored = step(logits.clone(), logprobs=asked), logits.clone()
        for given, leave in ((logits.clone(), True), (restored, "restore")):
            found = step(given, logprobs=asked, consume_logits=leave)
            assert same(bare(found), bare(wanted)), name
            assert differing(found.logprobs, wanted.logprobs) == [], name
        assert same_bits(restored, logits), name


@contextmanager
def failing(sampler: Sampler, number: int):
    """Within, the stage with this number fails; what takes an edit back runs."""
    left = iter([*[False] * number, True])

    def run(stage, *tensors, **static):
        if stage is not take_back and next(left, False):
            raise InterruptedError
        return call(stage, *tensors, **static)

    with mock.patch.object(sampler._runner._executor, "_run", Run(run)):
        yield


def test_a_step_that_fails_restores_the_logits_and_the_sampler_goes_on():
    """At each of its stages, those that write lists too."""
    sampler = edited_sampler("eager", ROWS)
    for name, (step, logits) in calls_of(sampler, requests_of(5, LISTS), 5).items():
        wanted, restored = step(logits.clone()), logits.clone()
        for number in count():
            try:
                with failing(sampler, number):
                    found = step(restored, **RESTORE)
            except InterruptedError:
                assert same_bits(restored, logits), (name, number)
            else:
                break
        assert number > 5
        assert same(found, wanted), name


def test_compiled_steps_restore_the_logits():
    """A warm-up prepares what they need."""
    edits = ("restore_logits", "logit_bias", "min_tokens", "penalties", "stops")
    sampler, eager = edited_sampler("compiled", ROWS, captured_edits=[edits]), edited_sampler("eager", ROWS)
    with stages_stay_eager():
        sampler.warmup(modes=["full"])
    requests = [random_request(random.Random(n), V, edits[1:]) for n in range(ROWS)]
    (step, logits), (wanted, _) = (calls_of(each, requests, 2)["sample"] for each in (sampler, eager))
    restored = logits.clone()
    with nothing_compiles():
        assert same(step(restored, **RESTORE), wanted(logits.clone()))
    assert same_bits(restored, logits)


def test_a_captured_step_serves_calls_with_the_same_leave_alone():
    edits = ("logit_bias", "penalties")
    leaves = [("consume_logits", *edits), ("restore_logits", *edits), edits]
    sampler = recorded(edited_sampler("eager", ROWS, captured_edits=leaves))
    requests = requests_of(1, LISTS)
    requests = [each._replace(given={**OF_EDIT["logit_bias"], **OF_EDIT["penalties"], "seed": 1}) for each in requests]
    step, logits = calls_of(sampler, requests, 1)["sample"]
    results = []
    for leave in (True, "restore", False):
        given = logits.clone()
        with only_replays(sampler, 1):
            results.append(step(given, consume_logits=leave))
        assert same_bits(given, logits), leave  # a copy of them was written
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.parametrize(
    "edits", [("restore_logits",), ("restore_logits", "stops"), ("restore_logits", "consume_logits", "logit_bias")]
)
def test_leave_is_captured_beside_lists_and_alone(edits):
    with pytest.raises(ValueError, match="captured_edits must have 'consume_logits' or 'restore_logits' beside lists"):
        edited_sampler("eager", 1, captured_edits=[edits])


@pytest.mark.parametrize("leave", ["consume_logits", "restore_logits"])
def test_steps_with_logprobs_are_captured_as_calls_ask_for_them(leave):
    """Where leave is of no use to a call, the step without it is captured."""
    made = {"captured_edits": [(leave, "logit_bias")], "captured_logprobs": [Logprobs(), Logprobs(of="processed")]}
    ways = [Verification("match", 1), Verification("rejection", 1)]
    sampler = recorded(edited_sampler("eager", 2, buckets=[2], verifications=ways, **made))
    requests = [Request({**OF_EDIT["logit_bias"], "seed": n}, [], []) for n in range(2)]
    given = {"consume_logits": True if leave == "consume_logits" else "restore"}
    for name, (step, logits) in calls_of(sampler, requests, 1).items():
        for asked in (Logprobs(), Logprobs(of="processed")) if name != "block" else ():
            with only_replays(sampler, 1):
                step(logits.clone(), logprobs=asked, **given)
