"""The demo: the same streams in every batch, slots that change hands, differences that are seen."""

import json
import runpy
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_sampler import Sampler, SamplingParams
from tools import demo
from tools.model.transformer import Model
from tools.toy_engine import engine as toy
from tools.toy_engine import runs
from tools.toy_engine.cached_model import CachedModel
from tools.toy_engine.decode_step import CapturedStep, DecodeStep
from tools.toy_engine.engine import Decoded, Engine, Request, longest
from tools.toy_engine.speculation import SIBLINGS, WIDTH, Speculated, SpeculativeEngine

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEXT = "\n\n".join(f"The value of number {i}" + " is used in the body of a loop" * 5 for i in range(30))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def model():
    return runs.load_models()[0].target


def requests_of(count: int = 21, steps: int = 9) -> list[Request]:
    return runs.make_requests(runs.load_models()[1], runs.prompt_texts(None), count, steps)


def run(model: Model, requests: Sequence[Request], most: int, device: str = "cpu", backend: str = "eager") -> Decoded:
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


def shown(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, str]:
    """The exit status of the demo in eager torch on the CPU, and what it prints."""
    status = demo.main(["--backend", "eager", "--device", "cpu", *map(str, options)])
    return status, capsys.readouterr().out


@pytest.mark.usefixtures("kept_threads")
def test_the_demo_says_that_runs_are_identical(text, tmp_path, capsys):
    path = tmp_path / "numbers.json"
    options = ["--text", text, "--requests", "30", "--steps", "6", "--no-drafts", "--json", path]
    status, output = shown(capsys, *options)
    assert status == 0
    assert "all identical" in output
    assert "share accepted" not in output
    numbers = json.loads(path.read_text())
    assert numbers["identical"]
    assert numbers["speculation"] == []
    assert [run["order"] for run in numbers["runs"]] == list(runs.ORDERS)
    assert [run["mismatches"] for run in numbers["runs"]] == [0, 0]
    assert len({run["sha256"] for run in numbers["runs"]}) == 1
    assert all(run["compared"] == run["tokens"] > 0 for run in numbers["runs"])


@pytest.mark.usefixtures("kept_threads")
def test_the_demo_shows_and_stores_every_pairing_of_drafts(tmp_path, capsys):
    path = tmp_path / "numbers.json"
    status, output = shown(capsys, "--requests", 10, "--steps", 6, "--json", path)
    stored = json.loads(path.read_text())
    assert status == 0
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

    def tampered(engine: Engine, requests: Sequence[Request], order: str, progress: Callable[[int], object]) -> Decoded:
        decoded = decode(engine, requests, order, progress)
        if order == "reversed":
            decoded.streams[3][0] ^= 1
        return decoded

    def tampered_drafts(*args: Any) -> Speculated:
        result = verify(*args)
        result.decoded.streams[0][0] ^= 1
        return result

    if drafts:
        monkeypatch.setattr(SpeculativeEngine, "run", tampered_drafts)
    else:
        monkeypatch.setattr(runs, "decode", tampered)
    options = [] if drafts else ["--no-drafts"]
    status, output = shown(capsys, "--requests", 8, "--steps", 4, *options)
    assert status == 1
    assert ("1 of " if drafts else "runs differ") in output


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
