"""Decoding with drafts: accepted ones save steps. That they change no token the demo looks at."""

from collections.abc import Sequence
from functools import partial

import pytest

from compiled_sampler import Sampler
from tools.toy_engine.decode_step import DecodeStep
from tools.toy_engine.drafters import Batch, Drafts, drawn, look_up
from tools.toy_engine.engine import Decoded, Engine, Request, longest
from tools.toy_engine.runs import load_models, make_requests, prompt_texts
from tools.toy_engine.speculation import (
    WIDTH,
    Models,
    Pairing,
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


def test_steps_are_saved_where_drafts_are_accepted(
    models: Models, sampler: Sampler, requests: list[Request], reference: Decoded
) -> None:
    engine = engine_of(models, sampler, requests)
    coupled = partial(drawn, model=engine.drafter, width=WIDTH, sampler=sampler, coupled=True)

    def never(batch: Batch) -> Drafts:
        return coupled(batch)._replace(counts=(0,) * len(batch.histories))

    result = engine.run(never, "match", requests, 5)
    assert (result.verifications, result.tokens_per_step) == (reference.num_tokens, 1.0)
    assert result.numbers(Pairing("never", "match", never), reference)["accepted_share"] == [None] * WIDTH
    result = engine.run(coupled, "match", requests, 5)
    assert result.decoded.streams == reference.streams
    assert result.verifications < reference.num_tokens * 0.8


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
