"""Wrong edits of the user, wrong parameters of requests and wrong tensors of a call: rule, value, way out."""

import sys
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from compiled_sampler import EditInput, EditState, LogitEdit, SampleOutputs, Sampler, SamplingParams
from compiled_sampler.edits.custom import customized
from compiled_sampler.engine.requests.custom_edits import CustomEditSet
from compiled_sampler.lowering.compiled_stages import CompiledStages
from tests.builders.custom_edits import EDITS, Stepped, V, custom_sampler, params_with, random_inputs
from tests.builders.edit_states import params_with as stateful_params
from tests.builders.edit_states import stateful_sampler
from tests.builders.sampler import planned
from tests.torch_states import default_dtype


@dataclass(frozen=True)
class Kept(LogitEdit):
    """Changes nothing."""

    constant: float = 0.0

    def edit(self, x, ids, rows):
        return x + self.constant


@dataclass(frozen=True)
class Params:
    """One parameter that has no default."""

    level: float


@dataclass(frozen=True)
class Unknown:
    """A parameter of a type that is not there."""

    level: "Undefined"  # noqa: F821


def declared(**declarations):
    """A class like ``Kept`` with other declarations."""
    return dataclass(frozen=True)(type("Declared", (Kept,), declarations))()


def sampler_of(*edits, **options):
    return Sampler(V, 2, backend="eager", edits=edits, **options)


def with_state(state, **declarations):
    return sampler_of(declared(state=lambda self, vocab_size: state, **declarations))


def writes(self, x, ids, rows):
    rows.state["s"].add_(1.0)
    return x


def reads(self, x, ids, rows):
    return x + rows.state["s"]


def with_history(write):
    return sampler_of(declared(history_tokens=2, edit=lambda self, x, ids, rows: write(rows.history)), history_len=9)


def with_field(method):
    """A sampler whose edit has a field with the name of a method."""
    return sampler_of(dataclass(frozen=True)(type("Named", (Kept,), {"__annotations__": {method: int}, method: 3}))())


@dataclass
class Changeable(LogitEdit):
    """Not frozen."""


WRONG = [
    (lambda: sampler_of(Kept), TypeError, "must be a LogitEdit"),
    (lambda: Sampler(V, 2, edits=Kept()), TypeError, "must be a list of LogitEdit"),
    (lambda: sampler_of(Changeable()), TypeError, "frozen dataclass"),
    (lambda: sampler_of(Kept(), Kept()), ValueError, "name of edits must be used once, got 'Kept'"),
    (lambda: sampler_of(declared(name="penalties")), ValueError, "'penalties' twice"),
    (lambda: sampler_of(declared(name="no name")), ValueError, "identifier"),
    (lambda: sampler_of(*(declared(name=f"edit_{n}") for n in range(17))), ValueError, "at most 16, got 17"),
    (lambda: sampler_of(declared(history_tokens=2)), ValueError, "history_len"),
    (lambda: sampler_of(declared(bit_exact=1)), TypeError, "bit_exact"),
    (lambda: sampler_of(declared(params=dict)), TypeError, "frozen dataclass"),
    (lambda: sampler_of(declared(inputs={"mask": torch.bool})), TypeError, "EditInput"),
    (lambda: sampler_of(declared(inputs={"mask": EditInput(torch.float64)})), ValueError, "float64"),
    (lambda: sampler_of(declared(tables=lambda self, size: {"t": torch.zeros(3)})), ValueError, r"must be \[129\]"),
    (lambda: sampler_of(declared(tables=lambda self, size: {"t": [0.0] * size})), TypeError, "torch.Tensor"),
    (lambda: sampler_of(declared(edit=lambda self, x, ids, rows: x > 0)), TypeError, "must return float32"),
    (lambda: sampler_of(declared(edit=lambda self, x, ids, rows: x[:, :1])), TypeError, "shape of x"),
    (lambda: sampler_of(Kept(), captured_edits=[["Kep"]]), ValueError, "'Kep'"),
    (lambda: sampler_of(declared(edit=lambda self, x, ids, rows: x.add_(1.0))), TypeError, "must write into nothing"),
    (lambda: sampler_of(declared(edit=lambda self, x, ids, rows: x if x.sum() > 0 else -x)), TypeError, "torch.where"),
    (lambda: sampler_of(declared(edit=lambda self, x, ids, rows: x[x > 0])), TypeError, "must not look at the numbers"),
    (lambda: sampler_of(declared(params=Unknown)), TypeError, "types that are known, got name 'Undefined'"),
    (lambda: with_history(lambda told: told[:, -1].fill_(0)), TypeError, "must write into nothing .*, got a call in"),
    *(
        (lambda name=name: with_field(name), TypeError, f"{name} of Named must be the method .*; name the field")
        for name in ("edit", "tables", "state")
    ),
    (lambda: with_state([EditState()]), TypeError, "state of Declared must map names to EditState"),
    (lambda: with_state({"s": torch.zeros(3)}), TypeError, "must map names to EditState, got 's'"),
    (lambda: with_state({"s": EditState(torch.float64)}), ValueError, "dtype of state 's' .* one of .* torch.float64"),
    (lambda: with_state({"s": EditState(per_token=1)}), TypeError, "per_token, a bool"),
    (lambda: with_state({"s": EditState(shape=(3, 0))}), ValueError, r"sizes above 0.* got \(3, 0\)"),
    (lambda: with_state({"s": EditState(per_token=True, shape=(3,))}), ValueError, r"\(\) with per_token, got \(3,\)"),
    (lambda: with_state({"s": EditState(torch.int32, initial=0.5)}), TypeError, "initial of .* must be an int"),
    (lambda: with_state({"s": EditState(torch.int32, initial=2**31)}), ValueError, "torch.int32 holds, got 2147483648"),
    (lambda: with_state({"s": EditState(initial=float("nan"))}), ValueError, "torch.float32 holds, got nan"),
    (lambda: with_state({"s": EditState(torch.bool, initial=2)}), ValueError, "must be a bool, got 2"),
    (lambda: with_state({"s": EditState()}, edit=writes), TypeError, "must write into nothing"),
    (lambda: with_state({}, edit=reads), TypeError, "KeyError: 's'"),
    (lambda: with_state({"s": EditState(shape=(7,))}, edit=reads), TypeError, "must take logits"),
]


@pytest.mark.parametrize(("make", "error", "message"), WRONG)
def test_a_sampler_refuses(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_edits_are_taken_under_another_default_dtype():
    with default_dtype(torch.float64):
        sampler = custom_sampler("eager", 1)
    assert sampler.statistics().edit_bytes == 0


@pytest.mark.parametrize("part", ["input", "state"])
def test_two_edits_must_not_share_an_input_or_a_state(part):
    given = {"inputs": {"s": EditInput()}} if part == "input" else {"state": lambda self, size: {"s": EditState()}}
    twice = [declared(name=each, **given) for each in "ab"]
    with pytest.raises(ValueError, match=f"{part} of edits must be used once, got 's'"):
        sampler_of(*twice)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"Other": {}}, ValueError, "got 'Other'"),
        ({"Kept": {"level": 1.0}}, TypeError, "has no parameters"),
        ({"Leveled": {}}, TypeError, "level"),
        ({"Leveled": {"levl": 1.0}}, TypeError, "levl'; it has level"),
        ({"Leveled": {"level": "1"}}, TypeError, "must be a number"),
        ({"Leveled": {"level": 1e39}}, ValueError, "float32 holds"),
        ({"Leveled": Kept()}, TypeError, "Params or a mapping"),
        ({"Stepped": {"lowers": 2}}, ValueError, "lowers of Stepped must be a bool, got 2"),
    ],
)
def test_a_request_is_refused(given, error, message):
    sampler = sampler_of(Kept(), Stepped(), declared(name="Leveled", params=Params))
    with pytest.raises(error, match=message):
        sampler.add_request(SamplingParams(seed=1, extra_args=given))
    assert sampler.num_free_slots == 2


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        *((each, "extra_args") for each in ("Kept", {"Kept": 1}, {3: {}}, [("Kept", {}), ("Kept", {})])),
        ({"A": {"a": [1]}}, "a of A must be a number"),
        ({"A": (("a", 1), ("a", 2))}, "A must name each parameter once"),
        ({"A": {1: 1.0}}, "by a str"),
    ],
)
def test_extra_args_that_are_no_mapping_of_hashable_numbers_are_refused(given, rule):
    with pytest.raises(TypeError, match=rule):
        SamplingParams(extra_args=given)


def test_parameters_can_be_a_mapping_or_the_dataclass():
    given = [SamplingParams(seed=1, extra_args={"Leveled": each}) for each in ({"level": 2}, Params(2.0))]
    leveled = declared(name="Leveled", params=Params, edit=lambda self, x, ids, rows: x * rows.params["level"])
    sampler, plan = planned(*given, edits=[leveled])
    logits = torch.randn(2, V)
    assert torch.equal(sampler.edited_logits(plan, logits, torch.zeros(2, dtype=torch.int64)), 2.0 * logits)
    assert hash(given[0]) == hash(replace(given[0]))
    assert sampler.request(0).edits == ("Leveled",)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"number": None}, ValueError, "'number'"),
        ({"number": torch.zeros(1, dtype=torch.int64)}, TypeError, "int32"),
        ({"number": torch.zeros(2, dtype=torch.int32)}, ValueError, r"must be \[1\]"),
        ({"blocked": torch.zeros(1, V - 1, dtype=torch.bool)}, ValueError, r"must be \[1, >= 129\]"),
        ({"blocked": torch.zeros(V, 1, dtype=torch.bool)}, ValueError, "one for each row"),
        ({"blocked": [[False] * V]}, TypeError, "torch.Tensor"),
        ({"other": torch.zeros(1)}, ValueError, "got 'other'"),
    ],
)
def test_a_call_is_refused(changed, error, message):
    """In every step, also after a call that was right."""
    sampler = custom_sampler("eager", 1)
    slot = sampler.add_request(params_with(["Stepped"], seed=1))
    plan, drafted = sampler.plan([slot]), sampler.plan([slot], num_drafts=[0])
    logits, position, right = torch.randn(1, V), torch.tensor([0]), random_inputs(1, 0)
    wrong = {name: each for name, each in {**right, **changed}.items() if each is not None}
    none = torch.zeros(1, 0, dtype=torch.int64)
    for step in (
        lambda given: sampler.sample(plan, logits, position, edit_inputs=given),
        lambda given: sampler.draft(plan, logits, position, edit_inputs=given),
        lambda given: sampler.probs(plan, logits, positions=position, edit_inputs=given),
        lambda given: sampler.edited_logits(plan, logits, position, edit_inputs=given),
        lambda given: sampler.verify(drafted, logits, none, position, edit_inputs=given),
    ):
        step(right)
        with pytest.raises(error, match=message):
            step(wrong)
    with pytest.raises(TypeError, match="edit_inputs must map"):
        sampler.sample(plan, logits, position, edit_inputs=[logits])


def test_an_edit_that_promises_no_bits_is_named_by_plans_and_statistics():
    sampler = sampler_of(declared(name="soft", bit_exact=False), Kept())
    slots = [sampler.add_request(SamplingParams(seed=1, extra_args={each: {}})) for each in ("soft", "Kept")]
    assert "not_bit_exact=('soft',)" in repr(sampler.plan(slots))
    assert "not_bit_exact" not in repr(sampler.plan(slots[1:]))
    assert sampler.statistics().inexact_edits == ("soft",)


def test_two_instances_of_a_class_share_no_compiled_code():
    """Also where their constants are equal as numbers, and so are the dataclasses: here 1 and 1.0 choose other code."""

    def by_type(self, x, ids, rows):
        return x * 2.0 if isinstance(self.constant, int) else x * 3.0

    kind = dataclass(frozen=True)(type("ByType", (Kept,), {"edit": by_type}))
    assert kind(1) == kind(1.0)
    stages, logits, made = CompiledStages(), torch.randn(2, V), []
    for constant in (1, 1.0):
        custom = CustomEditSet([kind(constant)], V, torch.device("cpu"), 1)
        row = custom.numbers_of(SamplingParams(extra_args={"ByType": {}}))
        tables = custom.tables(("ByType",), torch.from_numpy(row)[None])
        zeros = torch.zeros(2, dtype=torch.int64)
        step = custom.step(("ByType",))
        made.append(stages(customized, logits, None, zeros, zeros, None, tables, (), None, edits=step, vocab_size=V))
    assert torch.equal(made[0], 2.0 * logits)
    assert torch.equal(made[1], 3.0 * logits)


def test_a_table_is_the_samplers_own_and_written_by_no_edit():
    table = torch.zeros(V)
    tables = {"tables": lambda self, size: {"t": table}}
    reader = declared(edit=lambda self, x, ids, rows: x + rows.tables["t"], name="reader", **tables)
    sampler, plan = planned(SamplingParams(seed=1, extra_args={"reader": {}}), edits=[reader])
    logits, position = torch.randn(1, V), torch.tensor([0])
    table.fill_(5.0)
    assert torch.equal(sampler.edited_logits(plan, logits, position), logits)

    def writes(self, x, ids, rows):
        rows.tables["t"].add_(1.0)
        return x

    with pytest.raises(TypeError, match="must write into nothing"):
        sampler_of(declared(edit=writes, **tables))


def test_no_edit_revives_what_a_mask_a_bias_a_bad_word_or_min_tokens_hid():
    lifts = declared(edit=lambda self, x, ids, rows: torch.where(ids == 3, 100.0, x), name="lifts")
    sampler, own = sampler_of(lifts, history_len=8), {"seed": 1, "temperature": 0.0, "extra_args": {"lifts": {}}}
    for hidden in (
        {"allowed_token_ids": [1, 2]},
        {"logit_bias": {3: -float("inf")}},
        {"bad_words_token_ids": [[3]]},
        {"min_tokens": 4, "stop_token_ids": [3]},
        {},
    ):
        slot = sampler.add_request(SamplingParams(**own, **hidden))
        drawn = sampler.sample(sampler.plan([slot]), torch.randn(1, V), torch.tensor([0]))
        assert (drawn.tolist()[0] == 3) == (not hidden)
        sampler.remove_request(slot)


def test_on_an_unknown_torch_an_edit_is_tried_without_private_parts(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "99.2.0")
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", None)  # an import of it raises
    sampler_of(Kept())
    with pytest.raises(TypeError, match="must return float32"):
        sampler_of(declared(edit=lambda self, x, ids, rows: x > 0))


# State by slot.


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


def test_a_state_that_no_edit_declares_is_refused():
    with pytest.raises(ValueError, match="here words, bias, weight, acts, groups, got 'word'"):
        stateful_sampler("eager", 1).edit_state("word")
    with pytest.raises(ValueError, match="here none, got 'words'"):
        Sampler(V, 1, backend="eager").edit_state("words")


@pytest.mark.parametrize("read", ["an input", "state", "state of others"])
def test_no_step_writes_into_what_edits_read(read):
    """State is not written whatever the batch is: other requests may have the edit."""
    if read == "an input":
        sampler, params, inputs = custom_sampler("eager", 2), params_with(["Guidance"]), random_inputs(2, 0)
        (name,) = inputs.keys() & set(EDITS["Guidance"].inputs)
        given, memory = {"edit_inputs": inputs}, inputs[name]
    else:
        sampler, given = stateful_sampler("eager", 2), {}
        params, memory = stateful_params(["RunningBias"] if read == "state" else []), sampler.edit_state("bias")
    slots = [sampler.add_request(replace(params, seed=n, logit_bias={0: 1.0})) for n in range(2)]
    plan, drafted, logits = sampler.plan(slots), sampler.plan(slots, num_drafts=[0, 0]), torch.randn(2, V)
    positions, none = torch.tensor([0, 0]), torch.zeros(2, 0, dtype=torch.int64)
    own, consumed = "memory of its own", "of what edits read"
    steps = [
        (own, lambda: sampler.probs(plan, logits, out=memory, positions=positions, **given)),
        (consumed, lambda: sampler.sample(plan, memory, positions, consume_logits=True, **given)),
        (consumed, lambda: sampler.verify(drafted, memory, none, positions, consume_logits=True, **given)),
    ]
    if read != "an input":
        groups, made = sampler.edit_state("groups")[:, 0, 0], sampler.verify(drafted, logits, none, positions)
        out = SampleOutputs(groups, torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.bool))
        steps += [
            (own, lambda: sampler.sample(plan, logits, positions, out)),
            (own, lambda: sampler.verify(drafted, logits, none, positions, out=made._replace(num_emitted=groups))),
        ]
    for message, step in steps:
        with pytest.raises(ValueError, match=message):
            step()
    assert sampler.sample(plan, memory, positions, **given).tolist()
