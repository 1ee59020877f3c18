"""Decoding with drafts: ``match`` changes no token whoever drafts, better drafters and rules accept more."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams
from tools import demo
from tools.toy_engine.corpus import EOS_ID
from tools.toy_engine.decode_step import DecodeStep
from tools.toy_engine.drafters import Batch, Drafter, Drafts, drawn, likeliest, look_up, looked_up
from tools.toy_engine.engine import Decoded, Engine, Request
from tools.toy_engine.ngram_model import NgramModel
from tools.toy_engine.runs import make_requests
from tools.toy_engine.speculation import (
    WIDTH,
    Pairing,
    Speculated,
    SpeculativeEngine,
    finished_stream,
    make_batch,
    pairings,
    row_contexts,
)

WORDS = ["the", "a", "cat", "dog", "mat", "sat", "ran", "on", "under", "with", "red", "big", "small", "house", "tree"]
LINES = [" ".join(WORDS[(i * i + 3 * j * (i % 5)) % len(WORDS)] for j in range(3 + i % 17)) for i in range(60)]
NUM_SLOTS = 64


@pytest.fixture(scope="module")
def model() -> NgramModel:
    return NgramModel.from_documents(LINES)


@pytest.fixture(scope="module")
def requests(model: NgramModel) -> list[Request]:
    return make_requests(model, LINES, count=21, steps=24)


@pytest.fixture(scope="module")
def reference(model: NgramModel, requests: list[Request]) -> Decoded:
    return Engine(DecodeStep(model, Sampler(model.vocab_size, 8, backend="eager"), 8)).run(requests, 8)


@pytest.fixture
def sampler(model: NgramModel) -> Sampler:
    return Sampler(model.vocab_size, NUM_SLOTS, backend="eager")


@pytest.fixture
def drawn_requests(model: NgramModel) -> list[Request]:
    """Requests that draw from whole rows: no filter makes drafter and target agree on what is left."""
    prompts = [tuple(model.encode(line)[:2]) for line in LINES]
    return [Request(i, prompts[i % len(prompts)], SamplingParams(seed=i), max_tokens=24) for i in range(NUM_SLOTS)]


def garbage(batch: Batch, vocab_size: int, generator: torch.Generator) -> Drafts:
    """Tokens out of nowhere, some of them no token ids, and 0 to K of them."""
    count = len(batch.histories)
    token_ids = torch.randint(-3, vocab_size + 3, (count, WIDTH), generator=generator)
    return Drafts(token_ids, tuple(torch.randint(WIDTH + 1, (count,), generator=generator).tolist()))


def ragged(batch: Batch, draft: Drafter, width: int = WIDTH) -> Drafts:
    """Another drafter's tokens, of which each request keeps 0 to ``width``."""
    return draft(batch)._replace(counts=tuple(len(history) % (width + 1) for history in batch.histories))


def drafters(model: NgramModel, sampler: Sampler) -> dict[str, Drafter]:
    coupled = partial(drawn, model=model, width=WIDTH, sampler=sampler, coupled=True)
    return {
        "likeliest": partial(likeliest, model=model, width=WIDTH),
        "coupled": coupled,
        "independent": partial(drawn, model=model, width=WIDTH, sampler=sampler, coupled=False),
        "look-up": partial(looked_up, width=WIDTH),
        "garbage": partial(garbage, vocab_size=model.vocab_size, generator=torch.Generator().manual_seed(0)),
        "ragged": partial(ragged, draft=coupled),
    }


def match(model: NgramModel, sampler: Sampler, requests: Sequence[Request], name: str, most: int = 5) -> Speculated:
    return SpeculativeEngine(model, sampler).run(drafters(model, sampler)[name], "match", requests, most)


@pytest.mark.parametrize("most", [2, 21])
@pytest.mark.parametrize("name", ["likeliest", "coupled", "independent", "look-up", "garbage", "ragged"])
def test_match_gives_the_text_without_drafts(
    model: NgramModel, sampler: Sampler, requests: list[Request], reference: Decoded, name: str, most: int
) -> None:
    result = match(model, sampler, requests, name, most)
    assert result.decoded.streams == reference.streams
    assert result.decoded.compare(reference) == (reference.num_tokens, 0)
    assert sum(result.drafted) > 0
    assert sum(result.accepted) > 0


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_one_mode_and_padding_change_no_token(
    model: NgramModel, sampler: Sampler, requests: list[Request], rule: str
) -> None:
    draft = drafters(model, sampler)["independent"]
    results = [
        SpeculativeEngine(model, sampler, uniform).run(draft, rule, requests[::3], most)
        for uniform, most in ((False, 5), (True, 1), (True, 4))
    ]
    assert all(each.decoded.streams == results[0].decoded.streams for each in results)
    assert all(each.accepted == results[0].accepted for each in results)
    assert len({each.verifications for each in results}) == 1


def test_steps_are_saved_where_drafts_are_accepted(
    model: NgramModel, sampler: Sampler, requests: list[Request], reference: Decoded
) -> None:
    never = partial(ragged, draft=drafters(model, sampler)["coupled"], width=0)
    result = SpeculativeEngine(model, sampler).run(never, "match", requests, 5)
    assert (result.verifications, result.tokens_per_step) == (reference.num_tokens, 1.0)
    assert result.numbers(Pairing("never", "match", never), reference)["accepted_share"] == [None] * WIDTH
    assert match(model, sampler, requests, "coupled").verifications < reference.num_tokens * 0.7


def test_a_decode_with_other_seeds_is_reported(
    model: NgramModel, sampler: Sampler, requests: list[Request], reference: Decoded
) -> None:
    changed = [
        dataclasses.replace(request, params=dataclasses.replace(request.params, seed=(request.params.seed or 0) + 1))
        for request in requests
    ]
    pairing = Pairing("coupled", "match", drafters(model, sampler)["coupled"])
    engine = SpeculativeEngine(model, sampler)
    numbers = engine.run(pairing.draft, "match", changed, 5).numbers(pairing, reference)
    assert numbers["mismatches"] > numbers["compared"] // 4
    assert engine.run(pairing.draft, "match", requests, 5).numbers(pairing, reference)["mismatches"] == 0


def test_the_other_rules_promise_no_tokens_but_end_where_requests_do(
    model: NgramModel, sampler: Sampler, requests: list[Request], reference: Decoded
) -> None:
    limits = {request.request_id: request.max_tokens for request in requests}
    for pairing in pairings(model, sampler):
        result = SpeculativeEngine(model, sampler).run(pairing.draft, pairing.rule, requests, 5)
        numbers = result.numbers(pairing, reference)
        assert (numbers["compared"] is None) == (pairing.rule != "match")
        assert not numbers["mismatches"]
        for request_id, stream in result.decoded.streams.items():
            assert EOS_ID not in stream[:-1]
            assert len(stream) == limits[request_id] or stream[-1] == EOS_ID


def accepted_by_both(
    model: NgramModel, sampler: Sampler, requests: Sequence[Request], pairs: Sequence[tuple[str, str]], steps: int
) -> torch.Tensor:
    """How many drafts two pairs of drafter and rule accept after the same tokens, int64 ``[steps * N, 2]``.

    The streams are those of the first pair, and go on after the end of a document.
    """
    engine, known = SpeculativeEngine(model, sampler), drafters(model, sampler)
    rows = [(sampler.add_request(request.params), list(request.prompt)) for request in requests]
    accepted = []
    for _ in range(steps):
        batch = make_batch(sampler, rows)
        outputs = [engine.verify(batch, known[name](batch), rule) for name, rule in pairs]
        accepted.append(torch.stack([each.num_accepted for each in outputs], dim=1))
        emitted = zip(outputs[0].token_ids.tolist(), outputs[0].num_emitted.tolist(), strict=True)
        for (_, history), (token_ids, count) in zip(rows, emitted, strict=True):
            history += token_ids[:count]
    return torch.cat(accepted)


def gain(accepted: torch.Tensor) -> tuple[float, float]:
    """By how much the second column exceeds the first on average, and the standard error of that."""
    more = (accepted[:, 1] - accepted[:, 0]).double()
    return float(more.mean()), float(more.std() / len(more) ** 0.5)


def test_coupled_drafts_are_accepted_more_often_than_likeliest_ones(
    model: NgramModel, sampler: Sampler, drawn_requests: list[Request]
) -> None:
    # The seeds are fixed, so every run has the same outcome: 0.47 drafts a step more over 64 requests and 40 steps,
    # which is 17 standard errors. With other seeds the bound of 5 would in practice never be missed: it is 12 away.
    pairs = [("likeliest", "match"), ("coupled", "match")]
    mean, error = gain(accepted_by_both(model, sampler, drawn_requests, pairs, steps=40))
    assert mean > 5 * error


def test_block_accepts_as_many_drafts_as_rejection_or_more(
    model: NgramModel, sampler: Sampler, drawn_requests: list[Request]
) -> None:
    # In every context block accepts at least as many on average (Sun et al., arXiv 2403.10444), but not in every draw.
    # The seeds are fixed, so every run has the same outcome: 0.066 drafts a step more over 64 requests and 40 steps,
    # which is 3.7 standard errors. The tolerance is one: with other seeds it would be missed once in 700,000 runs.
    pairs = [("independent", "rejection"), ("independent", "block")]
    mean, error = gain(accepted_by_both(model, sampler, drawn_requests, pairs, steps=40))
    assert mean > -error


@pytest.mark.parametrize(
    ("history", "drafts"),
    [
        ([], []),
        ([1, 2], []),
        ([1, 2, 3, 1], []),
        ([1, 2, 3, 1, 2], [3, 1, 2]),
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5]),
        ([1, 2, 8, 9, 1, 2, 3, 1, 2], [3, 1, 2]),
        ([5, 5, 5, 5], [5]),
        ([1, 2, 3, 2, 1], []),
    ],
)
def test_look_up_drafts_what_followed_the_latest_place(history: list[int], drafts: list[int]) -> None:
    assert look_up(history, WIDTH) == drafts


def test_rows_stand_behind_the_drafts_of_their_request() -> None:
    drafts = Drafts(torch.tensor([[1, 2, 3], [-1, -1, -1], [4, 99, -1]]), (3, 0, 2))
    contexts = row_contexts(torch.tensor([[8, 9], [-1, 7], [-1, -1]]), drafts, 50)
    assert contexts.tolist() == [[8, 9], [9, 1], [1, 2], [2, 3], [-1, 7], [-1, -1], [-1, 4], [4, 49]]


def test_a_stream_ends_in_the_middle_of_a_step() -> None:
    request = Request(0, (5, EOS_ID), SamplingParams(seed=0), max_tokens=3)
    assert finished_stream(request, [5, EOS_ID, 6, 7]) is None
    assert finished_stream(request, [5, EOS_ID, 6, 7, 8, 9]) == [6, 7, 8]
    assert finished_stream(request, [5, EOS_ID, 6, EOS_ID, 8]) == [6, EOS_ID]
    assert finished_stream(request, [5, EOS_ID, 6, 7, 8, EOS_ID]) == [6, 7, 8]


def test_counts_of_a_step_fall_in_their_places() -> None:
    result = Speculated()
    result.count((3, 0, 2), [3, 0, 1])
    result.count((1, 3), [0, 2])
    assert (result.drafted, result.accepted, result.verifications) == ([4, 3, 2], [3, 2, 1], 5)
    assert result.tokens_per_step == 1 + 6 / 5


OPTIONS = ["--backend", "eager", "--device", "cpu", "--requests", "10", "--steps", "6"]


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[str]:
    """A text to learn from; sets the number of threads back, which the demo changes."""
    path, threads = tmp_path / "corpus.txt", torch.get_num_threads()
    path.write_text("\n".join(LINES))
    yield str(path)
    torch.set_num_threads(threads)


def test_the_demo_shows_and_stores_every_pairing(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "numbers.json"
    assert demo.main(["--text", corpus, *OPTIONS, "--json", str(path)]) == 0
    output, stored = capsys.readouterr().out, json.loads(path.read_text())
    assert "share accepted at each place" in output
    assert [pair["rule"] for pair in stored["speculation"]] == ["match", "match", "rejection", "block", "match"]
    assert all(f"{pair['tokens_per_step']:.2f}" in output for pair in stored["speculation"])
    compared = sum(run["compared"] or 0 for run in stored["runs"][1:] + stored["speculation"])
    assert f"{compared:,} tokens compared, all identical" in output


def test_the_demo_leaves_drafts_out(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "numbers.json"
    assert demo.main(["--text", corpus, *OPTIONS, "--no-drafts", "--json", str(path)]) == 0
    assert "share accepted" not in capsys.readouterr().out
    assert json.loads(path.read_text())["speculation"] == []


def test_one_token_changed_by_drafts_is_an_exit_status_of_1(
    corpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = SpeculativeEngine.run

    def tampered(self: SpeculativeEngine, draft: Drafter, rule: str, *args: object) -> Speculated:
        result = original(self, draft, rule, *args)  # type: ignore[arg-type]
        result.decoded.streams[0][0] ^= 1
        return result

    monkeypatch.setattr(SpeculativeEngine, "run", tampered)
    assert demo.main(["--text", corpus, *OPTIONS]) == 1
    assert "1 of " in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "compiled", "graph"])
def test_cuda_streams_are_the_cpu_ones(
    model: NgramModel, requests: list[Request], reference: Decoded, backend: str
) -> None:
    on_device, sampler = model.to("cuda"), Sampler(model.vocab_size, NUM_SLOTS, "cuda", backend=backend)
    on_cpu = Sampler(model.vocab_size, NUM_SLOTS, backend="eager")
    for pairing, same in zip(pairings(on_device, sampler), pairings(model, on_cpu), strict=True):
        result = SpeculativeEngine(on_device, sampler, uniform=True).run(pairing.draft, pairing.rule, requests, 5)
        assert not result.numbers(pairing, reference)["mismatches"]
        expected = SpeculativeEngine(model, on_cpu).run(same.draft, same.rule, requests, 5)
        assert result.decoded.streams == expected.decoded.streams
