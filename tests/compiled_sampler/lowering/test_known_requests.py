"""Known requests hold what their documentation allows, and the user's edits get only what they take."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from compiled_sampler import EditInput, EditRows, EditState, LogitEdit
from compiled_sampler.edit_tables import NO_TOKEN, SUCCESSOR, TOKEN, UNWRITTEN, EditInputs, EditTables
from compiled_sampler.edits.recording import entries_of
from compiled_sampler.engine.requests.custom_edits import CustomEditSet
from compiled_sampler.lowering.known_custom_edits import KnownCustom, known_custom
from compiled_sampler.lowering.known_requests import NUM_REQUESTS, PROMPT_LENS, known_history, known_tables
from tests.builders.edits import edited_sampler

CPU = torch.device("cpu")


def tables(vocab_size: int) -> EditTables:
    """Those of all edits of the library."""
    sampler = edited_sampler("eager", 3, vocab_size)
    names = ("allowed_token_ids", "logit_bias", "min_tokens", "penalties", "dry", "bad_words")
    filters = ("top_n_sigma", "min_k", "p_less", "typical_p", "xtc")
    given = sampler._edits.inputs((*names, *filters), {}, torch.ones(3))
    assert isinstance(given, EditInputs)
    return known_tables(given.tables, vocab_size)


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 129, 151936])
def test_tables_hold_what_they_may(vocab_size):
    made = tables(vocab_size)
    bias, stops, penalties, dry, words = made.bias, made.stops, made.penalties, made.dry, made.words
    assert bias and stops and penalties and dry and words and made.history and made.filters  # noqa: PT018
    for n in range(NUM_REQUESTS):
        count = int(bias.counts[n])
        ids = bias.token_ids[n].tolist()
        assert ids[:count] == sorted({*ids[:count]})
        assert all(0 <= each < vocab_size for each in ids[:count])
        assert {*ids[count:]} <= {NO_TOKEN}
        for lists, number in ((stops.token_ids, stops.counts), (dry.breakers, dry.num_breakers)):
            entries = lists[n, : int(number[n])].tolist()
            assert len({*entries}) == len(entries)
            assert all(0 <= each < vocab_size for each in entries)
        for word in words.token_ids[n, : int(words.counts[n])].tolist():
            begun = [each != UNWRITTEN for each in word]
            assert begun == sorted(begun)
            assert begun[-1]
    assert ((bias.biases == -math.inf) | bias.biases.isfinite()).all()
    assert ((penalties.repetition >= 2.0**-20) & (penalties.repetition <= 2.0**20)).all()
    assert torch.equal(penalties.inverse, (1.0 / penalties.repetition.double()).float())
    assert (torch.stack([penalties.frequency, penalties.presence]).abs() <= 2.0).all()
    assert (dry.penalties.diff(dim=1) >= 0).all()
    assert words.token_ids.max() < vocab_size
    filters = made.filters
    assert ((filters.typical_p.share > 0) & (filters.typical_p.share <= 1)).all()
    assert ((filters.xtc.probability >= 0) & (filters.xtc.probability <= 1)).all()


@pytest.mark.parametrize("vocab_size", [2, 129])
def test_of_each_edit_there_are_requests_with_and_without(vocab_size):
    made = tables(vocab_size)
    acts = {
        "allowed": (made.allowed.words != -1).any(-1),
        "biases": made.bias.counts > 0,
        "stops": made.stops.counts > 0,
        "penalties": made.penalties.frequency != 0,
        "dry": (made.dry.penalties > 0).any(-1),
        "bad_words": made.words.counts > 0,
        "top_n_sigma": made.filters.top_n_sigma.number > 0,
        "min_k": made.filters.min_k.tau >= 0,
        "p_less": made.filters.p_less.is_on > 0,
        "typical_p": made.filters.typical_p.share < 1,
        "xtc": made.filters.xtc.probability > 0,
    }
    assert [name for name, each in acts.items() if each.all() or not each.any()] == []


def test_histories_are_those_of_their_texts():
    history = known_history(48, 129)
    for n, entries in enumerate(history.entries):
        text = [each for each in entries[TOKEN].tolist() if each != UNWRITTEN]
        assert torch.equal(entries, torch.from_numpy(entries_of(text, PROMPT_LENS[n], 48)))
    assert (history.entries[:, SUCCESSOR] < 48).any()


@dataclass(frozen=True)
class Bounded:
    """Refuses most numbers."""

    weight: float
    steps: int = 7
    is_on: bool = True

    def __post_init__(self) -> None:
        """Check each."""
        if self.weight != 2.5 or self.steps < 7 or not isinstance(self.is_on, bool):
            raise ValueError(f"{self} is out of range")


@dataclass(frozen=True)
class Picky(LogitEdit):
    """Looks up a number by its state, which must be one of two."""

    params = Bounded
    inputs: ClassVar[Mapping[str, EditInput]] = {"shift": EditInput(torch.bfloat16)}

    def state(self, vocab_size: int) -> Mapping[str, EditState]:
        """The place of the number."""
        return {"place": EditState(torch.int64, initial=1)}

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """The logits and the number."""
        numbers = torch.tensor([0.5, 1.5]).expand(len(x), -1)
        return x + numbers.gather(1, rows.state["place"])


@dataclass(frozen=True)
class Never:
    """Refuses every number."""

    weight: float = 1.0

    def __post_init__(self) -> None:
        """Raise."""
        raise ValueError("no number will do")


@dataclass(frozen=True)
class Refusing(LogitEdit):
    """No request can have it."""

    params = Never

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """The logits and the weight."""
        return x + rows.params["weight"]


@dataclass(frozen=True)
class Shifted(LogitEdit):
    """Adds a state of each token and a number of the call."""

    inputs: ClassVar[Mapping[str, EditInput]] = {"amount": EditInput(torch.float16)}

    def state(self, vocab_size: int) -> Mapping[str, EditState]:
        """What is added."""
        return {"more": EditState(per_token=True, initial=0.5)}

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """The sum."""
        return x + rows.state["more"] + rows.inputs["amount"].float()


class Inexact(Shifted):
    """Promises nothing."""

    bit_exact = False


def known(edit: LogitEdit) -> KnownCustom:
    """What an edit of a sampler with three slots reads of known requests."""
    edits = CustomEditSet([edit], 40, CPU, 3)
    like = edits.tables(edits.names, torch.zeros(3, edits.num_columns, dtype=torch.int64))
    given = tuple(torch.zeros(3, dtype=spec.dtype) for spec in edit.inputs.values())
    step: Any = edits.step(edits.names)
    return known_custom(step, like, given, None, 40)


def test_parameters_are_such_as_their_own_checks_let_pass():
    columns = known(Picky()).tables.numbers.columns
    assert 0 < columns[:, 0].sum() < NUM_REQUESTS
    for used, weight, steps, is_on, *rest in columns.tolist():
        value = float(torch.tensor(weight, dtype=torch.int32).view(torch.float32))
        assert not used or Bounded(value, steps, bool(is_on)) is not None
        assert not any(rest)
    assert not known(Refusing()).tables.numbers.columns.any()


def test_an_edit_that_raises_for_random_numbers_reads_those_of_a_new_request():
    made = known(Picky())
    assert (made.tables.states[0].values == 1).all()
    assert not made.given[0].any()


def test_other_edits_read_random_numbers_and_those_of_a_new_request():
    made = known(Shifted())
    more, (amount,) = made.tables.states[0].values, made.given
    assert (more == 0.5).all(-1).tolist() == [False, True] * (NUM_REQUESTS // 2)
    assert (amount == 0).tolist() == [False, True] * (NUM_REQUESTS // 2)
    assert more.isfinite().all()


def test_no_request_has_an_edit_that_promises_no_equal_bits():
    made = known(Inexact())
    assert not made.tables.numbers.columns.any()
    assert (made.tables.states[0].values == 0.5).all()
