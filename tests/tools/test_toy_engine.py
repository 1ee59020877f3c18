"""The toy engine and its demo: the same streams in every batch, also with drafts, which save steps; the examples."""

import json
import runpy
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams
from tools import demo
from tools.model import train, transformer
from tools.toy_engine import engine as toy
from tools.toy_engine import runs
from tools.toy_engine.cached_model import CachedModel
from tools.toy_engine.decode_step import CapturedStep, DecodeStep
from tools.toy_engine.drafters import drawn, look_up
from tools.toy_engine.engine import Decoded, Engine, Request, longest
from tools.toy_engine.runs import load_models
from tools.toy_engine.speculation import SIBLINGS, WIDTH, Models, Pairing, SpeculativeEngine, pairings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def model():
    return runs.load_models()[0].target


def requests_of(count=14, steps=16):
    return runs.make_requests(runs.load_models()[1], runs.prompt_texts(None), count, steps)


def run(model, requests, most, device="cpu", backend="eager"):
    step_class = CapturedStep if backend == "captured" else DecodeStep
    sampler_backend = "compiled" if backend == "captured" else backend
    sampler = Sampler(model.config.vocab_size, most, device, backend=sampler_backend)
    step = step_class(model.to(device), sampler, most, longest(requests))
    step.warmup(lambda *_: None)
    return Engine(step).run(requests, most)


@pytest.fixture(scope="module")
def reference(model):
    return run(model, requests_of(), 7)


@pytest.mark.parametrize(("most", "direction"), [(2, -1), (5, 1), (12, -1)])
def test_streams_do_not_depend_on_arrival_and_running_rows(model, reference, most, direction):
    other = run(model, requests_of()[::direction], most)
    assert other.streams == reference.streams
    assert other.compare(reference) == (reference.num_tokens, 0)
    assert other.sha256() == reference.sha256()
    assert set(other.slots) == set(range(most))  # and change hands
    assert max(map(len, other.batches)) == most
    assert len(other.mode_steps) > 2


def test_a_stream_is_what_the_request_draws_alone_from_texts_read_anew(model):
    requests = requests_of()
    decoded = run(model, requests, 6)
    for request in requests[::4]:
        sampler = Sampler(model.config.vocab_size, 1, backend="eager")
        plan, tokens = sampler.plan([sampler.add_request(request.params)]), list(request.prompt)
        for token in decoded.streams[request.request_id]:
            positions = torch.arange(len(tokens))
            slots, cached = torch.zeros_like(positions), CachedModel(model, 1, len(tokens))
            logits = cached.logits(slots, positions, torch.tensor(tokens))[-1:]
            assert sampler.sample(plan, logits, torch.tensor([len(tokens)])).token_ids.tolist() == [token]
            tokens.append(token)


def test_requests_end_at_their_limit_or_at_the_end_of_a_document(model, monkeypatch):
    requests = requests_of()
    drawn = Counter(token for stream in run(model, requests, 8).streams.values() for token in stream)
    end = drawn.most_common(1)[0][0]  # the real end of a document is too rare for so few tokens
    monkeypatch.setattr(toy, "END_ID", end)
    streams = run(model, requests, 8).streams
    ended = [request for request in requests if streams[request.request_id][-1] == end]
    assert 0 < len(ended) < len(requests)
    for request in requests:
        stream = streams[request.request_id]
        assert end not in stream[:-1]
        assert len(stream) == request.max_tokens or request in ended


def test_compare_counts_changed_and_missing_tokens():
    reference = Decoded({0: [1, 2, 3], 1: [4, 5]})
    assert Decoded({1: [4, 5], 0: [1, 2, 3]}).compare(reference) == (5, 0)
    assert Decoded({0: [1, 9, 3], 1: [4]}).compare(reference) == (5, 2)
    assert Decoded({0: [1, 2, 3], 1: [4, 5], 2: [6]}).compare(reference) == (6, 1)
    assert Decoded({0: [1, 2, 3]}).compare(reference) == (5, 2)


def shown(capsys, *options):
    """The exit status of the demo in eager torch on the CPU, and what it prints."""
    status = demo.main(["--backend", "eager", "--device", "cpu", "--steps", "6", *map(str, options)])
    return status, capsys.readouterr().out


@pytest.mark.usefixtures("kept_threads")
def test_the_demo_says_that_runs_are_identical_and_stores_every_pairing_of_drafts(tmp_path, capsys):
    path, text = tmp_path / "numbers.json", tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The value of number {i}" + " is used in the body of a loop" * 5 for i in range(10)))
    status, output = shown(capsys, "--text", text, "--requests", 10, "--json", path)
    stored = json.loads(path.read_text())
    assert (status, stored["identical"]) == (0, True)
    assert [run["order"] for run in stored["runs"]] == list(runs.ORDERS)
    assert [run["mismatches"] for run in stored["runs"]] == [0, 0]
    assert len({run["sha256"] for run in stored["runs"]}) == 1
    assert all(run["compared"] == run["tokens"] > 0 for run in stored["runs"])
    assert "share accepted at each place" in output
    assert [pair["rule"] for pair in stored["speculation"]] == [*["match"] * 3, "rejection", "block", "match"]
    assert stored["speculation"][2]["drafts_per_step"] == SIBLINGS * WIDTH
    assert all(f"{pair['tokens_per_step']:.2f}" in output for pair in stored["speculation"])
    compared = sum(run["compared"] or 0 for run in stored["runs"][1:] + stored["speculation"])
    assert f"{compared:,} tokens compared, all identical" in output


@pytest.mark.usefixtures("kept_threads")
@pytest.mark.parametrize("drafts", [False, True])
def test_one_changed_token_is_an_exit_status_of_1(drafts, monkeypatch, capsys):
    decode, verify = runs.decode, SpeculativeEngine.run

    def tampered(engine, requests, order, progress):
        decoded = decode(engine, requests, order, progress)
        if order == "reversed":
            decoded.streams[3][0] ^= 1
        return decoded

    def tampered_drafts(*args):
        result = verify(*args)
        result.decoded.streams[0][0] ^= 1
        return result

    if drafts:
        monkeypatch.setattr(SpeculativeEngine, "run", tampered_drafts)
    else:
        monkeypatch.setattr(runs, "decode", tampered)
    status, output = shown(capsys, "--requests", 8, *([] if drafts else ["--no-drafts"]))
    assert status == 1
    assert ("1 of " if drafts else "runs differ") in output
    assert ("share accepted" in output) == drafts


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "compiled", "graph", "captured"])
def test_cuda_streams_are_the_cpu_ones(model, reference, backend):
    assert run(model, requests_of()[::-1], 6, "cuda", backend).streams == reference.streams


def test_a_prompt_of_one_token_is_enough(model):
    requests = [Request(i, (5, 6, 7)[:i], SamplingParams(seed=0), 1) for i in (1, 2, 3)]
    assert all(len(stream) == 1 for stream in run(model, requests, 3).streams.values())


def test_a_text_without_paragraphs_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("too short")
    with pytest.raises(ValueError, match="must have a paragraph of 120 characters"):
        runs.prompt_texts(path)


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("basic", "full ["),
        ("continuous_batching", "other: the same"),
        ("asynchronous", "other: the same"),
        ("speculative", "steps, the same\nrejection:"),
        ("green_list", "green tokens: 100% with the watermark"),
        ("no_digits", "no digits: two four"),
        ("guidance", "the same from such logits"),
        ("watermark", "key 18: p-value 0."),
        ("codebooks", "6 positions of 8 codebooks, the same codes on every path"),
    ],
)
def test_examples_run(name, output, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert output in capsys.readouterr().out


def test_the_cuda_example_ends_well_or_says_what_it_needs():
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "cuda_graph.py"))
    assert ended.value.code == (None if torch.cuda.is_available() else "this example needs a CUDA device")


LENGTH, NUM_SLOTS = 24, 32


@pytest.fixture(scope="module")
def texts():
    return torch.randint(2048, (5, LENGTH), generator=torch.Generator().manual_seed(0))


def whole(model, texts):
    """The logits of texts ``[B, T]`` without a cache, float64 ``[B, T, V]``."""
    rotary = transformer.rotary_table(model.config, texts.shape[1], torch.float64)[:, :, None]
    return transformer.logits(model.config, dict(model.weights), texts, rotary, train._attend_within)


def read(cached, slots, positions, texts):
    """Logits of tokens of texts, each slot's text being the row of its number."""
    return cached.logits(slots, positions, texts[slots, positions])


def test_logits_are_those_of_the_whole_text_however_it_is_read(model, texts):
    expected = whole(model, texts).to(torch.float32)
    for width in (1, 3, LENGTH):
        cached = CachedModel(model, len(texts), LENGTH)
        for begin in range(0, LENGTH, width):
            positions = torch.arange(begin, begin + width).repeat(len(texts))
            slots = torch.arange(len(texts)).repeat_interleave(width)
            found = read(cached, slots, positions, texts).view(len(texts), width, -1)
            torch.testing.assert_close(found, expected[:, begin : begin + width], rtol=0, atol=2e-6)


@pytest.mark.gpu
def test_cuda_logits_are_those_of_the_cpu(model, texts):
    """Of 245,760 logits, one in about 1e8 differs in its last bit."""
    positions = torch.arange(LENGTH).repeat(len(texts))
    slots = torch.arange(len(texts)).repeat_interleave(LENGTH)
    on_cpu = read(CachedModel(model, len(texts), LENGTH), slots, positions, texts)
    cached = CachedModel(model.to("cuda"), len(texts), LENGTH)
    on_cuda = read(cached, slots.cuda(), positions.cuda(), texts.cuda()).cpu()
    assert (on_cpu != on_cuda).sum() <= 1
    torch.testing.assert_close(on_cpu, on_cuda, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def models():
    return load_models()[0]


@pytest.fixture(scope="module")
def requests():
    return requests_of()


def engine_of(models, sampler, requests, uniform=False):
    return SpeculativeEngine(models, sampler, longest(requests), uniform)


def test_steps_are_saved_where_drafts_are_accepted(models, requests, reference):
    sampler = Sampler(models.target.config.vocab_size, NUM_SLOTS, backend="eager")
    engine = engine_of(models, sampler, requests)
    coupled = partial(drawn, model=engine.drafter, width=WIDTH, sampler=sampler, coupled=True)

    def never(batch):
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
def test_look_up_drafts_what_followed_the_latest_place(history, drafts):
    assert look_up(history, WIDTH) == drafts


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["eager", "compiled", "graph"])
def test_cuda_streams_with_drafts_are_the_cpu_ones(models, requests, reference, backend):
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
