"""Masks of the real xgrammar: every token keeps to the grammar, with drafts and without, and drafts change nothing."""

import string

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams

pytestmark = pytest.mark.full

xgrammar = pytest.importorskip("xgrammar", reason="bash tools/run engines installs it")

TOKENS = [*string.printable, '{"', '":', "true", "false", "null", '"name"', '"age"', "12", ", "]
EOS, V = len(TOKENS), len(TOKENS) + 1
SCHEMA = '{"type":"object","properties":{"name":{"type":"string","maxLength":4},"age":{"type":"integer"}}}'
REQUESTS, MOST = 3, 48


def matcher():
    info = xgrammar.TokenizerInfo([*TOKENS, "</s>"], vocab_size=V, stop_token_ids=[EOS])
    grammar = xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(SCHEMA, any_whitespace=False)
    return xgrammar.GrammarMatcher(grammar)


def sampler_and_slots():
    sampler = Sampler(V, REQUESTS, backend="eager")
    params = [SamplingParams(seed=n, temperature=1.5, eos_token_id=EOS) for n in range(REQUESTS)]
    return sampler, [sampler.add_request(each) for each in params]


def rows():
    """Logits by position and request, so that tokens follow from the masks alone."""
    return torch.randn(MOST + 4, REQUESTS, V, generator=torch.Generator().manual_seed(3))


def plain_streams():
    """The tokens of each request, one a step."""
    sampler, slots = sampler_and_slots()
    matchers, found, live = [matcher() for _ in slots], [[] for _ in slots], list(range(REQUESTS))
    while live:
        mask = xgrammar.allocate_token_bitmask(len(live), V)
        for n, request in enumerate(live):
            matchers[request].fill_next_token_bitmask(mask, n)
        positions = torch.tensor([len(found[request]) for request in live])
        logits = torch.stack([rows()[len(found[request]), request] for request in live])
        plan = sampler.plan([slots[request] for request in live])
        drawn = sampler.sample(plan, logits, positions, token_bitmask=mask)
        for request, token, is_over in zip(tuple(live), drawn.tolist(), drawn.finished.tolist(), strict=True):
            assert matchers[request].accept_token(token)
            found[request].append(token)
            if is_over or len(found[request]) == MOST:
                live.remove(request)
    return found, matchers


def drafted_streams(plain, wrong):
    """The same with three drafts a step, of which ``wrong`` says which are replaced by any token."""
    sampler, slots = sampler_and_slots()
    matchers, found, live, steps = [matcher() for _ in slots], [[] for _ in slots], list(range(REQUESTS)), 0
    while live:
        steps += 1
        masks, logits, drafts = [], [], []
        for request in live:
            first = len(found[request])
            tokens = [*plain[request][first : first + 3], *[0] * 3][:3]
            tokens = [(token + 7) % V if wrong(first + n) else token for n, token in enumerate(tokens)]
            chain = torch.tensor([1, 2, 3, -1])
            mask = xgrammar.allocate_token_bitmask(4, V)
            matchers[request].traverse_draft_tree(chain, torch.full((4,), -1), torch.tensor([-1, *tokens]), mask)
            masks.append(mask)
            drafts.append(tokens)
            logits.append(rows()[first : first + 4, request])
        plan = sampler.plan([slots[request] for request in live], num_drafts=[3] * len(live))
        made = sampler.verify(
            plan,
            torch.cat(logits),
            torch.tensor(drafts),
            torch.tensor([len(found[request]) for request in live]),
            token_bitmask=torch.cat(masks),
        )
        for request, tokens, is_over in zip(tuple(live), made.tolist(), made.finished.tolist(), strict=True):
            for token in tokens[: MOST - len(found[request])]:
                assert matchers[request].accept_token(token)
                found[request].append(token)
            if is_over or len(found[request]) == MOST:
                live.remove(request)
    return found, steps


def test_tokens_keep_to_the_grammar_and_end_with_it():
    found, matchers = plain_streams()
    for tokens, each in zip(found, matchers, strict=True):
        assert each.is_terminated() == (tokens[-1] == EOS)
    assert any(tokens[-1] == EOS for tokens in found)
    assert len({tuple(tokens) for tokens in found}) == REQUESTS


@pytest.mark.parametrize(
    "wrong", [lambda n: False, lambda n: n % 3 == 1, lambda n: True], ids=["right", "some", "wrong"]
)
def test_drafts_with_masks_of_the_tree_change_no_token(wrong):
    plain, _ = plain_streams()
    found, steps = drafted_streams(plain, wrong)
    assert found == plain
    if not wrong(0) and not wrong(1):
        assert steps < max(map(len, plain))
