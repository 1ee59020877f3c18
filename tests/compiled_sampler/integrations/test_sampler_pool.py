"""Samplers that calls share."""

import threading
from dataclasses import replace

import pytest
import torch

from compiled_sampler import SamplingParams
from compiled_sampler.integrations.sampler_pool import MOST_IDLE, SamplerForm, SamplerPool

PLAIN = [SamplingParams(seed=1), SamplingParams(seed=2), SamplingParams(seed=3)]


def form_of(params, longest=20):
    return SamplerForm.for_requests(params, 100, torch.float32, torch.device("cpu"), "eager", longest)


def test_sizes_are_powers_of_two_and_a_history_is_there_where_it_is_read():
    assert (form_of(PLAIN).max_num_requests, form_of(PLAIN).history_len) == (4, 0)
    penalized = form_of([SamplingParams(repetition_penalty=1.2)])
    assert (penalized.max_num_requests, penalized.history_len) == (1, 32)
    many = form_of(
        [SamplingParams(logit_bias=dict.fromkeys(range(600), 1.0)), SamplingParams(stop_token_ids=range(40))]
    )
    assert (many.edit_sizes.biases, many.edit_sizes.stops, many.edit_sizes.bad_words) == (1024, 64, 32)


def test_a_sampler_is_used_again_with_free_slots():
    pool, form = SamplerPool(), form_of(PLAIN)
    with pool.holding(form, PLAIN, [[1], [2], [3]]) as (first, slots):
        assert [first.request(slot).seed for slot in slots] == [1, 2, 3]
    with pool.holding(form, PLAIN[:1], [[1]]) as (second, _):
        assert second is first
        assert second.num_free_slots == 3


def test_calls_at_one_time_do_not_share():
    pool, form, found = SamplerPool(), form_of(PLAIN), []
    with pool.holding(form, PLAIN, [[], [], []]) as (first, _):

        def other():
            with pool.holding(form, PLAIN, [[], [], []]) as (second, _):
                found.append(second)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found[0] is not first


def test_a_request_that_is_refused_leaves_no_slot_behind():
    pool, params = SamplerPool(), [SamplingParams(seed=1), SamplingParams(repetition_penalty=1.2)]
    form = replace(form_of(params), history_len=0)
    with pytest.raises(ValueError, match="history_len"), pool.holding(form, params, [[], []]):
        pass
    with pool.holding(form, params[:1], [[]]) as (sampler, _):
        assert sampler.num_free_slots == 1


def test_few_idle_samplers_are_kept():
    pool = SamplerPool()
    for size in range(MOST_IDLE + 3):
        with pool.holding(replace(form_of(PLAIN), vocab_size=100 + size), PLAIN, [[], [], []]):
            pass
    assert len(pool._idle) == MOST_IDLE
