"""Every mistake at the boundary is named with its value and the way out, and leaves the sampler as it was."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from compiled_sampler import Sampler, Verification
from compiled_sampler.modes import CACHE, MAX_VOCAB_SIZE, PROCESSED, PROPOSALS
from tests.builders.sampler import REQUESTS, new_outputs, same

V, R = 8, 3
OUT = new_outputs(R)
NESTED = torch.nested.nested_tensor([torch.zeros(V)] * R, layout=torch.jagged)


@pytest.fixture
def sampler() -> Sampler:
    """A sampler with one request."""
    made = Sampler(V, 4, backend="eager")
    made.add_request(REQUESTS["full"])
    return made


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"vocab_size": 0}, ValueError, "vocab_size must be >= 1, got 0; count the tokens"),
        (
            {"vocab_size": MAX_VOCAB_SIZE + 1},
            ValueError,
            f"vocab_size must be <= {MAX_VOCAB_SIZE}, got 4194304; the mass",
        ),
        ({"vocab_size": True}, TypeError, "vocab_size must be an int, got True; pass a Python int"),
        ({"logits_dtype": torch.float64}, ValueError, "got torch.float64; convert the logits"),
        ({"vocab_size": np.True_}, TypeError, "vocab_size must be an int, got np.True_; pass a Python int"),
        ({"device": "tpu"}, ValueError, "device must be one of ('cpu', 'cuda'), got 'tpu'; move the logits there"),
        ({"device": "meta"}, ValueError, "device must be one of ('cpu', 'cuda'), got meta; move the logits there"),
        ({"device": "cuda:99"}, ValueError, "device must be one that torch finds here, got cuda:99 of "),
        ({"device": 0}, TypeError, "device must be a str or a torch.device, got 0; 'cuda:0' is one by its index"),
        ({"probabilities": "no"}, TypeError, "probabilities must be a bool, got 'no'; True lets warmup() prepare"),
        (
            {"default_generator": 3},
            TypeError,
            "default_generator must be a torch.Generator, got int; torch.",
        ),
        ({"buckets": 5}, TypeError, "buckets must be one or more integers >= 1, got 5; for example"),
        ({"backend": "jit"}, ValueError, "got 'jit'; 'auto' suits every device"),
        ({"top_p_base": "row"}, ValueError, "got 'row'; 'top_k' is what most engines do"),
        ({"buckets": (4, 0)}, ValueError, "got [4, 0]; for example"),
    ],
)
def test_a_sampler_of_wrong_arguments_is_refused(arguments, error, words):
    with pytest.raises(error) as caught:
        Sampler(**{"vocab_size": V, "max_num_requests": 4} | arguments)
    assert words in str(caught.value)


def test_a_generator_of_another_device_is_refused():
    class OnCuda(torch.Generator):
        device = torch.device("cuda", 0)

    words = (
        r"default_generator must be of the CPU, where seeds are drawn, got one of cuda:0; torch.default_generator is"
    )
    with pytest.raises(ValueError, match=words):
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
def test_a_wrong_warmup_is_refused(sampler, arguments, error, words):
    with pytest.raises(error, match=words):
        sampler.warmup(**arguments)
    assert sampler.sample(sampler.plan([0]), torch.zeros(1, V), torch.zeros(1).long()).token_ids.shape == (1,)


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
    with pytest.raises(ValueError, match=r"must be|never") as caught:
        Verification(*arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("verifications", [["match"], Verification(), [("match", 2, "one_hot")]])
def test_only_verifications_are_prepared(verifications):
    with pytest.raises(TypeError, match="verifications"):
        Sampler(V, 4, backend="eager", verifications=verifications)


def test_a_width_of_numpy_is_stored_as_an_int():
    assert Verification("block", np.int64(3)) == Verification("block", 3)
    assert type(Verification("block", np.int64(3)).width) is int


# Tensors of a call.


@pytest.fixture(scope="module")
def engine() -> SimpleNamespace:
    """A sampler with a plan of three rows, their inputs and what they draw."""
    sampler = Sampler(V, 4, backend="eager")
    plan = sampler.plan([sampler.add_request(REQUESTS["full"])] * R)
    logits, positions = torch.randn(R, V, generator=torch.Generator().manual_seed(0)), torch.arange(R)
    wanted = sampler.sample(plan, logits, positions)
    return SimpleNamespace(sampler=sampler, plan=plan, logits=logits, positions=positions, wanted=wanted)


@pytest.mark.parametrize(
    ("name", "given", "error", "words"),
    [
        ("logits", [[0.0] * V] * R, TypeError, "logits must be a torch.Tensor, got list; torch.as_tensor converts"),
        ("logits", torch.zeros(R, V).bfloat16(), TypeError, "got torch.bfloat16; convert with .to(torch.float32)"),
        ("logits", torch.zeros(R, V, device="meta"), ValueError, "logits must be on cpu, got meta; move it there"),
        ("logits", torch.zeros(R + 1, V), ValueError, "must be [3, >= 8], got [4, 8]; slice the rows of the plan"),
        ("logits", torch.zeros(R, V - 1), ValueError, "must be [3, >= 8], got [3, 7]; slice the rows of the plan"),
        ("logits", torch.zeros(V), ValueError, "must be [3, >= 8], got [8]; slice the rows of the plan"),
        (
            "logits",
            torch.zeros(V, R).T,
            ValueError,
            "column stride 1, got strides (1, 3); call .contiguous()",
        ),
        ("logits", torch._neg_view(torch.zeros(R, V)), ValueError, "with the negative bit; call .resolve_neg()"),
        ("logits", torch.zeros(R, V).to_sparse(), TypeError, "dense tensor, got torch.sparse_coo; call .to_dense()"),
        ("logits", NESTED, TypeError, "dense tensor, got a nested one; call .to_padded_tensor(padding)"),
        ("positions", [0, 1, 2], TypeError, "positions must be a torch.Tensor, got list; torch.as_tensor converts"),
        ("positions", torch._neg_view(torch.arange(R)), ValueError, "must hold its numbers, got a view with the neg"),
        (
            "positions",
            torch.arange(R).short(),
            TypeError,
            "or torch.int32, got torch.int16; convert with .to",
        ),
        ("positions", torch.arange(R + 1), ValueError, "positions must be [3], one a slot of the plan, got [4]"),
        ("out", tuple(OUT), TypeError, "out must be SampleOutputs, got tuple; SampleOutputs(token_ids, "),
        ("out", OUT._replace(token_ids=[0] * R), TypeError, "out.token_ids must be a torch.Tensor, got list"),
        ("out", OUT._replace(status=torch.zeros(R)), TypeError, "out.status must be torch.int32, got torch.float32"),
        ("out", new_outputs(R + 1), ValueError, "out.token_ids must be [3], as the plan has it, got [4]"),
        ("out", OUT._replace(status=OUT.status[:2]), ValueError, "out.status must be [3], as the plan has"),
        ("out", new_outputs(R, "meta"), ValueError, "out.token_ids must be on cpu, got meta; move it there"),
    ],
)
def test_wrong_tensors_are_refused_and_out_is_left_alone(engine, name, given, error, words):
    """Afterwards the same call without them works."""
    arguments = {"plan": engine.plan, "logits": engine.logits, "positions": engine.positions}
    with pytest.raises(error) as caught:
        engine.sampler.sample(**arguments | {name: given})
    assert words in str(caught.value)
    fields = [each for each in given if isinstance(each, torch.Tensor) and not each.is_meta] if name == "out" else []
    assert all((each == each.new_full((), 0 if each.is_floating_point() else -7)).all() for each in fields)
    assert same(engine.sampler.sample(**arguments), engine.wanted)


def test_an_empty_plan_still_checks_its_tensors(engine):
    plan = engine.sampler.plan([])
    with pytest.raises(ValueError, match=r"logits must be \[0, >= 8\], got \[3, 8\]"):
        engine.sampler.sample(plan, engine.logits, engine.positions[:0])


@pytest.mark.parametrize(
    ("buffer", "error", "words"),
    [
        (torch.zeros(R, V - 1), ValueError, "logits must be [R, >= 8], got [3, 7]"),
        (torch.zeros(0, V), ValueError, "buffer must have at least one row, got none; bind_logits(None) drops"),
    ],
)
def test_a_wrong_buffer_is_not_bound(engine, buffer, error, words):
    with pytest.raises(error) as caught:
        engine.sampler.bind_logits(buffer)
    assert words in str(caught.value)
    engine.sampler.bind_logits(None)
    assert same(engine.sampler.sample(engine.plan, engine.logits, engine.positions), engine.wanted)


def test_a_sampler_is_made_and_draws_under_any_default_device_and_dtype(engine):
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        sampler = Sampler(V, 4, backend="eager")
        plan = sampler.plan([sampler.add_request(REQUESTS["full"])] * R)
        drawn = sampler.sample(plan, engine.logits, engine.positions)
        empty = sampler.probs(sampler.plan([]), engine.logits[:0])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert same(drawn, engine.wanted)
    assert (empty.dtype, empty.device.type, empty.shape) == (torch.float32, "cpu", (0, V))
