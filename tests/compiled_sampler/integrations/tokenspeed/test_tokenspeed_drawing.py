"""TokenSpeed's adapter draws and verifies the tokens of ``Sampler``, on published classes and on stand-ins."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams
from tests.engines.tokenspeed_engine import KINDS, TOP_K_DISABLED, config_of, engine, named, params_of

VOCAB = 64
WIDTH = 4
LAWS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 11},
    {"temperature": 1.3, "seed": 2**32 - 1},
    {"top_k": 1, "seed": 0},
    {"top_p": 0.6, "temperature": 1.5, "seed": 2**63 + 5},
    {"min_p": 0.1, "seed": 3},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "seed": 7},
]
PLACES = [3, 15, 1, 7, 4, 9]
"""The pool index of each request."""
CACHED = [5, 0, 12, 100, 7, 2**20]
"""Tokens of each that were read before the step."""


@pytest.fixture(params=KINDS, autouse=True)
def modules(request: pytest.FixtureRequest) -> Iterator[None]:
    with engine(request.param):
        yield


def backend_of(**changed: Any) -> Any:
    from compiled_sampler.integrations.tokenspeed.drawing import CompiledSamplingBackend

    kind = type("Eager", (CompiledSamplingBackend,), {"backend": "eager"})
    return kind(config_of(**{"vocab_size": VOCAB, **changed}))


def prepared(laws: list[dict[str, Any]], places: list[int], backend: Any = None, **changed: Any) -> Any:
    backend = backend or backend_of(**changed)
    names = [f"{place}/{law}" for place, law in zip(places, laws, strict=True)]
    backend.prepare_step(names, places, [params_of(**law) for law in laws], WIDTH)
    return backend


def info_of(places: list[int], cached: list[int], **changed: Any) -> Any:
    lengths = torch.zeros(16, dtype=torch.int32)
    lengths[places] = torch.tensor(cached, dtype=torch.int32)
    fields = {"req_pool_indices": torch.tensor(places), "valid_cache_lengths": lengths, **changed}
    return named("sampling_batch_info:SamplingBatchInfo")(**fields)


def logits_of(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def outputs_of(logits: Tensor) -> Any:
    return SimpleNamespace(next_token_logits=logits, next_token_logprobs=None)


def sampler_with(laws: list[dict[str, Any]]) -> tuple[Sampler, list[int]]:
    sampler = Sampler(VOCAB, len(laws), backend="eager")
    return sampler, [sampler.add_request(SamplingParams(**law)) for law in laws]


def expected(logits: Tensor, laws: list[dict[str, Any]], positions: list[int]) -> list[int]:
    sampler, slots = sampler_with(laws)
    return sampler.sample(sampler.plan(slots), logits, torch.tensor(positions)).token_ids.tolist()


def test_a_prefill_draws_at_the_position_behind_all_that_was_read() -> None:
    backend, logits = prepared(LAWS, PLACES), logits_of(len(LAWS))
    with pytest.raises(RuntimeError, match="lengths must be bound"):
        backend.sample(outputs_of(logits), info_of(PLACES, CACHED))
    lengths = torch.tensor([0, 0, 21, 22, 23, 24, 25, 26], dtype=torch.int32)
    backend.bind_lengths(lengths)
    for cached in (CACHED, [0] * len(LAWS)):  # what a prefix cache held changes nothing
        tokens, counts = backend.sample(outputs_of(logits), info_of(PLACES, cached, batch_row_offset=2))
        assert tokens.dtype == torch.int32
        assert tokens.tolist() == expected(logits, LAWS, [21, 22, 23, 24, 25, 26])
        assert counts.tolist() == [1] * len(LAWS)


def test_a_decode_without_drafts_draws_at_the_position_behind_its_input_token() -> None:
    backend, logits = prepared(LAWS, PLACES), logits_of(len(LAWS))
    last = torch.zeros(len(LAWS), 1, dtype=torch.int32)
    tokens, counts = backend.verify(outputs_of(logits), info_of(PLACES, CACHED), last, tree=None)
    assert tokens.tolist() == expected(logits, LAWS, [each + 1 for each in CACHED])
    assert counts.tolist() == [1] * len(LAWS)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_are_verified_by_match_and_the_path_is_left_where_tokenspeed_reads_it(right: int) -> None:
    backend, count = prepared(LAWS, PLACES), len(LAWS)
    logits = logits_of(count * WIDTH)
    by_place = logits.view(count, WIDTH, VOCAB).unbind(1)
    plain = [expected(rows, LAWS, [each + 1 + place for each in CACHED]) for place, rows in enumerate(by_place)]
    drafts = torch.tensor(plain[:-1]).T.clone()
    drafts[:, right:] = (drafts[:, right:] + 1) % VOCAB
    candidates = torch.cat([torch.zeros(count, 1, dtype=torch.int64), drafts], 1).to(torch.int32)
    tokens, counts = backend.verify(outputs_of(logits), info_of(PLACES, CACHED), candidates, tree=None)
    assert counts.tolist() == [right + 1] * count
    assert tokens.view(count, WIDTH)[:, : right + 1].tolist() == torch.tensor(plain).T[:, : right + 1].tolist()
    path = torch.arange(count * WIDTH).view(count, WIDTH)
    path[:, right + 1 :] = -1
    assert backend.accepted_path(count, WIDTH).tolist() == path.tolist()


@pytest.mark.parametrize("rows", [[2], [0, 5], [1], [3], [4, 1]], ids=str)
def test_a_request_draws_the_same_in_another_batch_and_its_cheaper_mode(rows: list[int]) -> None:
    laws, places, cached = ([each[row] for row in rows] for each in (LAWS, PLACES, CACHED))
    logits, last = logits_of(len(LAWS)), torch.zeros(len(LAWS), 1, dtype=torch.int32)
    together = prepared(LAWS, PLACES).verify(outputs_of(logits), info_of(PLACES, CACHED), last, tree=None)[0]
    alone = prepared(laws, places).verify(outputs_of(logits[rows]), info_of(places, cached), last[rows], tree=None)[0]
    assert alone.tolist() == together[rows].tolist()


@pytest.mark.parametrize(
    ("rows", "variant"),
    [([2], "greedy"), ([1, 2], "no_filter"), ([0, 5, 2], "top_k_top_p[64]"), ([3], "default"), ([0, 1], "default")],
)
def test_the_graph_that_is_replayed_is_that_of_the_cheapest_mode(rows: list[int], variant: str) -> None:
    backend = prepared([LAWS[row] for row in rows], [PLACES[row] for row in rows], vocab_size=1000)
    assert backend.cuda_graph_replay_variant(WIDTH) == variant
    assert variant in backend.cuda_graph_capture_variants(WIDTH)
    backend.prepare_capture_variant(8, WIDTH, "greedy")
    assert backend.cuda_graph_replay_variant(WIDTH) == "greedy"
    backend.prepare_capture(8)
    assert backend.cuda_graph_replay_variant(WIDTH) == "default"
    with pytest.raises(ValueError, match=r"variant must be one of .*, got 'triton_top_k'"):
        backend.prepare_capture_variant(8, WIDTH, "triton_top_k")


def test_a_pool_index_that_another_request_gets_has_its_parameters() -> None:
    backend, logits = prepared(LAWS, PLACES), logits_of(len(LAWS))
    other = [{**law, "seed": 99, "temperature": 2.0, "top_k": TOP_K_DISABLED} for law in LAWS]
    last = torch.zeros(len(LAWS), 1, dtype=torch.int32)
    tokens = prepared(other, PLACES, backend).verify(outputs_of(logits), info_of(PLACES, CACHED), last, tree=None)[0]
    assert tokens.tolist() == expected(logits, other, [each + 1 for each in CACHED])


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "seed"])
def test_each_parameter_is_seen_in_the_tokens(name: str) -> None:
    changed = {"temperature": 3.0, "top_k": 2, "top_p": 0.3, "min_p": 0.3, "seed": 100}[name]
    backend, logits = backend_of(max_bs=15), logits_of(15)
    places, last = list(range(1, 16)), torch.zeros(15, 1, dtype=torch.int32)
    drawn = []
    for law in ({}, {name: changed}):
        laws = [{"seed": place, **law} for place in places]
        prepared(laws, places, backend)
        drawn.append(backend.verify(outputs_of(logits), info_of(places, places), last, tree=None)[0].tolist())
    assert drawn[0] != drawn[1]


def test_a_grammars_mask_is_applied_and_a_row_without_any_token_gets_token_0() -> None:
    def only(token: int) -> Any:
        def apply(logits: Tensor, vocab_mask: Tensor) -> None:
            keep = logits[:, token].clone()
            logits.fill_(-torch.inf)
            logits[:, token] = keep

        return apply

    backend, last = prepared(LAWS, PLACES), torch.zeros(len(LAWS), 1, dtype=torch.int32)
    info = info_of(PLACES, CACHED, vocab_mask=torch.ones(1), apply_vocab_mask=only(17))
    logits = logits_of(len(LAWS))
    assert backend.verify(outputs_of(logits), info, last, tree=None)[0].tolist() == [17] * len(LAWS)
    logits[:, 17] = -torch.inf
    tokens, counts = backend.verify(outputs_of(logits), info_of(PLACES, CACHED), last, tree=None)
    assert (tokens.tolist(), counts.tolist()) == ([0] * len(LAWS), [1] * len(LAWS))


def test_logprobs_are_tokenspeeds() -> None:
    backend, last = prepared(LAWS, PLACES, enable_output_logprobs=True), torch.zeros(len(LAWS), 1, dtype=torch.int32)
    logits, outputs = logits_of(len(LAWS)), outputs_of(logits_of(len(LAWS)))
    tokens = backend.verify(outputs, info_of(PLACES, CACHED), last, tree=None)[0]
    law = torch.log_softmax(logits, -1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(outputs.next_token_logprobs, law)


def test_an_engine_whose_drafts_are_drawn_and_a_tree_are_refused() -> None:
    with pytest.raises(ValueError, match="enable_speculative_sampling must be off"):
        backend_of(enable_speculative_sampling=True)
    with pytest.raises(NotImplementedError, match="tree must be None"):
        backend_of().verify(outputs_of(logits_of(1)), info_of([1], [1]), torch.zeros(1, 1), tree=object())
    assert not backend_of().supports_tree_verify
