"""A request that is preempted and resumed in another slot goes on with the tokens that it would have got."""

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams

V, K, TOKENS = 60, 2, 12
PARAMS = SamplingParams(temperature=0.9, top_p=0.95, seed=3)
OTHER = SamplingParams(temperature=0.9, seed=4)


def logits_at(history: list[int], drafter: bool = False) -> Tensor:
    """A model: logits ``[1, V]`` that depend on all tokens before."""
    seed = hash((drafter, *history)) % 2**31
    return 2.0 * torch.randn(1, V, generator=torch.Generator().manual_seed(seed))


def block(sampler: Sampler, slot: int, tokens: list[int], rule: str) -> list[int]:
    """The tokens of one step: a plain one, or K drafts verified by a rule."""
    if rule == "sample":
        return sampler.sample(sampler.plan([slot]), logits_at(tokens), torch.tensor([len(tokens)])).token_ids.tolist()
    drafts, drafted = [], list(tokens)
    for j in range(K):
        position = torch.tensor([len(drafted)])
        plan, logits = sampler.plan([slot]), logits_at(drafted, drafter=True)
        drafts.append(sampler.draft(plan, logits, position, coupled=rule == "match", offset=j))
        drafted.append(int(drafts[-1].token_ids[0]))
    rows = torch.cat([logits_at(drafted[: len(tokens) + j]) for j in range(K + 1)])
    out = sampler.verify(sampler.plan([slot], num_drafts=[K]), rows, drafts, torch.tensor([len(tokens)]), rule)
    return out.token_ids[0, : int(out.num_emitted[0])].tolist()


def stream(rule: str, preempted_after: int | None, seed_of_next: int | None = None) -> list[int]:
    """Tokens of a request that leaves its slot to another after some steps, and comes back in a third."""
    sampler, tokens, steps = Sampler(V, 3, backend="eager"), list[int](), 0
    slot = sampler.add_request(PARAMS)
    while len(tokens) < TOKENS:
        if steps == preempted_after:
            params = sampler.request(slot)
            sampler.remove_request(slot)
            assert sampler.add_request(OTHER) == slot
            slot = sampler.add_request(
                params if seed_of_next is None else SamplingParams(temperature=0.9, top_p=0.95, seed=seed_of_next)
            )
            assert slot == 1
        tokens += block(sampler, slot, tokens, rule)
        steps += 1
    return tokens[:TOKENS]


@pytest.mark.parametrize("rule", ["sample", "match", "rejection", "block"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_preempted_request_goes_on_with_its_tokens(rule, steps):
    assert stream(rule, steps) == stream(rule, None)


def test_match_with_drafts_and_a_preemption_is_the_plain_stream():
    assert stream("match", 2) == stream("sample", None)


@pytest.mark.parametrize("rule", ["sample", "match", "rejection", "block"])
def test_another_seed_after_the_preemption_is_noticed(rule):
    assert stream(rule, 1, seed_of_next=99) != stream(rule, None)
