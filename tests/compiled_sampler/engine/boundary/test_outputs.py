"""Results of a caller that cannot be written, or share memory, are refused before anything runs, and stay."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_map_only

from compiled_sampler import SampleOutputs, Sampler, SamplingParams, VerifyOutputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.engine.boundary.tensors import overlap, span
from tests.builders.sampler import REQUESTS, emptied, new_outputs, same

V, N, R, K = 20, 3, 3, 2


@pytest.fixture
def calls() -> dict[type, Callable[..., Any]]:
    """A call of each kind, by what it returns; each takes ``out``."""
    sampler = Sampler(V, N, backend="eager")
    slots = [sampler.add_request(SamplingParams(seed=seed)) for seed in range(N)]
    plain, plan = sampler.plan(slots), sampler.plan(slots, num_drafts=[1] * N)
    logits, positions = torch.zeros(2 * N, V), torch.arange(N)
    drafts = torch.zeros(N, 1, dtype=torch.int64)
    return {
        SampleOutputs: lambda out=None: sampler.sample(plain, logits[:N], positions, out),
        VerifyOutputs: lambda out=None: sampler.verify(plan, logits, drafts, positions, out=out),
        torch.Tensor: lambda out=None: sampler.probs(plan, logits, out),
    }


@pytest.mark.parametrize("kind", [SampleOutputs, VerifyOutputs, torch.Tensor])
def test_an_inference_mode_tensor_is_written_in_inference_mode_alone(calls, kind):
    wanted = calls[kind]()
    with torch.inference_mode():
        out = emptied(wanted)
        calls[kind](out)
    before = tree_map_only(torch.Tensor, torch.clone, out)
    with pytest.raises(ValueError, match=r"out\.\w+ must be a normal tensor outside of inference mode, got one made"):
        calls[kind](out)
    with torch.inference_mode():
        assert calls[kind](out) is out
    for found in (out, before):
        assert torch.equal(found, wanted) if kind is torch.Tensor else same(found, wanted)


def test_a_tensor_that_requires_grad_is_written_where_no_gradient_is_recorded(calls):
    out = torch.full((2 * N, V), -7.0, requires_grad=True)
    words = "out.probabilities must not require grad while torch records gradients, got requires_grad=True; pass its"
    for refused in (out, out * 1.0):
        with pytest.raises(ValueError, match=r"must not require grad") as caught:
            calls[torch.Tensor](refused)
        assert words in str(caught.value)
        assert (refused == -7.0).all()
    assert torch.equal(calls[torch.Tensor](out.detach()), calls[torch.Tensor]())
    with torch.no_grad():
        assert calls[torch.Tensor](out) is out


def test_results_without_finished_are_refused_in_a_batch_with_edits():
    sampler = Sampler(V, N, backend="eager")
    plan = sampler.plan([sampler.add_request(SamplingParams(seed=1, stop_token_ids=[2]))])
    logits, positions = torch.zeros(1, V), torch.zeros(1, dtype=torch.int64)
    out = SampleOutputs(torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"^out\.finished must be a torch\.Tensor in a batch with edits, got None; "):
        sampler.sample(plan, logits, positions, out)
    full = out._replace(finished=torch.empty(1, dtype=torch.bool))
    assert same(sampler.sample(plan, logits, positions, full), sampler.sample(plan, logits, positions))


def test_finished_is_refused_in_a_batch_without_edits(calls):
    out = calls[SampleOutputs]()._replace(finished=torch.empty(N, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^out\.finished must be None in a batch without edits, got a tensor; "):
        calls[SampleOutputs](out)


@pytest.mark.parametrize("kind", [SampleOutputs, VerifyOutputs])
def test_results_of_an_uncaptured_step_are_copied_in_one_launch(calls, kind):
    wanted = calls[kind]()
    out = emptied(wanted)
    with mock.patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as together:
        calls[kind](out)
    assert [len(call.args[0]) for call in together.call_args_list] == [len(tensors_of(out))]
    assert same(out, wanted)


# Memory that fields share.


@pytest.fixture
def engine() -> Iterator[SimpleNamespace]:
    """A sampler, a batch and what it draws, which a refused call leaves as it is."""
    sampler = Sampler(V, 4, backend="eager")
    plan = sampler.plan([sampler.add_request(REQUESTS["full"])] * R)
    logits, positions = torch.randn(R, V, generator=torch.Generator().manual_seed(0)), torch.arange(R)
    wanted = sampler.sample(plan, logits, positions)
    yield SimpleNamespace(sampler=sampler, plan=plan, logits=logits, positions=positions, wanted=wanted)
    assert same(sampler.sample(plan, logits, positions), wanted)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda words: words[2 * R - 1 : 3 * R - 1], "must have memory of its own, got that of out.status"),
        (lambda words: words[1 : 2 * R : 2], "must have memory of its own, got that of out.status"),
        (None, "must not repeat its memory, got strides (0,); call .contiguous()"),
    ],
    ids=["the last word", "columns", "itself"],
)
def test_fields_that_share_memory_are_refused_and_left_alone(engine, other, words):
    memory = torch.full((3 * R + 1,), -7, dtype=torch.int32)
    token_ids, status = memory[: 2 * R].view(torch.int64), new_outputs(R).status
    out = SampleOutputs(token_ids, other(memory)) if other else SampleOutputs(token_ids[:1].expand(R), status)
    with pytest.raises(ValueError, match=re.escape(f"out.token_ids {words}")):
        engine.sampler.sample(engine.plan, engine.logits, engine.positions, out)
    assert (memory == -7).all()


def test_results_do_not_overwrite_what_a_call_reads(engine):
    """Refused each time, whether a call with other results is known or not."""
    sampler, plan, verified = engine.sampler, engine.plan, engine.sampler.plan([0] * R, num_drafts=[K] * R)
    logits, positions, words = torch.zeros(R * (K + 1), V), torch.arange(R), torch.arange(2 * R, dtype=torch.int32)
    slots, sums, wide = torch.zeros(R, dtype=torch.int64), torch.arange(K, K * R + 1, K), torch.zeros(R, K + 1).long()
    flat = torch.zeros(R, K + 1, dtype=torch.int32)
    of_slots, of_sums = replace(plan, slot_ids=slots), replace(verified, cumulative_drafts=sums)

    def sample(plan, positions):
        return lambda out=None: sampler.sample(plan, logits[:R], positions, out)

    def verify(plan, drafts):
        return lambda out=None: sampler.verify(plan, logits, drafts, positions, out=out)

    for call, field, memory in (
        (sample(plan, positions), "token_ids", logits.view(torch.int64)[:R, 0]),
        (sample(plan, positions), "token_ids", positions),
        (sample(plan, words[:R]), "token_ids", words[:R]),
        (sample(plan, words[:R]), "token_ids", words[R - 1 : -1]),
        (sample(of_slots, positions), "token_ids", slots),
        (verify(verified, wide[:, :K]), "token_ids", wide),
        (verify(verified, flat.flatten()[: K * R]), "token_ids", flat),
        (verify(verified, wide[:, :K]), "num_accepted", positions),
        (verify(of_sums, wide[:, :K]), "num_emitted", sums),
    ):
        out, before = emptied(call()), memory.clone()
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"out\.{field} must have memory of its own, got that of an input"):
                call(out._replace(**{field: memory}))
            assert torch.equal(memory, before)
            assert call(out) is out
    beside = new_outputs(R)._replace(token_ids=words[R:])
    assert same(sample(plan, words[:R])(beside)._replace(token_ids=words[R:].long()), sample(plan, positions)())
    with pytest.raises(ValueError, match=r"out\.probabilities must have memory of its own, got that of an input"):
        sampler.probs(plan, engine.logits, engine.logits)


def test_an_out_whose_fields_lie_beside_each_other_in_one_buffer_is_taken(engine):
    words = torch.full((R, 6), -7, dtype=torch.int32)
    half = torch.full((4 * R,), -7, dtype=torch.int32)
    for out in (
        SampleOutputs(words.view(torch.int64)[:, 1], words[:, 5]),
        SampleOutputs(half[: 2 * R].view(torch.int64), half[2 * R : 3 * R]),
    ):
        assert same(engine.sampler.sample(engine.plan, engine.logits, engine.positions, out), engine.wanted)


views = st.tuples(st.integers(0, 12), st.integers(0, 4), st.integers(1, 3), st.integers(1, 4))


@given(views, views)
def test_tensors_that_share_an_element_always_overlap(one, other):
    """Views ``[rows, columns]`` of one buffer, at any start and distance of rows; of equal distances exactly these."""
    buffer = torch.zeros(64, dtype=torch.int32)
    cells, spans = [], []
    for start, rows, columns, more in (one, other):
        view = buffer.as_strided((rows, columns), (columns + more, 1), start)
        cells.append({start + row * (columns + more) + column for row in range(rows) for column in range(columns)})
        spans.append(span(view))
    shared = bool(cells[0] & cells[1])
    assert overlap(*spans) >= shared
    assert overlap(*spans) == overlap(*spans[::-1])
    if spans[0].step == spans[1].step:
        assert overlap(*spans) == shared
