"""Every mistake at the boundary is named with its value and the way out, and leaves the sampler as it was."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_sampler import SampleOutputs, Sampler
from compiled_sampler.engine.request_holder import RequestHolder
from tests.builders.sampler import REQUESTS, new_outputs, same

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


def test_the_sampler_and_its_base_classes_define_every_public_name_and_describe_it():
    public = {name for name in dir(Sampler) if not name.startswith("_")}
    kinds = (Sampler, RequestHolder)
    own = ({name for name in vars(kind) if not name.startswith("_")} for kind in kinds)
    assert public == set().union(*own)
    assert all((getattr(Sampler, name).__doc__ or "").strip() for name in public)


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
        (torch._neg_view(torch.zeros(R, V)), ValueError, "got a view with the negative bit; call .resolve_neg()"),
        (torch.zeros(R, V).to_sparse(), TypeError, "dense tensor, got torch.sparse_coo; call .to_dense()"),
        (
            torch.nested.nested_tensor([torch.zeros(V)] * R, layout=torch.jagged),
            TypeError,
            "dense tensor, got a nested one; call .to_padded_tensor(padding)",
        ),
        (torch.zeros(R, 2 * V)[:, ::2], ValueError, "column stride 1, got strides (16, 2); call .contiguous()"),
    ],
)
def test_wrong_logits_are_refused(refused, logits, error, words):
    assert words in refused(error, logits=logits)


@pytest.mark.parametrize(
    ("positions", "error", "words"),
    [
        (None, TypeError, "positions must be a torch.Tensor, got NoneType; torch.as_tensor converts"),
        ([0, 1, 2], TypeError, "positions must be a torch.Tensor, got list; torch.as_tensor converts"),
        (torch._neg_view(torch.arange(R)), ValueError, "positions must hold its numbers, got a view with the negative"),
        (torch.arange(R).short(), TypeError, "or torch.int32, got torch.int16; convert with .to(torch.int64)"),
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
        (
            torch.zeros(R),
            TypeError,
            "out must be SampleOutputs or 'ring', got Tensor; SampleOutputs(token_ids, status)",
        ),
        (
            tuple(new_outputs(R)),
            TypeError,
            "out must be SampleOutputs or 'ring', got tuple; SampleOutputs(token_ids, status)",
        ),
        (SampleOutputs([0] * R, torch.zeros(R)), TypeError, "out.token_ids must be a torch.Tensor, got list"),
        (
            new_outputs(R)._replace(token_ids=torch.zeros(R)),
            TypeError,
            "out.token_ids must be torch.int64 or torch.int32, got torch.float32",
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
        (torch.zeros(0, V), ValueError, "buffer must have at least one row, got none; bind_logits(None) drops"),
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
