"""What the sampler of a V1 runner keeps and returns: slots by request id, and results in vLLM's forms."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from compiled_sampler import Sampler
from compiled_sampler.integrations.vllm.engine_sampler import (
    EngineSampler,
    GaplessLogprobs,
    with_endings,
    without_gaps,
)
from compiled_sampler.integrations.vllm.parameters import Settings
from compiled_sampler.integrations.vllm.v1_sampler import BatchRequests, CheckedRequest
from tests.engines.vllm_stand_in import Given, runner

pytestmark = pytest.mark.full

PENALTIES = {"temperature": 0.0, "repetition_penalty": 2.0, "seed": 1}


def state(request_id, prompt=(1, 2), drawn=(), **given):
    fields = {"prompt_token_ids": list(prompt), "num_prompt_tokens": len(prompt), "output_token_ids": list(drawn)}
    return SimpleNamespace(req_id=request_id, sampling_params=Given(**given), **fields)


class Slots:
    """The requests of batches in the slots of a sampler."""

    def __init__(self):
        given = 50, 3, torch.zeros(1, 50), Settings(backend="eager"), torch.int32
        self.engine = EngineSampler(runner().vllm_config, *given)
        self.sampler: Sampler = self.engine.sampler
        self.requests = BatchRequests(self.engine)

    def of_batch(self, states, refused=None):
        """The slots of a batch, some of whose requests are refused."""
        checked = {}
        for each in states:
            own, reason = self.engine.checked(each.sampling_params, each.req_id)
            reason = (refused or {}).get(each.req_id, reason)
            checked[each.req_id] = CheckedRequest(each.sampling_params, None if reason else own, reason)
        return self.requests.of_batch(states, checked).slots.tolist()


@pytest.fixture
def slots():
    return Slots()


def test_a_request_keeps_its_slot_while_it_is_in_the_batch_and_frees_it_behind(slots):
    a, b, c, d = (state(name, seed=place) for place, name in enumerate("abcd"))
    first = slots.of_batch([a, b, c])
    assert slots.of_batch([c, a, b]) == [first[2], first[0], first[1]]
    second = slots.of_batch([d, b])
    assert second[1] == first[1]
    assert slots.sampler.request(second[0]).seed == 3
    assert slots.sampler.num_free_slots == 1
    slots.requests.forget()
    assert slots.sampler.num_free_slots == 3


def test_an_id_that_comes_again_for_another_request_or_a_longer_prompt_is_added_again(slots):
    sampler, session = slots.sampler, state("a", **PENALTIES)
    (slot,) = slots.of_batch([session])
    session.prompt_token_ids, session.num_prompt_tokens = [1, 2, 40], 3
    slots.of_batch([session])
    logits = torch.zeros(1, 50)
    logits[0, 40], logits[0, 7] = 1.0, 0.9
    assert sampler.sample(sampler.plan([slot]), logits, torch.tensor([3])).tolist() == [7]
    slots.of_batch([state("a", [1, 2, 40], seed=9)])
    assert sampler.request(slot).seed == 9


def test_a_preempted_request_comes_back_with_all_its_tokens(slots):
    sampler, logits = slots.sampler, torch.zeros(1, 50)
    logits[0, 40], logits[0, 7] = 1.0, 0.9
    back = state("a", drawn=(40,), **PENALTIES)
    slots.of_batch([state("b"), back])
    slots.of_batch([state("b")])
    (slot,) = slots.of_batch([back])
    assert sampler.sample(sampler.plan([slot]), logits, torch.tensor([3])).tolist() == [7]


def test_tokens_that_the_host_does_not_know_end_their_request_alone_and_only_where_they_are_read(slots, caplog):
    """An error in a step would end the engine for every request."""
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


def test_prompts_of_embeddings_and_ids_that_no_logit_has_count_for_nothing(slots):
    """Placeholders of images are such ids; ``min_tokens`` counts them, and an eos that no logit has masks nothing."""
    least = {"temperature": 0.0, "min_tokens": 2, "_all_stop_token_ids": {7, 60}, "seed": 1}
    embedded = state("a", [0, 0], **least)
    embedded.prompt_token_ids = None
    sampler, held = slots.sampler, slots.of_batch([embedded, state("b", [50, 1, 99], **PENALTIES)])
    logits = torch.zeros(2, 50)
    logits[0, 7] = logits[1, 1] = 1.0
    logits[:, 3] = 0.9
    assert sampler.sample(sampler.plan(held), logits, torch.tensor([3, 3])).tolist() == [3, 3]
    assert sampler.sample(sampler.plan(held), logits, torch.tensor([4, 4])).tolist() == [7, 1]  # 3 was drawn


def test_a_batch_knows_the_tokens_that_end_its_requests(slots):
    made = slots.of_batch([state("a", _eos_token_id=5), state("b", _eos_token_id=6)])
    assert slots.engine.planned(np.array(made)).ending.tolist() == [5, 6]
    assert slots.engine.planned(np.array([made[1], -1]), None, {1: 6}).ending == 6


def test_the_rows_of_a_batch_that_stays_are_found_again(slots):
    states = {name: state(name, seed=1) for name in "ab"}
    slots.of_batch([states["a"], states["b"]])
    batch = SimpleNamespace(req_ids=["a", "b"], num_reqs=2, num_prompt_tokens=np.array([2, 2, 9], np.int32))
    assert slots.requests.still(batch, states) is not None
    batch.req_ids = ["b", "a"]
    assert slots.requests.still(batch, states) is None
    batch.req_ids, batch.num_prompt_tokens[1] = ["a", "b"], 3  # a session went on
    assert slots.requests.still(batch, states) is None
    batch.num_prompt_tokens[1] = 2
    assert slots.requests.still(batch, {**states, "b": state("b", seed=2)}) is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_request_that_would_get_no_token_gets_the_one_that_ends_it(dtype):
    drawn = torch.tensor([3, -1, 5], dtype=dtype)
    made = with_endings(drawn, torch.tensor([7, 8, 9]))
    assert made.dtype == dtype
    assert made.tolist() == [3, 8, 5]
    assert with_endings(drawn, 2).tolist() == [3, 2, 5]
    assert with_endings(torch.tensor([-1, 0], dtype=dtype), 0).tolist() == [0, 0]
    assert drawn.tolist() == [3, -1, 5]


def test_gaps_after_the_kept_tokens_are_filled_with_other_tokens_on_the_host():
    given = np.array([[2, 2, 0, -1, -1], [4, 4, 3, 2, 1], [1, 1, -1, -1, -1]])
    assert without_gaps(given).tolist() == [[2, 2, 0, 1, 3], [4, 4, 3, 2, 1], [1, 1, 0, 2, 3]]
    of_all = without_gaps(np.array([[5, 5, 2, 0, -1, -1, -1]]))
    assert sorted(of_all[0, 1:].tolist()) == list(range(6))
    made = GaplessLogprobs(torch.tensor([[2, 2, -1]]), torch.zeros(1, 3), torch.tensor([1]))
    for each in (made, made.to_cpu_nonblocking(), made.filter(torch.tensor([True]))):
        assert each.tolists().logprob_token_ids.tolist() == [[2, 2, 0]]
