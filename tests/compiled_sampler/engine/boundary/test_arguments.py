"""Every argument of a sampler that is no tensor: mistakes are named with the value and the way out."""

import numpy as np
import pytest
import torch

from compiled_sampler import Sampler, Verification
from compiled_sampler.modes import CACHE, MAX_VOCAB_SIZE, PROCESSED, PROPOSALS
from tests.builders.sampler import REQUESTS

V = 8


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
        ({"vocab_size": -5}, ValueError, "vocab_size must be >= 1, got -5; count the tokens"),
        (
            {"vocab_size": MAX_VOCAB_SIZE + 1},
            ValueError,
            f"vocab_size must be <= {MAX_VOCAB_SIZE}, got 4194304; the mass",
        ),
        ({"vocab_size": 8.0}, TypeError, "vocab_size must be an int, got 8.0; pass a Python int"),
        ({"vocab_size": True}, TypeError, "vocab_size must be an int, got True; pass a Python int"),
        ({"max_num_requests": 0}, ValueError, "max_num_requests must be >= 1, got 0; count"),
        ({"max_num_requests": "4"}, TypeError, "max_num_requests must be an int, got '4'; pass a Python int"),
        ({"logits_dtype": torch.float64}, ValueError, "got torch.float64; convert the logits"),
        ({"logits_dtype": "float32"}, ValueError, "got float32; convert the logits"),
        ({"vocab_size": np.True_}, TypeError, "vocab_size must be an int, got np.True_; pass a Python int"),
        ({"device": "tpu"}, ValueError, "device must be one of ('cpu', 'cuda'), got 'tpu'; move the logits there"),
        ({"device": "cuda:99"}, ValueError, "device must be one that torch finds here, got cuda:99 of "),
        ({"device": 0}, TypeError, "device must be a str or a torch.device, got 0; 'cuda:0' is one by its index"),
        ({"device": True}, TypeError, "device must be a str or a torch.device, got True; 'cpu' or 'cuda'"),
        ({"device": None}, TypeError, "device must be a str or a torch.device, got None; 'cpu' or 'cuda'"),
        ({"probabilities": "no"}, TypeError, "probabilities must be a bool, got 'no'; True lets warmup() prepare"),
        (
            {"default_generator": 3},
            TypeError,
            "default_generator must be a torch.Generator, got int; torch.",
        ),
        ({"buckets": 5}, TypeError, "buckets must be one or more integers >= 1, got 5; for example"),
        ({"device": "meta"}, ValueError, "device must be one of ('cpu', 'cuda'), got meta; move the logits there"),
        ({"backend": "jit"}, ValueError, "got 'jit'; 'auto' suits every device"),
        ({"top_p_base": "row"}, ValueError, "got 'row'; 'top_k' is what most engines do"),
        ({"buckets": ()}, ValueError, "got []; for example"),
        ({"buckets": (4, 0)}, ValueError, "got [4, 0]; for example"),
        ({"buckets": (2.0,)}, ValueError, "got [2.0]; for example"),
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


def test_sizes_of_numpy_are_sizes():
    sampler = Sampler(np.int64(V), np.int32(4), backend="eager", buckets=np.array([1, 4]))
    assert type(sampler.vocab_size) is int
    assert sampler.plan([sampler.add_request(REQUESTS["full"])]).slots == (0,)


def test_a_message_about_a_choice_lists_the_choices():
    for arguments, choices in (
        ({"backend": "jit"}, ("auto", "eager", "compiled", "graph")),
        ({"top_p_base": "row"}, ("top_k", "all")),
        ({"logits_dtype": torch.int8}, ("float32", "bfloat16", "float16")),
    ):
        with pytest.raises(ValueError, match=next(iter(arguments))) as caught:
            Sampler(V, 4, **arguments)
        assert all(choice in str(caught.value) for choice in choices)


def test_the_largest_vocabulary_is_allowed():
    assert Sampler(MAX_VOCAB_SIZE, 1, backend="eager").vocab_size == MAX_VOCAB_SIZE


@pytest.mark.parametrize("modes", ["full", ["fast"], ["full", "top_k_top_p"], [["full"]]])
def test_modes_that_are_none_are_not_warmed_up(sampler, modes):
    with pytest.raises(ValueError, match=r"modes must be .*of .*greedy.*, .*no_filter"):
        sampler.warmup(modes=modes)
    assert sampler.sample(sampler.plan([0]), torch.zeros(1, V), torch.zeros(1).long()).token_ids.shape == (1,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"modes": 5}, "modes must be a list of some of greedy, .* got 5; None prepares all"),
        ({"modes": iter(["full"])}, "modes must be a list of some of greedy, .*; None prepares all"),
        ({"progress": 5}, r"progress must be callable, got 5; progress\(done, total, label\), or None"),
    ],
)
def test_a_warmup_with_something_of_another_type_is_refused(sampler, arguments, words):
    with pytest.raises(TypeError, match=words):
        sampler.warmup(**arguments)
    assert sampler.sample(sampler.plan([0]), torch.zeros(1, V), torch.zeros(1).long()).token_ids.shape == (1,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("greedy",), "rule must be one of ('match', 'rejection', 'block'), got 'greedy'"),
        (("strict",), "rule must be one of ('match', 'rejection', 'block'), got 'strict'; it is called 'match' here"),
        (("match", np.True_), "width must be an int in [1, 64], got np.True_"),
        (("match", 0), "width must be an int in [1, 64], got 0; it counts drafts"),
        (("match", 2.0), "width must be an int in [1, 64], got 2.0"),
        (("match", True), "width must be an int in [1, 64], got True"),
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
