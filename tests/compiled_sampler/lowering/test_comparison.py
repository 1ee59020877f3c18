"""Stages compared with eager torch: one that differs runs in eager torch and is named, and nothing is written."""

import math
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler import Sampler, SamplingParams, Verification
from compiled_sampler.core.order import row_logits
from compiled_sampler.edits import bad_words, bias, custom, masks, min_tokens, penalties, recording, watermark
from compiled_sampler.edits.names import CONSUMES, EDITS, RESTORES
from compiled_sampler.edits.recording import DrawEnds
from compiled_sampler.lowering import compiled_stages
from compiled_sampler.lowering.comparison import KINDS, difference, hard_rows, outcome
from compiled_sampler.lowering.compiled_stages import COMPARISON_VARIABLE, CompiledStages, StageWarning
from compiled_sampler.passes import row_filters
from compiled_sampler.passes.maxima import order_maxima
from compiled_sampler.passes.race import first_from_blocks
from tests.builders import custom_edits, edit_states
from tests.builders.sampler import REQUESTS, V, drawn, same, shared_sampler, stages_stay_eager

USERS = {**custom_edits.EDITS, **edit_states.EDITS}
pytestmark = [
    pytest.mark.filterwarnings("ignore::compiled_sampler.lowering.inductor.versions.UnknownTorchWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch's own, passed on by pytest.warns
]


def off_by_one_bit(*tensors, **static):
    """What ``first_from_blocks`` makes, the lowest bit of whose integers is flipped."""
    made = first_from_blocks(*tensors, **static)
    return tree_map_only(Tensor, lambda x: x ^ 1 if x.dtype == torch.int64 else x, made)


@pytest.fixture
def planted():
    """A stage is compiled wrongly."""
    with stages_stay_eager({first_from_blocks: off_by_one_bit}):
        yield


@pytest.fixture
def unknown_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "99.2.0")


def draw_right(sampler):
    """Whether rows of the classes of row counts get the tokens of eager torch."""
    batches = [[REQUESTS["greedy"]] * rows for rows in (1, 3)]
    pairs = [(batch, torch.randn(len(batch), V)) for batch in batches]
    return all(same(drawn(sampler, *pair), drawn(shared_sampler(V, backend="eager"), *pair)) for pair in pairs)


@pytest.mark.usefixtures("planted", "unknown_torch")
@pytest.mark.parametrize("first_call", [lambda sampler: sampler.warmup(modes=["greedy"]), draw_right])
def test_on_an_unknown_torch_a_stage_that_is_wrong_by_a_bit_runs_eager_and_is_named_once(first_call):
    sampler = Sampler(V, 4, backend="compiled")
    with pytest.warns(StageWarning, match=r"stage first_from_blocks runs in eager torch.*differs") as caught:
        first_call(sampler)
    assert draw_right(sampler)
    assert sum(issubclass(each.category, StageWarning) for each in caught) == 1
    assert list(sampler.statistics().lowering.eager_stages) == ["first_from_blocks"]


@pytest.mark.usefixtures("planted")
def test_without_a_comparison_the_difference_would_be_seen(monkeypatch):
    monkeypatch.delenv(COMPARISON_VARIABLE, raising=False)
    assert not draw_right(Sampler(V, 4, backend="compiled"))


def test_hard_rows_lie_as_the_tensor_does_and_are_of_every_kind():
    like = torch.zeros(len(KINDS), V + 5, dtype=torch.bfloat16)[:, :V]
    rows = hard_rows(like, are_probabilities=False)
    assert (rows.shape, rows.dtype, rows.stride()) == (like.shape, like.dtype, like.stride())
    assert difference(rows, hard_rows(like, are_probabilities=False)) == ""
    assert rows.isnan().any()
    assert (rows == math.inf).any()
    assert (rows == -math.inf).all(-1).any()
    assert ((rows != 0) & (rows.abs() < 1e-38)).any()
    probabilities = hard_rows(like.float(), are_probabilities=True)
    assert not ((probabilities < 0) | (probabilities > 1)).any()


def nothing_written(*tensors, **static):
    """What a stage does that writes nothing and returns nothing."""


def ends_alone(*tensors):
    """The ends of draws, as a stage has them that records no draw."""
    *_, token_ids, status, lists = tensors
    return DrawEnds(status, recording.are_ends(token_ids, status, tensors[2], lists))


def logits_alone(logits, *rest, vocab_size, **static):
    """The logits, as a stage gets them that edits rows."""
    return row_logits(logits, vocab_size).clone()


def logits_of(stage, x, *rest):
    """The tokens that a stage writes, with the logits that they have."""
    ids, _ = stage(x, *rest)
    return ids, x.gather(1, ids)


def without_entries(stage, *tensors):
    """What a stage makes where no token ends a request."""
    return stage(*tensors[:-1], tensors[-1]._replace(counts=torch.zeros_like(tensors[-1].counts)))


IDLE = {
    "token_bitmask": {masks.masked: logits_alone},
    "allowed_token_ids": {masks.masked: logits_alone},
    "logit_bias": {bias.write_biases: nothing_written},
    "min_tokens": {min_tokens.without_stops: partial(logits_of, min_tokens.without_stops)},
    "penalties": {
        penalties.write_penalties: nothing_written,
        recording.record_draws: ends_alone,
        recording.record_drafts: nothing_written,
        recording.record_ends: lambda *tensors: tensors[-1],
    },
    "bad_words": {bad_words.without_bad_words: partial(logits_of, bad_words.without_bad_words)},
    "watermark": {watermark.noise_positions: lambda slots, positions, *tables: positions.clone()},
    "stops": {
        recording.with_finished: partial(without_entries, recording.with_finished),
        recording.cut_at_stop: partial(without_entries, recording.cut_at_stop),
    },
    "top_n_sigma": {row_filters.longest_kept: lambda sums, row_max, *rest: torch.full_like(row_max, torch.inf)},
    "min_k": {
        row_filters.cliff_logit: lambda ordered, *rest: torch.full_like(ordered[:, 0], -torch.inf, dtype=torch.float32)
    },
    "p_less": {row_filters.p_less_cut: lambda sums, row_max, *rest: torch.zeros_like(row_max, dtype=torch.int64)},
    "typical_p": {row_filters.with_digit: lambda search, masses: search},
    "xtc": {
        row_filters.top_choice_mass: lambda sums, row_max, *rest: torch.full_like(row_max, 2**63 - 1, dtype=torch.int64)
    },
    **{name: {custom.customized: logits_alone} for name in USERS},
}
"""Stages that read the table of an edit, and what each would do if it did nothing.

Not DRY, which finds no repetition of the one token that copies hold, nor what a filter cuts in a later stage.
"""


def prepared(*edits, slots=5):
    """A sampler whose warm-up prepares batches with the edits."""
    ways = [Verification("match", 2)] if {"penalties", "stops"} & {*edits} else []
    users = [edit for name, edit in USERS.items() if name in edits]
    sizes = {"history_len": 40, "buckets": [slots], "verifications": ways}
    return Sampler(custom_edits.V, slots, backend="compiled", captured_edits=[edits], edits=users, **sizes)


def found(monkeypatch, sampler, idle):
    """Stages that a warm-up finds to differ, where some are idle and all others those of eager torch."""
    monkeypatch.setenv(COMPARISON_VARIABLE, "1")
    with stages_stay_eager(idle), warnings.catch_warnings():
        warnings.simplefilter("ignore", StageWarning)
        sampler.warmup(modes=["greedy"])
    return {*sampler.statistics().lowering.eager_stages}


@pytest.mark.parametrize("edit", IDLE)
def test_a_stage_that_does_nothing_for_an_edit_is_found(monkeypatch, edit):
    assert found(monkeypatch, prepared(edit), IDLE[edit]) == {stage.__name__ for stage in IDLE[edit]}


def test_stages_that_do_as_eager_torch_does_differ_nowhere_and_are_compared_once(monkeypatch):
    """Nor is anything written that requests have: the lists, the states of the user's edits, the history."""
    names = [name for name in EDITS if name not in (CONSUMES, RESTORES)]
    sampler = prepared(*names, *USERS)
    params = SamplingParams(logit_bias={3: 1.0}, repetition_penalty=1.5, extra_args={"RunningBias": {}})
    slot = sampler.add_request(params, [1, 2, 3], [4])
    sampler.edit_state("bias")[slot] = 2.5
    sampler.plan([slot])
    tables = sampler._edits
    read = [tables.rows, tables.history.table.entries[:-1], *tables.custom.states.every]
    before = [tensor.clone() for tensor in read]
    with mock.patch.object(compiled_stages, "fault", wraps=compiled_stages.fault) as comparing:
        assert found(monkeypatch, sampler, {}) == set()
        count = comparing.call_count
        assert count >= 30
        sampler.warmup(modes=["greedy"])
        assert comparing.call_count == count
    assert difference(read, before) == ""


def test_a_warmup_compares_nothing_on_a_known_torch(monkeypatch):
    monkeypatch.delenv(COMPARISON_VARIABLE, raising=False)
    with mock.patch.object(compiled_stages, "fault") as comparing:
        shared_sampler(V).warmup(modes=["greedy"])
    assert not comparing.called


def test_an_edit_that_promises_no_equal_bits_is_not_compared(monkeypatch):
    monkeypatch.setattr(type(USERS["NoDigits"]), "bit_exact", False)
    assert found(monkeypatch, prepared("NoDigits"), IDLE["NoDigits"]) == set()


def test_what_is_written_is_compared_but_for_what_padding_leaves():
    """Several entries write into the last slot of the history, in no order."""
    sampler = prepared("penalties", slots=4)
    (history, rows), ends = sampler._edits.history.memory, sampler._edits.stops
    padding = torch.full((3,), -1), torch.arange(3), torch.tensor([5, 6, 7]), torch.zeros(3, dtype=torch.int32)
    made = outcome(recording.record_draws, (history, rows, *padding, ends), writes=True)
    assert not made[0].entries[-1].any()
    assert torch.equal(made[0].entries[:-1], history.entries[:-1])
    assert torch.equal(made[-1].status, padding[-1])
    assert not made[-1].finished.any()


@pytest.mark.parametrize(
    ("found", "wanted", "why"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, -math.nan]), ""),
        ((torch.tensor([1]), None), (torch.tensor([1]), None), ""),
        (torch.tensor([math.nan]).view(torch.int32), torch.tensor([2**31 - 1], dtype=torch.int32), ""),
        (torch.tensor([math.inf]).view(torch.int32), torch.tensor([2**31 - 1], dtype=torch.int32), "differs in 1 of 1"),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), "differs in 1 of 2"),
        (torch.tensor([1.0]).half(), torch.tensor([1.0]), "float16"),
        (torch.tensor([[1]]), torch.tensor([1]), r"\[1, 1\]"),
        ((torch.tensor([1]), None), (torch.tensor([1]), torch.tensor([1])), "NoneType"),
        ((torch.tensor([1]),), torch.tensor([1]), ""),
        ((torch.tensor([1]), torch.tensor([1])), torch.tensor([1]), "2 results instead of 1"),
    ],
)
def test_results_are_compared_bit_for_bit(found, wanted, why):
    reason = difference(found, wanted)
    assert bool(reason) == bool(why)
    assert why.replace("\\", "") in reason


def test_after_a_warmup_a_stage_that_was_called_before_is_compared_at_its_next_call(monkeypatch):
    """As ``functional.warmup`` leaves it, which lists no steps."""
    monkeypatch.setenv(COMPARISON_VARIABLE, "1")
    monkeypatch.setattr(CompiledStages, "compiles_at_calls", False)
    stages = CompiledStages()
    run = partial(stages, order_maxima, torch.randn(3, V), vocab_size=V, block=64, by_bits=False)
    with stages_stay_eager():
        eager = run()
        with stages.precompiling(torch.device("cpu")):
            pass
        with mock.patch.object(compiled_stages, "fault", wraps=compiled_stages.fault) as comparing:
            assert difference((run(), run()), (eager, eager)) == ""
    assert comparing.call_count == 1
    assert not stages.status().eager_stages
