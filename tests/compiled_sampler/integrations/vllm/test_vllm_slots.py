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
    slots.of_batch([state("a", [1, 2, 40], seed=9)])
    assert sampler.request(slot).seed == 9


def test_a_preempted_request_comes_back_with_all_its_tokens(sampler: Sampler) -> None:
    slots, logits = RequestSlots(sampler, 0), torch.zeros(1, 50)
    logits[0, 40], logits[0, 7] = 1.0, 0.9
    back = state("a", drawn=(40,), **PENALTIES)
    slots.of_batch([state("b"), back])
    slots.of_batch([state("b")])
    (slot,) = slots.of_batch([back])
    assert sampler.sample(sampler.plan([slot]), logits, torch.tensor([3])).tolist() == [7]


def test_tokens_that_the_host_does_not_know_end_their_request_alone_and_only_where_they_are_read(
    sampler: Sampler, caplog: pytest.LogCaptureFixture
) -> None:
    """An error in a step would end the engine for every request."""
    slots = RequestSlots(sampler, 0)
    unread, read, other = state("a", drawn=(4, -1), seed=1), state("b", drawn=(4, -1), **PENALTIES), state("c")
    biased = state("d", drawn=(4, -1), logit_bias={3: 1.0})
    first, second, *rest = slots.of_batch([unread, read, other, biased])
    assert second == -1
    assert len({first, *rest} - {-1}) == 3
    assert "request b ends without a token of its own: its tokens are on the device alone" in caplog.text
    read.output_token_ids = [4, 5]
    assert slots.of_batch([unread, read, other, biased]) == [first, -1, *rest]  # it has had its last token
    assert slots.of_batch([unread, other], {"e": "not here"}) == [first, rest[0]]
    assert slots.of_batch([state("e")], {"e": "top_k"}) == [-1]


def test_prompts_of_embeddings_and_ids_that_no_logit_has_count_for_nothing(sampler: Sampler) -> None:
    """Placeholders of images are such ids; ``min_tokens`` counts them, and an eos that no logit has masks nothing."""
    least = {"temperature": 0.0, "min_tokens": 2, "_all_stop_token_ids": {7, 60}, "seed": 1}
    embedded = state("a", [0, 0], **least)
    embedded.prompt_token_ids = None
    slots = RequestSlots(sampler, 0).of_batch([embedded, state("b", [50, 1, 99], **PENALTIES)])
    logits = torch.zeros(2, 50)
    logits[0, 7] = logits[1, 1] = 1.0
    logits[:, 3] = 0.9
    assert sampler.sample(sampler.plan(slots), logits, torch.tensor([3, 3])).tolist() == [3, 3]
    assert sampler.sample(sampler.plan(slots), logits, torch.tensor([4, 4])).tolist() == [7, 1]  # 3 was drawn


def test_each_slot_knows_the_token_that_ends_its_request(sampler: Sampler) -> None:
    slots = RequestSlots(sampler, 0)
    made = slots.of_batch([state("a", _eos_token_id=5), state("b", _eos_token_id=6)])
    assert slots.endings[made].tolist() == [5, 6]
