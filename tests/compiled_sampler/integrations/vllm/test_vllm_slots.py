"""Slots by request id while batches change."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_sampler import Sampler
from compiled_sampler.integrations.vllm.slots import RequestSlots
from tests.engines.vllm_stand_in import Given

PENALTIES = {"temperature": 0.0, "repetition_penalty": 2.0, "seed": 1}


def state(request_id: str, prompt: list[int] | None = None, drawn: tuple[int, ...] = (), **given: Any) -> Any:
    prompt = [1, 2] if prompt is None else prompt
    fields = {"prompt_token_ids": prompt, "num_prompt_tokens": len(prompt), "output_token_ids": list(drawn)}
    return SimpleNamespace(req_id=request_id, sampling_params=Given(**given), **fields)


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(50, 3, backend="eager", history_len=32)


def test_a_request_keeps_its_slot_while_it_is_in_the_batch_and_frees_it_behind(sampler: Sampler) -> None:
    slots, (a, b, c, d) = RequestSlots(sampler, 0), [state(name, seed=place) for place, name in enumerate("abcd")]
    first = slots.of_batch([a, b, c])
    assert slots.of_batch([c, a, b]) == [first[2], first[0], first[1]]
    second = slots.of_batch([d, b])
    assert second[1] == first[1]
    assert sampler.request(second[0]).seed == 3
    assert sampler.num_free_slots == 1
    slots.forget()
    assert sampler.num_free_slots == 3


def test_an_id_that_comes_again_for_another_request_or_a_longer_prompt_is_added_again(sampler: Sampler) -> None:
    slots, session = RequestSlots(sampler, 0), state("a", **PENALTIES)
    (slot,) = slots.of_batch([session])
    session.prompt_token_ids, session.num_prompt_tokens = [1, 2, 40], 3
    slots.of_batch([session])
    logits = torch.zeros(1, 50)
    logits[0, 40], logits[0, 7] = 1.0, 0.9
    assert sampler.sample(sampler.plan([slot]), logits, torch.tensor([3])).tolist() == [7]
    slots.of_batch([state("a", seed=9)])
    assert sampler.request(slot).seed == 9


def test_a_preempted_request_comes_back_with_all_its_tokens(sampler: Sampler) -> None:
    slots, logits = RequestSlots(sampler, 0), torch.zeros(1, 50)
    logits[0, 40], logits[0, 7] = 1.0, 0.9
    back = state("a", drawn=(40,), **PENALTIES)
    slots.of_batch([state("b"), back])
    slots.of_batch([state("b")])
    (slot,) = slots.of_batch([back])
    assert sampler.sample(sampler.plan([slot]), logits, torch.tensor([3])).tolist() == [7]


def test_tokens_that_the_host_does_not_know_are_an_error_only_where_they_are_read(sampler: Sampler) -> None:
    slots = RequestSlots(sampler, 0)
    slots.of_batch([state("a", drawn=(4, -1), seed=1)])
    with pytest.raises(RuntimeError, match="request b has tokens on the device alone; async_scheduling"):
        slots.of_batch([state("b", drawn=(4, -1), **PENALTIES)])
    embedded = state("c", **PENALTIES)
    embedded.prompt_token_ids = None
    with pytest.raises(RuntimeError, match="request c must have a prompt of tokens"):
        slots.of_batch([embedded])


def test_each_slot_knows_the_token_that_ends_its_request(sampler: Sampler) -> None:
    slots = RequestSlots(sampler, 0)
    made = slots.of_batch([state("a", _eos_token_id=5), state("b", _eos_token_id=6)])
    assert slots.endings[made].tolist() == [5, 6]
