"""Every mistake at the boundary is named with its value and the way out, and leaves the sampler as it was."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_map_only

from compiled_sampler import SampleOutputs, Sampler, SamplingParams, Verification, VerifyOutputs
from compiled_sampler.batch import tensors_of
from compiled_sampler.engine.boundary.tensors import overlap, span
from compiled_sampler.modes import CACHE, MAX_VOCAB_SIZE, PROCESSED, PROPOSALS
from tests.builders.sampler import REQUESTS, emptied, holding, new_outputs, normal_rows, planned, same, sampler_with
from tests.torch_states import default_dtype

V, R, K = 8, 3, 2
NESTED = torch.nested.nested_tensor([torch.zeros(V)] * R, layout=torch.jagged)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """A sampler with one request, eager or replaying, a plan of three rows, and what it draws, also after the test."""
    sampler = Sampler(V, 4, backend="eager", buckets=[R])
    holding(sampler, getattr(request, "param", "eager"), [REQUESTS["full"]])
    call = sampler.plan([0] * R), normal_rows(R, V), torch.arange(R)
    wanted, out = sampler.sample(*call), sampler.sample(*call, new_outputs(R))
    yield SimpleNamespace(sampler=sampler, plan=call[0], logits=call[1], positions=call[2], wanted=wanted, out=out)
    assert same(sampler.sample(*call), wanted)
    assert same(sampler.sample(*call, out), wanted)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"vocab_size": 0}, ValueError, "vocab_size must be >= 1, got 0; count the tokens"),
        ({"vocab_size": MAX_VOCAB_SIZE + 1}, ValueError, f"must be <= {MAX_VOCAB_SIZE}, got 4194304; the mass"),
        ({"vocab_size": True}, TypeError, "vocab_size must be an int, got True; pass a Python int"),
        ({"logits_dtype": torch.float64}, ValueError, "got torch.float64; convert the logits"),
        ({"device": "tpu"}, ValueError, "device must be one of ('cpu', 'cuda'), got 'tpu'; move the logits there"),
        ({"device": "meta"}, ValueError, "device must be one of ('cpu', 'cuda'), got meta; move the logits there"),
        ({"device": "cuda:99"}, ValueError, "device must be one that torch finds here, got cuda:99 of "),
        ({"device": 0}, TypeError, "device must be a str or a torch.device, got 0; 'cuda:0' is one by its index"),
        ({"probabilities": "no"}, TypeError, "probabilities must be a bool, got 'no'; True lets warmup() prepare"),
        ({"default_generator": 3}, TypeError, "default_generator must be a torch.Generator, got int; torch."),
        ({"buckets": 5}, TypeError, "buckets must be one or more integers >= 1, got 5; for example"),
        ({"backend": "jit"}, ValueError, "got 'jit'; 'auto' suits every device"),
        ({"top_p_base": "row"}, ValueError, "got 'row'; 'top_k' is what most engines do"),
        ({"buckets": (4, 0)}, ValueError, "got [4, 0]; for example"),
        ({"verifications": ["match"]}, TypeError, "verifications must be a list of Verification, got 'match'"),
        ({"verifications": Verification()}, TypeError, "verifications must be a list of Verification, got Verif"),
    ],
)
def test_a_sampler_of_wrong_arguments_is_refused(arguments, error, words):
    with pytest.raises(error, match=re.escape(words)):
        Sampler(**{"vocab_size": V, "max_num_requests": 4} | arguments)


def test_a_generator_of_another_device_is_refused():
    class OnCuda(torch.Generator):
        device = torch.device("cuda", 0)

    with pytest.raises(ValueError, match="must be of the CPU, where seeds are drawn, got one of cuda:0; torch"):
        Sampler(V, 4, backend="eager", default_generator=OnCuda())


def test_cuda_is_refused_where_torch_finds_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"got cuda of 0 CUDA devices; device='cpu' needs none"):
        Sampler(V, 4, device="cuda")


def test_the_largest_vocabulary_and_sizes_of_numpy_are_taken():
    assert Sampler(MAX_VOCAB_SIZE, 1, backend="eager").vocab_size == MAX_VOCAB_SIZE
    sampler = Sampler(np.int64(V), np.int32(4), backend="eager", buckets=np.array([1, 4]))
    assert type(sampler.vocab_size) is int
    assert sampler.plan([sampler.add_request(REQUESTS["full"])]).slots == (0,)
    assert type(Verification("block", np.int64(3)).width) is int


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"modes": ["full", "top_k_top_p"]}, ValueError, r"modes must be .*of .*greedy.*, .*no_filter"),
        ({"modes": [["full"]]}, ValueError, r"modes must be .*of .*greedy.*, .*no_filter"),
        ({"modes": "full"}, ValueError, r"modes must be .*of .*greedy.*, .*no_filter"),
        ({"modes": iter(["full"])}, TypeError, "modes must be a list of some of greedy, .*; None prepares all"),
        ({"progress": 5}, TypeError, r"progress must be callable, got 5; progress\(done, total, label\), or None"),
    ],
)
def test_a_wrong_warmup_is_refused(engine, arguments, error, words):
    with pytest.raises(error, match=words):
        engine.sampler.warmup(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("strict",), "rule must be one of ('match', 'rejection', 'block'), got 'strict'; it is called 'match' here"),
        (("match", np.True_), "width must be an int in [1, 64], got np.True_"),
        (("match", 0), "width must be an int in [1, 64], got 0; it counts drafts"),
        (("match", 65), "width must be an int in [1, 64], got 65"),
        (("block", 2, "probs"), f"drafts must be one of {(*PROPOSALS, CACHE, PROCESSED)}, got 'probs'"),
        (("match", 2, "logits"), "rule 'match' never looks at what drafts were drawn from, got drafts='logits'"),
    ],
)
def test_a_wrong_verification_is_refused(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Verification(*arguments)


# Tensors of a call.


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("logits", torch.Tensor.tolist, TypeError, "must be a torch.Tensor, got list; torch.as_tensor converts"),
        ("logits", torch.Tensor.bfloat16, TypeError, "got torch.bfloat16; convert with .to(torch.float32)"),
        ("logits", lambda x: x.to("meta"), ValueError, "logits must be on cpu, got meta; move it there"),
        ("logits", lambda x: x[[0, 1, 2, 2]], ValueError, "must be [3, >= 8], got [4, 8]; slice the rows of the plan"),
        ("logits", lambda x: x[:, :-1], ValueError, "must be [3, >= 8], got [3, 7]; slice the rows of the plan"),
        ("logits", lambda x: x[0], ValueError, "must be [3, >= 8], got [8]; slice the rows of the plan"),
        ("logits", lambda x: x.view(V, R).T, ValueError, "column stride 1, got strides (1, 3); call .contiguous()"),
        ("logits", torch._neg_view, ValueError, "with the negative bit; call .resolve_neg()"),
        ("logits", torch.Tensor.to_sparse, TypeError, "dense tensor, got torch.sparse_coo; call .to_dense()"),
        ("logits", lambda x: NESTED, TypeError, "dense tensor, got a nested one; call .to_padded_tensor(padding)"),
        ("positions", lambda x: [0, 1, 2], TypeError, "positions must be a torch.Tensor, got list; torch.as_tensor"),
        ("positions", torch._neg_view, ValueError, "must hold its numbers, got a view with the neg"),
        ("positions", lambda x: x.view(torch.int16)[:R], TypeError, "got torch.int16; convert with .to(torch.int64)"),
        ("positions", lambda x: x[:2], ValueError, "positions must be [3], one a slot of the plan, got [2]"),
        ("out", tuple, TypeError, "out must be SampleOutputs, got tuple; SampleOutputs(token_ids, "),
        ("out", lambda x: x._replace(token_ids=[0] * R), TypeError, "out.token_ids must be a torch.Tensor, got list"),
        ("out", lambda x: x._replace(status=torch.zeros(R)), TypeError, "out.status must be torch.int32, got torch."),
        ("out", lambda x: x._replace(token_ids=x.token_ids.view(torch.int16)[:R]), TypeError, "got torch.int16"),
        ("out", lambda x: new_outputs(R + 1), ValueError, "out.token_ids must be [3], as the plan has it, got [4]"),
        ("out", lambda x: x._replace(status=x.status[:2]), ValueError, "out.status must be [3], as the plan has"),
        ("out", lambda x: new_outputs(R, "meta"), ValueError, "out.token_ids must be on cpu, got meta; move it there"),
    ],
)
@pytest.mark.parametrize("engine", ["eager", "graph"], indirect=True)
def test_wrong_tensors_are_refused_and_out_is_left_alone(engine, name, change, error, words):
    """In the memory of a right call, which is known and runs without a check."""
    for out in (engine.out, None) if name != "out" else (engine.out, engine.out):
        right = {"logits": engine.logits, "positions": engine.positions, "out": out}
        with pytest.raises(error, match=re.escape(words)):
            engine.sampler.sample(engine.plan, **right | {name: change(right[name])})
        assert same(engine.out, engine.wanted)


def test_an_empty_plan_still_checks_its_tensors(engine):
    plan = engine.sampler.plan([])
    with pytest.raises(ValueError, match=r"logits must be \[0, >= 8\], got \[3, 8\]"):
        engine.sampler.sample(plan, engine.logits, engine.positions[:0])


def test_a_sampler_is_made_plans_and_draws_under_any_default_device_and_dtype(engine):
    ragged, inputs = engine.sampler.plan([0, 0], num_drafts=[0, 1]), (normal_rows(3, V), torch.tensor([[-1], [4]]))
    with torch.device("meta"), default_dtype(torch.float64):
        sampler = sampler_with([REQUESTS["full"]], V, 4)
        plan = sampler.plan([0] * R)
        drawn = sampler.sample(plan, engine.logits, engine.positions)
        empty = sampler.probs(sampler.plan([]), engine.logits[:0])
        drafted = sampler.plan([0, 0], num_drafts=[0, 1])
    assert same(drawn, engine.wanted)
    assert (empty.dtype, empty.device.type, empty.shape) == (torch.float32, "cpu", (0, V))
    assert {each.device.type for each in (drafted.slot_ids, drafted.draft_counts, drafted.drafted)} == {"cpu"}
    wanted = engine.sampler.verify(ragged, *inputs, torch.arange(2))
    assert same(sampler.verify(drafted, *inputs, torch.arange(2)), wanted)


# Results of the caller.


@pytest.fixture
def calls(engine) -> dict[type, Callable[..., Any]]:
    """A call of each kind, by what it returns; each takes ``out``."""
    sampler, positions = engine.sampler, engine.positions
    plan, drafts, logits = sampler.plan([0] * R, num_drafts=[1] * R), torch.zeros(R, 1).long(), torch.zeros(2 * R, V)
    return {
        SampleOutputs: lambda out=None: sampler.sample(engine.plan, logits[:R], positions, out),
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
    out = torch.full((2 * R, V), -7.0, requires_grad=True)
    words = "out.probabilities must not require grad while torch records gradients, got requires_grad=True; pass its"
    for refused in (out, out * 1.0):
        with pytest.raises(ValueError, match=words):
            calls[torch.Tensor](refused)
        assert (refused == -7.0).all()
    assert torch.equal(calls[torch.Tensor](out.detach()), calls[torch.Tensor]())
    with torch.no_grad():
        assert calls[torch.Tensor](out) is out


def test_finished_is_a_result_of_batches_with_edits_alone(calls):
    sampler, plan = planned(SamplingParams(seed=1, stop_token_ids=[2]), vocab_size=V)
    call, out, finished = (plan, torch.zeros(1, V), torch.zeros(1).long()), new_outputs(1), torch.empty(R).bool()
    with pytest.raises(TypeError, match=r"^out\.finished must be a torch\.Tensor in a batch with edits, got None; "):
        sampler.sample(*call, out)
    assert same(sampler.sample(*call, out._replace(finished=finished[:1])), sampler.sample(*call))
    with pytest.raises(ValueError, match=r"^out\.finished must be None in a batch without edits, got a tensor; "):
        calls[SampleOutputs](new_outputs(R)._replace(finished=finished))


@pytest.mark.parametrize("kind", [SampleOutputs, VerifyOutputs])
def test_results_of_an_uncaptured_step_are_copied_in_one_launch(calls, kind):
    wanted = calls[kind]()
    out = emptied(wanted)
    with mock.patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as together:
        calls[kind](out)
    assert [len(call.args[0]) for call in together.call_args_list] == [len(tensors_of(out))]
    assert same(out, wanted)


# Memory that fields share.


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
