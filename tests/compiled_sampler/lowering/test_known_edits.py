"""Known edits: a stage that edits nothing is found, whichever it is, and nothing of the sampler is written."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compiled_sampler import Sampler, SamplingParams, Verification
from compiled_sampler.batch import SampleInputs
from compiled_sampler.core.order import row_logits
from compiled_sampler.edit_names import CONSUMES, EDITS, HISTORY, RESTORES
from compiled_sampler.edits import custom, dry, lists, masks, stops, watermark, written
from compiled_sampler.edits.recording import DrawEnds
from compiled_sampler.lowering import known_answers, known_inputs
from compiled_sampler.lowering.compiled_stages import CompiledStages
from compiled_sampler.lowering.compiling.stage_code import StageCode
from compiled_sampler.lowering.known_answers import VARIABLE
from compiled_sampler.lowering.stages.bit_equality import difference
from compiled_sampler.lowering.stages.stage_call import outcome
from compiled_sampler.lowering.status import StageWarning
from compiled_sampler.passes.row_filters import cliff, deviation, mass_filters, typical
from compiled_sampler.pipeline.edits import edited_step
from tests.builders import custom_edits, edit_states

V, L = custom_edits.V, 40
USERS = {**custom_edits.EDITS, **edit_states.EDITS}


@contextmanager
def one_thread() -> Iterator[None]:
    """Steps of a few rows: several threads would wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def nothing_written(*tensors: Any, **static: Any) -> None:
    """What a stage does that writes nothing and returns nothing."""


def ends_alone(*tensors: Any) -> DrawEnds:
    """The ends of draws, as a stage has them that records no draw."""
    *_, token_ids, status, lists = tensors
    return DrawEnds(status, stops.are_ends(token_ids, status, tensors[2], lists))


def status_alone(*tensors: Any) -> Tensor:
    """The status, as a stage gets it that records tokens."""
    return tensors[-1]


def logits_alone(logits: Tensor, *rest: Any, vocab_size: int, **static: Any) -> Tensor:
    """The logits, as a stage gets them that edits rows."""
    return row_logits(logits, vocab_size).clone()


def logits_of(stage: Callable[..., tuple[Tensor, Tensor]], x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The tokens that a stage writes, with the logits that they have."""
    ids, _ = stage(x, *rest)
    return ids, x.gather(1, ids)


def without_entries(stage: Callable[..., Any], *tensors: Any) -> Any:
    """What a stage makes where no token ends a request."""
    return stage(*tensors[:-1], tensors[-1]._replace(counts=torch.zeros_like(tensors[-1].counts)))


IDLE: dict[str, dict[Callable[..., Any], Callable[..., Any]]] = {
    "token_bitmask": {masks.masked: logits_alone},
    "allowed_token_ids": {masks.masked: logits_alone},
    "logit_bias": {written.write_biases: nothing_written},
    "min_tokens": {lists.without_stops: partial(logits_of, lists.without_stops)},
    "penalties": {
        written.write_penalties: nothing_written,
        written.record_draws: ends_alone,
        written.record_drafts: nothing_written,
        written.record_ends: status_alone,
    },
    "dry": {dry.without_repetitions: partial(logits_of, dry.without_repetitions)},
    "bad_words": {lists.without_bad_words: partial(logits_of, lists.without_bad_words)},
    "watermark": {watermark.noise_positions: lambda slots, positions, *tables: positions.clone()},
    "stops": {
        stops.with_finished: partial(without_entries, stops.with_finished),
        stops.cut_at_stop: partial(without_entries, stops.cut_at_stop),
    },
    "top_n_sigma": {
        deviation.longest_kept: lambda sums, row_max, *rest: torch.full_like(row_max, torch.inf),
        deviation.within_distance: logits_alone,
    },
    "min_k": {
        cliff.cliff_logit: lambda ordered, *rest: torch.full_like(ordered[:, 0], -torch.inf, dtype=torch.float32),
        cliff.above_cliff: logits_alone,
    },
    "p_less": {
        mass_filters.p_less_cut: lambda sums, row_max, *rest: torch.zeros_like(row_max, dtype=torch.int64),
        mass_filters.without_light: logits_alone,
    },
    "typical_p": {
        typical.with_digit: lambda search, masses: search,
        typical.within_typical: logits_alone,
    },
    "xtc": {
        mass_filters.top_choice_mass: lambda sums, row_max, *rest: torch.full_like(
            row_max, 2**63 - 1, dtype=torch.int64
        ),
        mass_filters.without_first: logits_alone,
    },
    **{name: {custom.customized: logits_alone} for name in USERS},
}
"""The stages of each edit that read its table or write its logits, and what each would do if it did nothing."""


def prepared(edits: Sequence[str], vocab_size: int, slots: int, backend: str = "compiled") -> Sampler:
    """A sampler whose warm-up prepares batches with the edits."""
    ways = [Verification("match", 2)] if {"penalties", "stops"} & {*edits} else []
    users = [each for name, each in USERS.items() if name in edits]
    sizes = {"history_len": L, "buckets": [slots], "verifications": ways}
    return Sampler(vocab_size, slots, backend=backend, captured_edits=[edits], edits=users, **sizes)


def found(monkeypatch: pytest.MonkeyPatch, sampler: Sampler, idle: Mapping[Any, Any]) -> set[str]:
    """Stages that a warm-up finds to differ, where some are idle and all others those of eager torch."""

    def made(_: CompiledStages, code: StageCode) -> Callable[..., Any]:
        return partial(idle.get(code.stage, code.stage), **code.static)

    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(CompiledStages, "_find", made)
    monkeypatch.setattr(CompiledStages, "are_on_disk", lambda *_: True)
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", StageWarning)
        sampler.warmup(modes=["greedy"])
    status = sampler.statistics().lowering
    assert status is not None
    return {*status.eager_stages}


def test_every_edit_is_looked_at():
    assert {*IDLE} == {*EDITS, *USERS} - {CONSUMES, RESTORES, HISTORY}


@pytest.mark.parametrize("edit", ["logit_bias", "penalties"])
def test_a_stage_that_takes_no_edit_back_is_found(monkeypatch, edit):
    assert found(monkeypatch, prepared([RESTORES, edit], V, 5), {}) == set()
    assert found(monkeypatch, prepared([RESTORES, edit], V, 5), {written.take_back: nothing_written}) == {"take_back"}


@pytest.mark.parametrize(("vocab_size", "slots"), [(V, 1), (V, 5), (2, 5)])
@pytest.mark.parametrize("edit", IDLE)
def test_stages_that_do_nothing_for_an_edit_are_found(monkeypatch, edit, vocab_size, slots):
    names = {stage.__name__ for stage in IDLE[edit]}
    if vocab_size == V or edit not in USERS:  # whose constants are of V tokens
        assert found(monkeypatch, prepared([edit], vocab_size, slots), IDLE[edit]) == names


@pytest.mark.parametrize("vocab_size", [127, 1000])
def test_stages_that_do_nothing_for_one_of_many_edits_are_found(monkeypatch, vocab_size):
    edits = [name for name in IDLE if name not in USERS]
    idle = {stage: made for name in edits for stage, made in IDLE[name].items()}
    names = {stage.__name__ for stage in idle} - {"with_finished"}  # what records a token knows whether it is an end
    assert found(monkeypatch, prepared(edits, vocab_size, 7), idle) == names


def test_a_record_of_draws_that_knows_no_end_is_found(monkeypatch):
    idle = {written.record_draws: partial(without_entries, written.record_draws)}
    assert found(monkeypatch, prepared(["penalties"], V, 5), idle) == {"record_draws"}


@pytest.mark.parametrize("vocab_size", [1, 2, V])
def test_stages_that_do_as_eager_torch_does_are_found_to_differ_nowhere(monkeypatch, vocab_size):
    edits = [name for name in IDLE if vocab_size == V or name not in USERS]
    assert found(monkeypatch, prepared(edits, vocab_size, 3), {}) == set()


def test_known_edits_leave_what_requests_have(monkeypatch):
    """Also the states of the user's edits, and the history, but for what padding writes."""
    sampler = prepared([*IDLE], V, 4)
    params = SamplingParams(logit_bias={3: 1.0}, repetition_penalty=1.5, extra_args={"RunningBias": {}})
    slot = sampler.add_request(params, [1, 2, 3], [4])
    sampler.edit_state("bias")[slot] = 2.5
    sampler.plan([slot])
    tables = sampler._edits
    read = [tables.rows, tables.history.table.entries[:-1], *tables.custom.states.every]
    before = [each.clone() for each in read]
    assert found(monkeypatch, sampler, {}) == set()
    assert difference(read, before) == ""


def test_what_is_written_is_compared_but_for_what_padding_leaves():
    """Several entries write into the last slot of the history, in no order."""
    sampler = prepared(["penalties"], V, 4)
    (history, rows), stops = sampler._edits.history.memory, sampler._edits.stops
    padding = torch.full((3,), -1), torch.arange(3), torch.tensor([5, 6, 7]), torch.zeros(3, dtype=torch.int32)
    made = outcome(written.record_draws, (history, rows, *padding, stops), writes=True)
    assert not made[0].entries[-1].any()
    assert torch.equal(made[0].entries[:-1], history.entries[:-1])
    assert torch.equal(made[-1].status, padding[-1])
    assert not made[-1].finished.any()


def test_compiled_stages_give_the_known_answers_of_edits():
    """Those that edit logits, each in its turn, and the one that writes what was drawn."""
    of_call, users = "token_bitmask", ("GreenList", "RunningBias")
    names = (*(name for name in IDLE if name != of_call and name not in USERS), *users)
    sampler, stages, none = prepared(names, V, 4, "eager"), CompiledStages(), torch.full((4,), -1)
    edits = sampler._edits.inputs(names, {}, torch.ones(4))
    like = SampleInputs(torch.zeros(4, V), none, none.clamp(min=0), sampler._requests.staged.table, None, edits)
    known_answers.compare(edited_step, sampler.modes[0], like, stages)
    given = none, none.clamp(min=0), none, none.to(torch.int32), sampler._edits.stops
    known_answers.compare_record(written.record_draws, sampler.modes[0], sampler._edits.history.memory, given, stages)
    assert len(stages._compiled) > 15
    assert stages.status().eager_stages == {}


def test_known_inputs_with_edits_lie_as_the_sampler_s_do_and_follow_from_the_round(monkeypatch):
    """Tables that share memory share it there too; torch's own generator is not asked."""
    sampler, made = prepared([*IDLE], V, 4), []
    hard_inputs = known_inputs.hard_inputs

    def recording(mode: Any, like: Any, number: int) -> Any:
        twice = hard_inputs(mode, like, number), hard_inputs(mode, like, number)
        made.append((like, *twice))
        return twice[0]

    monkeypatch.setattr(known_answers, "hard_inputs", recording)
    state = torch.get_rng_state()
    assert found(monkeypatch, sampler, {}) == set()
    assert torch.equal(torch.get_rng_state(), state)
    for like, first, second in made:
        assert difference(first, second) == ""
        read = ((each.edits, each.stops, each.noise) for each in (like, first))
        pairs = [*zip(*map(tree_leaves, read), strict=True)]
        tensors = [pair for pair in pairs if isinstance(pair[0], Tensor)]
        assert [layout(each) for each, _ in tensors] == [layout(each) for _, each in tensors]
        if like.edits is not None:
            entries = first.edits.tables.history.entries, first.noise.history.entries
            assert entries[0].data_ptr() == entries[1].data_ptr()
            assert entries[0].data_ptr() != like.noise.history.entries.data_ptr()
    assert any(like.edits is not None for like, *_ in made)


def layout(each: Tensor) -> tuple[Any, ...]:
    """What compiled code is made for."""
    return each.dtype, each.shape, each.stride(), each.storage_offset() % 16
