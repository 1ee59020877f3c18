"""Wrong state of the user's edits, and results in its memory: rule, value, way out."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch

from compiled_sampler import EditState, LogitEdit, SampleOutputs, Sampler
from tests.builders.edit_states import V, params_with, stateful_sampler


@dataclass(frozen=True)
class Kept(LogitEdit):
    """Changes nothing."""

    def edit(self, x, ids, rows):
        """The logits."""
        return x


def with_state(state, **declarations):
    """A sampler whose edit declares a state."""
    made = type("Declared", (Kept,), {"state": lambda self, vocab_size: state, **declarations})
    return Sampler(V, 2, backend="eager", edits=[dataclass(frozen=True)(made)()])


def writes(self, x, ids, rows):
    rows.state["s"].add_(1.0)
    return x


WRONG = [
    ([EditState()], {}, TypeError, "state of Declared must map names to EditState"),
    ({"s": torch.zeros(3)}, {}, TypeError, "must map names to EditState, got 's'"),
    ({3: EditState()}, {}, TypeError, "must map names to EditState, got 3"),
    (
        {"s": EditState(torch.float64)},
        {},
        ValueError,
        "dtype of state 's' of Declared must be one of .* got torch.float64",
    ),
    ({"s": EditState(per_token=1)}, {}, TypeError, "per_token, a bool"),
    ({"s": EditState(shape=[3])}, {}, TypeError, r"a tuple, got False and \[3\]"),
    ({"s": EditState(shape=(3, 0))}, {}, ValueError, r"sizes above 0.* got \(3, 0\)"),
    ({"s": EditState(shape=(1.5,))}, {}, TypeError, "shape of state 's' of Declared must be an int, got 1.5"),
    ({"s": EditState(per_token=True, shape=(3,))}, {}, ValueError, r"\(\) with per_token, got \(3,\)"),
    ({"s": EditState(torch.int32, initial=0.5)}, {}, TypeError, "initial of state 's' of Declared must be an int"),
    ({"s": EditState(torch.int32, initial=2**31)}, {}, ValueError, "torch.int32 holds, got 2147483648"),
    ({"s": EditState(torch.int64, initial=-(10**400))}, {}, ValueError, "torch.int64 holds, got -10"),
    ({"s": EditState(torch.float16, initial=1e5)}, {}, ValueError, "torch.float16 holds, got 100000.0"),
    ({"s": EditState(initial=float("nan"))}, {}, ValueError, "torch.float32 holds, got nan"),
    ({"s": EditState(initial="1")}, {}, TypeError, "must be a number"),
    ({"s": EditState(torch.bool, initial=2)}, {}, ValueError, "must be a bool, got 2"),
    ({"s": EditState()}, {"edit": writes}, TypeError, "must write into nothing"),
    ({}, {"edit": lambda self, x, ids, rows: x + rows.state["s"]}, TypeError, "KeyError: 's'"),
    (
        {"s": EditState(shape=(7,))},
        {"edit": lambda self, x, ids, rows: x + rows.state["s"]},
        TypeError,
        "must take logits",
    ),
]


@pytest.mark.parametrize(("state", "declarations", "error", "message"), WRONG)
def test_a_sampler_refuses(state, declarations, error, message):
    with pytest.raises(error, match=message):
        with_state(state, **declarations)


@pytest.mark.parametrize(
    ("dtype", "initial"),
    [
        *((torch.float32, -float("inf")), (torch.int64, -(2**63)), (torch.bool, 1)),
        *((torch.bfloat16, Fraction(1, 4)), (torch.int32, np.int64(7))),
    ],
)
def test_a_sampler_takes_what_a_dtype_holds(dtype, initial):
    sampler = with_state({"s": EditState(dtype, initial=initial)})
    assert sampler.edit_state("s").tolist() == [initial] * 2
    assert sampler.edit_state("s").dtype is dtype


@pytest.mark.parametrize("method", ["edit", "tables", "state"])
def test_a_field_must_not_have_the_name_of_a_method(method):
    made = dataclass(frozen=True)(type("Named", (Kept,), {"__annotations__": {method: int}, method: 3}))()
    with pytest.raises(TypeError, match=f"{method} of Named must be the method of LogitEdit, got 3; name the field"):
        Sampler(V, 2, backend="eager", edits=[made])


def test_two_edits_must_not_share_a_state():
    edits = [
        dataclass(frozen=True)(type(name, (Kept,), {"state": lambda self, size: {"s": EditState()}}))() for name in "ab"
    ]
    with pytest.raises(ValueError, match="state of edits must be used once, got 's'"):
        Sampler(V, 2, backend="eager", edits=edits)


def test_a_state_that_no_edit_declares_is_refused():
    with pytest.raises(ValueError, match="here words, bias, weight, acts, groups, got 'word'"):
        stateful_sampler("eager", 1).edit_state("word")
    with pytest.raises(ValueError, match="here none, got 'words'"):
        Sampler(V, 1, backend="eager").edit_state("words")


@pytest.mark.parametrize("edits", [["RunningBias"], []], ids=["with", "without"])
def test_no_step_writes_into_state(edits):
    """Whatever the batch is: other requests may have the edit."""
    sampler = stateful_sampler("eager", 2)
    slots = [sampler.add_request(params_with(edits, seed=n, logit_bias={0: 1.0})) for n in range(2)]
    plan, drafted, bias = sampler.plan(slots), sampler.plan(slots, num_drafts=[0, 0]), sampler.edit_state("bias")
    logits, positions, none = torch.randn(2, V), torch.tensor([0, 0]), torch.zeros(2, 0, dtype=torch.int64)
    groups = sampler.edit_state("groups")[:, 0, 0]
    finished = torch.zeros(2, dtype=torch.bool)
    out = SampleOutputs(groups, torch.zeros(2, dtype=torch.int32), finished)
    with pytest.raises(ValueError, match="memory of its own"):
        sampler.probs(plan, logits, out=bias, positions=positions)
    with pytest.raises(ValueError, match="memory of its own"):
        sampler.sample(plan, logits, positions, out)
    made = sampler.verify(drafted, logits, none, positions)
    with pytest.raises(ValueError, match="memory of its own"):
        sampler.verify(drafted, logits, none, positions, out=made._replace(num_emitted=groups))
    for step in (
        lambda: sampler.sample(plan, bias, positions, consume_logits=True),
        lambda: sampler.verify(drafted, bias, none, positions, consume_logits=True),
    ):
        with pytest.raises(ValueError, match="of what edits read"):
            step()
    assert sampler.sample(plan, bias, positions).tolist()
