"""Logprobs of kept tokens without top-k and top-p: masses are relative to a maximum that the draw has found already."""

from dataclasses import replace

import pytest
import torch

from compiled_sampler.core.noise import TARGET
from compiled_sampler.core.rows import RowSlots
from compiled_sampler.core.stage import call
from compiled_sampler.logprobs import LogprobInputs, Logprobs
from compiled_sampler.passes.kept import cut_of_drawn
from compiled_sampler.pipeline.sample import edit_and_draw, sample_step
from compiled_sampler.pipeline.schedule import schedule_for
from tests.builders.inputs import modes_by_name
from tests.builders.logprobs import EVERYTHING, bare, differing, logprobs, processed_scale
from tests.builders.masks import masked_inputs, params_of, stages_watched
from tests.builders.sampler import same
from tests.for_a_gpu import schedule_by_bounds

SIZES = (1, 2, 127, 129, 600)
OF_KEPT = [*EVERYTHING, Logprobs(of="filtered"), Logprobs(num_kept=True), Logprobs(boundary=True)]


def schedules(mode, rows):
    """That of the CPU, and that of many rows on a GPU."""
    bounded = replace(schedule_by_bounds(mode, rows, 8), reads_masks=True)
    return schedule_for(mode, rows, torch.device("cpu")), bounded


def drawn(schedule, inputs, wanted, scale, run=call):
    """A step with logprobs."""
    row_slots = RowSlots(inputs.table, inputs.slots, inputs.positions)
    ids = None if wanted.token_ids is None else torch.tensor([wanted.token_ids] * len(inputs.logits))
    logprobs = LogprobInputs(wanted, ids, scale)
    return edit_and_draw(schedule, inputs.logits, row_slots, inputs.edits, logprobs, None, TARGET, run)


@pytest.mark.parametrize("wanted", OF_KEPT, ids=lambda each: each.label)
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("name", ["no_filter", "min_p"])
def test_logprobs_are_those_of_rows_that_nothing_is_known_of(name, vocab_size, wanted):
    """Of bare rows and of rows with masks."""
    if wanted.token_ids is not None and vocab_size < 4:
        wanted = replace(wanted, token_ids=(0,))
    masked, left = masked_inputs(name, "both", vocab_size)
    mode, scale = modes_by_name(vocab_size)[name], processed_scale(params_of(name))
    plain = sample_step(mode, left)
    for inputs in (left, masked):
        logits = torch.where(inputs.logits.isnan(), torch.nan, inputs.logits)  # with the sign that CUDA gives it
        inputs = inputs._replace(logits=logits)
        right = logprobs(mode, inputs, plain.token_ids, wanted, edited=left.logits, scale=scale)
        for schedule in schedules(mode, len(logits)):
            made = drawn(schedule, inputs, wanted, scale)
            assert same(bare(made), plain)
            assert differing(made.logprobs, right) == []


def stages_of(name, wanted):
    """Names of the stages that a GPU runs for many rows, in their order."""
    found, inputs = list[str](), masked_inputs(name, "both", 129)[1]
    drawn(schedules(modes_by_name(129)[name], len(inputs.logits))[1], inputs, wanted, None, stages_watched(found))
    return found


@pytest.mark.parametrize("wanted", [Logprobs(of="filtered"), Logprobs(num_kept=True)], ids=lambda each: each.label)
@pytest.mark.parametrize("name", ["no_filter", "min_p"])
def test_one_more_pass_sums_the_kept_tokens(name, wanted):
    stages = stages_of(name, wanted)
    assert "order_maxima" not in stages
    assert (stages.count("cut_of_drawn"), stages.count("kept_in_blocks")) == (1, 1)


def test_a_maximum_that_is_not_the_rows_changes_logprobs(monkeypatch):
    wanted, inputs = Logprobs(of="filtered"), masked_inputs("no_filter", "both", 129)[1]
    bounded = schedules(modes_by_name(129)["no_filter"], len(inputs.logits))[1]
    right = drawn(bounded, inputs, wanted, None)

    def other(row_max, *rest, **static):
        return cut_of_drawn(row_max + 1.0, *rest, **static)

    monkeypatch.setattr("compiled_sampler.pipeline.sample.cut_of_drawn", other)
    made = drawn(bounded, inputs, wanted, None)
    assert same(bare(made), bare(right))
    assert differing(made.logprobs, right.logprobs) == ["token"]
