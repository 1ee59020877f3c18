"""Decoding with drafts: ``match`` changes no token whoever drafts, and accepted drafts save steps."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from compiled_sampler import Sampler
from tools.toy_engine.cached_model import CachedModel
from tools.toy_engine.decode_step import DecodeStep
from tools.toy_engine.drafters import Batch, Drafter, Drafts, drawn, likeliest, look_up, looked_up
from tools.toy_engine.engine import Decoded, Engine, Request, longest
from tools.toy_engine.runs import load_models, make_requests, prompt_texts
from tools.toy_engine.speculation import (
    WIDTH,
    Models,
    Pairing,
    Speculated,
    SpeculativeEngine,
    pairings,
)

NUM_SLOTS = 32


@pytest.fixture(scope="module")
def models() -> Models:
    return load_models()[0]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests(load_models()[1], prompt_texts(None), count=14, steps=16)


@pytest.fixture(scope="module")
def reference(models: Models, requests: list[Request]) -> Decoded:
    sampler = Sampler(models.target.config.vocab_size, 8, backend="eager")
    return Engine(DecodeStep(models.target, sampler, 8, longest(requests))).run(requests, 8)


@pytest.fixture
def sampler(models: Models) -> Sampler:
    return Sampler(models.target.config.vocab_size, NUM_SLOTS, backend="eager")


def engine_of(
    models: Models, sampler: Sampler, requests: Sequence[Request], uniform: bool = False
) -> SpeculativeEngine:
    return SpeculativeEngine(models, sampler, longest(requests), uniform)


def garbage(batch: Batch, vocab_size: int, generator: torch.Generator) -> Drafts:
    """Tokens out of nowhere, some of them no token ids, and 0 to K of them."""
    count = len(batch.histories)
    token_ids = torch.randint(-3, vocab_size + 3, (count, WIDTH), generator=generator)
    return Drafts(token_ids, tuple(torch.randint(WIDTH + 1, (count,), generator=generator).tolist()))


def ragged(batch: Batch, draft: Drafter, width: int = WIDTH) -> Drafts:
    """Another drafter's tokens, of which each request keeps 0 to ``width``."""
    return draft(batch)._replace(counts=tuple(len(history) % (width + 1) for history in batch.histories))


def drafters(model: CachedModel, sampler: Sampler) -> dict[str, Drafter]:
    coupled = partial(drawn, model=model, width=WIDTH, sampler=sampler, coupled=True)
    return {
        "likeliest": partial(likeliest, model=model, width=WIDTH),
        "coupled": coupled,
        "independent": partial(drawn, model=model, width=WIDTH, sampler=sampler, coupled=False),
        "look-up": partial(looked_up, width=WIDTH),
        "garbage": partial(garbage, vocab_size=model.vocab_size, generator=torch.Generator().manual_seed(0)),
        "ragged": partial(ragged, draft=coupled),
    }


def match(models: Models, sampler: Sampler, requests: Sequence[Request], name: str, most: int = 5) -> Speculated:
    engine = engine_of(models, sampler, requests)
    return engine.run(drafters(engine.drafter, sampler)[name], "match", requests, most)


@pytest.mark.parametrize(("name", "most"), [("likeliest", 2), ("garbage", 21), ("ragged", 2)])
def test_match_gives_the_text_without_drafts(
    models: Models, sampler: Sampler, requests: list[Request], reference: Decoded, name: str, most: int
) -> None:
    result = match(models, sampler, requests, name, most)
    assert result.decoded.streams == reference.streams
    assert result.decoded.compare(reference) == (reference.num_tokens, 0)
    assert sum(result.drafted) > 0
    assert sum(result.accepted) > 0 or name == "garbage"


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_one_mode_and_padding_change_no_token(
    models: Models, sampler: Sampler, requests: list[Request], rule: str
) -> None:
    results = []
    for uniform, most in ((False, 5), (True, 1), (True, 4)):
        engine = engine_of(models, sampler, requests, uniform)
        results.append(engine.run(drafters(engine.drafter, sampler)["independent"], rule, requests[::3], most))
    assert all(each.decoded.streams == results[0].decoded.streams for each in results)
    assert all(each.accepted == results[0].accepted for each in results)
    assert len({each.verifications for each in results}) == 1


def test_steps_are_saved_where_drafts_are_accepted(
    models: Models, sampler: Sampler, requests: list[Request], reference: Decoded
) -> None:
    engine = engine_of(models, sampler, requests)
    never = partial(ragged, draft=drafters(engine.drafter, sampler)["coupled"], width=0)
    result = engine.run(never, "match", requests, 5)
    assert (result.verifications, result.tokens_per_step) == (reference.num_tokens, 1.0)
    assert result.numbers(Pairing("never", "match", never), reference)["accepted_share"] == [None] * WIDTH
    assert match(models, sampler, requests, "coupled").verifications < reference.num_tokens * 0.8


@pytest.mark.parametrize(
    ("history", "drafts"),
    [
        ([], []),
        ([1, 2, 3, 1], []),
        ([1, 2, 3, 1, 2], [3, 1, 2]),
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5]),
        ([1, 2, 8, 9, 1, 2, 3, 1, 2], [3, 1, 2]),
        ([5, 5, 5, 5], [5]),
    ],
)
def test_look_up_drafts_what_followed_the_latest_place(history: list[int], drafts: list[int]) -> None:
    assert look_up(history, WIDTH) == drafts


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "compiled", "graph"])
def test_cuda_streams_are_the_cpu_ones(
    models: Models, requests: list[Request], reference: Decoded, backend: str
) -> None:
    vocab_size = models.target.config.vocab_size
    sampler, on_cpu = (
        Sampler(vocab_size, NUM_SLOTS, "cuda", backend=backend),
        Sampler(vocab_size, NUM_SLOTS, backend="eager"),
    )
    engine = engine_of(Models(*(each.to("cuda") for each in models)), sampler, requests, uniform=True)
    same_engine = engine_of(models, on_cpu, requests)
    for pairing, same in zip(pairings(engine.drafter, sampler), pairings(same_engine.drafter, on_cpu), strict=True):
        result = engine.run(pairing.draft, pairing.rule, requests, 5)
        assert not result.numbers(pairing, reference)["mismatches"]
        expected = same_engine.run(same.draft, same.rule, requests, 5)
        assert result.decoded.streams == expected.decoded.streams
