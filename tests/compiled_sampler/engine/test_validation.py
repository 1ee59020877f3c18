"""Every mistake at the boundary is named with its value and the way out, and leaves the sampler as it was."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_sampler import SampleOutputs, Sampler
from compiled_sampler.modes import MAX_VOCAB_SIZE
from tests.builders_sampler import REQUESTS, new_outputs, same

V, R = 8, 3


@pytest.fixture(scope="module")
def engine() -> SimpleNamespace:
    """A sampler with a plan of three rows, their inputs and what they draw."""
    sampler = Sampler(V, 4, backend="eager")
    plan = sampler.plan([sampler.add_request(REQUESTS["full"])] * R)
    logits, positions = torch.randn(R, V, generator=torch.Generator().manual_seed(0)), torch.arange(R)
    wanted = sampler.sample(plan, logits, positions)
    return SimpleNamespace(sampler=sampler, plan=plan, logits=logits, positions=positions, wanted=wanted)


@pytest.fixture
def refused(engine: SimpleNamespace) -> Iterator[Callable[..., str]]:
    """Calls ``sample`` with something wrong; returns the message. Afterwards the same call without it works."""

    def call(error: type[Exception], **changed: Any) -> str:
        arguments = {"plan": engine.plan, "logits": engine.logits, "positions": engine.positions} | changed
        with pytest.raises(error) as caught:
            engine.sampler.sample(**arguments)
        return str(caught.value)

    yield call
    assert same(engine.sampler.sample(engine.plan, engine.logits, engine.positions), engine.wanted)


def test_the_sampler_itself_defines_and_describes_every_public_method():
    public = {name for name in dir(Sampler) if not name.startswith("_")}
    assert public == {name for name in vars(Sampler) if not name.startswith("_")}
    assert all((vars(Sampler)[name].__doc__ or "").strip() for name in public)


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


@pytest.mark.parametrize(
    ("logits", "error", "words"),
    [
        ([[0.0] * V] * R, TypeError, "logits must be a torch.Tensor, got list; torch.as_tensor converts"),
        (None, TypeError, "logits must be a torch.Tensor, got NoneType"),
        (torch.zeros(R, V, dtype=torch.bfloat16), TypeError, "got torch.bfloat16; convert with .to(torch.float32)"),
        (torch.zeros(R, V, dtype=torch.float64), TypeError, "got torch.float64; convert with .to(torch.float32)"),
        (torch.zeros(R, V, device="meta"), ValueError, "logits must be on cpu, got meta; move it there"),
        (torch.zeros(R + 1, V), ValueError, "logits must be [3, >= 8], got [4, 8]; slice the rows of the plan"),
        (torch.zeros(R - 1, V), ValueError, "logits must be [3, >= 8], got [2, 8]; slice the rows of the plan"),
        (torch.zeros(R, V - 1), ValueError, "logits must be [3, >= 8], got [3, 7]; slice the rows of the plan"),
        (torch.zeros(V), ValueError, "logits must be [3, >= 8], got [8]; slice the rows of the plan"),
        (torch.zeros(1, R, V), ValueError, "logits must be [3, >= 8], got [1, 3, 8]; slice the rows of the plan"),
        (torch.zeros(V, R).T, ValueError, "logits must have column stride 1, got strides (1, 3); call .contiguous()"),
        (torch.zeros(R, 2 * V)[:, ::2], ValueError, "column stride 1, got strides (16, 2); call .contiguous()"),
    ],
)
def test_wrong_logits_are_refused(refused, logits, error, words):
    assert words in refused(error, logits=logits)


@pytest.mark.parametrize(
    ("positions", "error", "words"),
    [
        ([0, 1, 2], TypeError, "positions must be a torch.Tensor, got list; torch.as_tensor converts"),
        (torch.arange(R, dtype=torch.int32), TypeError, "got torch.int32; convert with .to(torch.int64)"),
        (torch.arange(R).float(), TypeError, "got torch.float32; convert with .to(torch.int64)"),
        (torch.zeros(R, dtype=torch.int64, device="meta"), ValueError, "positions must be on cpu, got meta; move it"),
        (torch.arange(R + 1), ValueError, "positions must be [3], one a slot of the plan, got [4]"),
        (torch.tensor(5), ValueError, "positions must be [3], one a slot of the plan, got []"),
        (torch.arange(R)[:, None], ValueError, "positions must be [3], one a slot of the plan, got [3, 1]"),
    ],
)
def test_wrong_positions_are_refused(refused, positions, error, words):
    assert words in refused(error, positions=positions)


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (torch.zeros(R), TypeError, "out must be SampleOutputs, got Tensor; SampleOutputs(token_ids, status)"),
        (tuple(new_outputs(R)), TypeError, "out must be SampleOutputs, got tuple; SampleOutputs(token_ids, status)"),
        (SampleOutputs([0] * R, torch.zeros(R)), TypeError, "out.token_ids must be a torch.Tensor, got list"),
        (
            new_outputs(R)._replace(token_ids=torch.zeros(R)),
            TypeError,
            "out.token_ids must be torch.int64, got torch.float32",
        ),
        (
            new_outputs(R)._replace(status=torch.zeros(R)),
            TypeError,
            "out.status must be torch.int32, got torch.float32",
        ),
        (new_outputs(R + 1), ValueError, "out.token_ids must be [3], as the plan has it, got [4]"),
        (
            new_outputs(R)._replace(status=new_outputs(2).status),
            ValueError,
            "out.status must be [3], as the plan has it",
        ),
        (new_outputs(R, "meta"), ValueError, "out.token_ids must be on cpu, got meta; move it there"),
    ],
)
def test_a_wrong_out_is_refused_and_left_alone(refused, out, error, words):
    before = [each.clone() for each in out if isinstance(each, torch.Tensor)]
    assert words in refused(error, out=out)
    for left, right in zip(before, (each for each in out if isinstance(each, torch.Tensor)), strict=True):
        assert left.is_meta or torch.equal(left, right)


def test_an_empty_plan_still_checks_its_tensors(engine):
    plan = engine.sampler.plan([])
    with pytest.raises(ValueError, match=r"logits must be \[0, >= 8\], got \[3, 8\]"):
        engine.sampler.sample(plan, engine.logits, engine.positions[:0])


@pytest.mark.parametrize(
    ("buffer", "error", "words"),
    [
        ("buffer", TypeError, "logits must be a torch.Tensor, got str"),
        (torch.zeros(R, V, dtype=torch.float16), TypeError, "got torch.float16; convert with .to(torch.float32)"),
        (torch.zeros(R, V - 1), ValueError, "logits must be [R, >= 8], got [3, 7]"),
        (torch.zeros(R, V, device="meta"), ValueError, "logits must be on cpu, got meta"),
    ],
)
def test_a_wrong_buffer_is_not_bound(engine, buffer, error, words):
    with pytest.raises(error) as caught:
        engine.sampler.bind_logits(buffer)
    assert words in str(caught.value)
    engine.sampler.bind_logits(None)
    assert same(engine.sampler.sample(engine.plan, engine.logits, engine.positions), engine.wanted)


def test_only_metadata_is_read(engine):
    """Values out of range wait for no device: they reach the status word, not an exception."""
    out = engine.sampler.sample(engine.plan, torch.full((R, V), torch.nan), engine.positions)
    assert out.token_ids.tolist() == [-1] * R
    assert out.status.tolist() == [3] * R


@pytest.mark.parametrize("modes", ["full", ["fast"], ["full", "top_k_top_p"]])
def test_modes_that_are_none_are_not_warmed_up(engine, modes):
    with pytest.raises(ValueError, match="modes must be a list of some of greedy, no_filter"):
        engine.sampler.warmup(modes=modes)
    assert same(engine.sampler.sample(engine.plan, engine.logits, engine.positions), engine.wanted)
