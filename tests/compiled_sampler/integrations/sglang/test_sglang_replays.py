"""Draws that are replayed, on recordings: they are those of the adapter without graphs, and come when they may."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_sampler.functional import arguments
from compiled_sampler.integrations.sglang import replays
from compiled_sampler.integrations.sglang.replays import ReplayedDraws
from graph_cache.buffers import StaticTensors
from tests.engines.sglang_engine import KINDS, LAWS, batch_info, engine, outputs_of
from tests.graph_cache.recorded import RecordingBackend

VOCAB = 300
SEEDS = [11, -12, 13, 2**63 - 1, -(2**63), 0, 42]
BATCHES = {
    "greedy": [LAWS[2]],
    "no_filter": [LAWS[1], {}],
    "min_p": [LAWS[4], LAWS[1], LAWS[4]],
    "top_k_top_p[64]": [LAWS[0], LAWS[5], LAWS[6], LAWS[2], LAWS[0]],
    "top_k": [LAWS[6], LAWS[1], LAWS[2], LAWS[4]],
    "full": LAWS,
}
"""Laws of batches by the mode that serves them."""
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(autouse=True, params=KINDS)
def modules(request):
    with engine(request.param):
        yield


class Replayed:
    """Draws on recordings, whose stages are compiled unless a test says otherwise."""

    def __init__(self):
        """Nothing is captured."""
        self.stages: Any = SimpleNamespace(num_uncompiled_calls=0, are_settled=True, lacks_kernels=False)
        self.backend = RecordingBackend()
        self.uncompiled_rows: set[int] = set()
        """Numbers of rows that run a stage in eager torch."""
        self.refused_rows: set[int] = set()
        """Numbers of rows that no capture takes, for the same reason."""
        self.num_direct = 0
        self.draws = ReplayedDraws(self.draw, self.stages, torch.empty(1, VOCAB), self.backend)

    def draw(self, mode, **tensors):
        """As the adapter draws."""
        from compiled_sampler.integrations.sglang.drawing import drawn_tokens

        self.num_direct += 1
        self.stages.num_uncompiled_calls += len(tensors["logits"]) in self.uncompiled_rows
        if len(tensors["logits"]) in self.refused_rows:
            raise RuntimeError("planted")
        return drawn_tokens("eager", mode, **tensors)

    def steps(self, mode, count, vocab_size=VOCAB):
        """Tokens of some steps of a batch, each compared with those that it draws without graphs."""
        from compiled_sampler.integrations.sglang.drawing import drawn_tokens, mode_name, row_inputs

        laws = BATCHES[mode]
        info = batch_info(laws, SEEDS[: len(laws)])
        assert mode_name(info) == mode
        drawn = []
        for step in range(count):
            logits = torch.randn(len(laws), vocab_size, generator=torch.Generator().manual_seed(step)) * 3
            rows = row_inputs(mode, info, torch.arange(len(laws)) * 7 + step)
            drawn.append(self.draws(mode, logits, rows))
            assert torch.equal(drawn[-1], drawn_tokens("eager", mode, logits, **rows).token_ids)
        return drawn


@pytest.fixture
def replayed():
    return Replayed()


def test_each_mode_and_bucket_is_captured_once_behind_a_batch_without_a_graph(replayed):
    for mode in [*BATCHES] * 3:
        replayed.steps(mode, 3)
    assert replayed.backend.num_captures == len(BATCHES)
    assert replayed.backend.num_replays == 9 * len(BATCHES) - len(BATCHES)
    replayed.draws("greedy", torch.randn(7, VOCAB), {})
    replayed.draws("greedy", torch.randn(8, VOCAB), {})
    assert replayed.backend.num_captures == len(BATCHES) + 1


def test_a_batch_without_a_variant_of_its_bucket_is_not_padded_to_a_larger_one(replayed):
    replayed.draws("greedy", torch.randn(200, VOCAB), {})
    replayed.draws("greedy", torch.randn(1, VOCAB), {})
    assert (replayed.backend.num_captures, replayed.backend.num_replays) == (2, 0)


def test_tokens_of_a_step_stay_when_later_ones_are_replayed(replayed):
    drawn = replayed.steps("full", 6)
    kept = [tokens.clone() for tokens in drawn]
    replayed.steps("top_k_top_p[64]", 6)
    assert all(map(torch.equal, drawn, kept))
    assert len({tokens.data_ptr() for tokens in drawn}) == 6


def test_batches_behind_the_last_bucket_or_of_another_form_run_without_a_graph(monkeypatch):
    monkeypatch.setattr(replays, "MOST_LOGITS_BYTES", 7 * VOCAB * 4)
    replayed = Replayed()
    replayed.steps("full", 3)  # of 7 rows
    replayed.steps("min_p", 3, vocab_size=VOCAB + 1)
    replayed.draws("greedy", torch.randn(2, VOCAB, dtype=torch.bfloat16), {})
    assert replayed.draws("greedy", torch.randn(0, VOCAB), {}).tolist() == []
    assert replayed.backend.num_captures == 0
    replayed.steps("top_k", 3)  # of 4 rows
    assert replayed.backend.num_captures == 1


@pytest.mark.parametrize("lack", ["an uncompiled call", "a stage in the queue", "a kernel", "another capture"])
def test_nothing_is_captured_while_something_lacks(replayed, lack):
    def set_lack(lacks):
        replayed.uncompiled_rows = {3} if lacks and lack == "an uncompiled call" else set()
        replayed.stages.are_settled = not (lacks and lack == "a stage in the queue")
        replayed.stages.lacks_kernels = lacks and lack == "a kernel"
        replayed.backend.outer = lacks and lack == "another capture"

    set_lack(True)
    replayed.steps("min_p", 3)
    assert replayed.num_direct == 3  # no attempt
    set_lack(False)
    replayed.steps("min_p", 2)
    assert (replayed.backend.num_captures, replayed.backend.num_replays) == (1, 1)


def test_a_variant_waits_for_stages_of_its_bucket(replayed, caplog):
    replayed.refused_rows = {4}  # batches have 3 rows
    replayed.steps("min_p", 1)
    replayed.stages.are_settled = False  # the attempt has asked for them
    replayed.steps("min_p", 3)
    assert replayed.backend.num_captures == 0
    replayed.stages.are_settled, replayed.refused_rows = True, set()
    replayed.steps("min_p", 3)
    assert (replayed.backend.num_captures, replayed.backend.num_replays) == (1, 2)
    assert not caplog.text


@pytest.mark.parametrize("reason", ["capture", "memory", "stage"])
def test_a_variant_that_cannot_be_captured_is_logged_once_and_its_tokens_stay(replayed, caplog, monkeypatch, reason):
    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patch:
        if reason == "capture":
            replayed.backend.failures = [RuntimeError("planted") for _ in range(5)]
        elif reason == "memory":
            patch.setattr(StaticTensors, "owned", no_memory)
        else:
            replayed.refused_rows = {4}  # stages that never compile for so many rows
        replayed.steps("min_p", 6)
    assert len(replayed.backend.failures) == (3 if reason == "capture" else 0)
    assert caplog.text.count("min_p runs without a graph") == 1
    replayed.backend.failures.clear()
    replayed.steps("min_p", 2)
    assert replayed.backend.num_captures == 0
    replayed.steps("top_k_top_p[64]", 2)
    assert replayed.backend.num_captures == 1


@pytest.mark.parametrize(
    "names", [names for count in range(4) for names in itertools.combinations(OFF, count)], ids=str
)
def test_the_mode_of_a_batch_is_that_which_its_numbers_choose(names):
    from compiled_sampler.integrations.sglang.drawing import filter_rows, mode_name

    limits = {"top_k": 100, "top_p": 0.9, "min_p": 0.1}
    info = batch_info([{name: limits[name] for name in names}], [1])
    rows = {"top_k": info.top_ks, "top_p": info.top_ps, "min_p": info.min_ps}
    filters = {name: rows[name] if name in names else off for name, off in OFF.items()}
    parameters = arguments.Parameters(0, 0, info.temperatures.view(-1), **filters)
    mode = arguments.chosen_mode(None, 5000, "all", parameters)
    assert mode_name(info) == mode.name
    assert {*names} <= filter_rows(mode.name, info).keys()


def test_the_adapter_draws_by_replays_where_it_has_some_and_has_none_on_the_cpu(replayed, monkeypatch):
    from compiled_sampler.integrations.sglang.drawing import CompiledSampler

    sampler, plain = CompiledSampler("auto"), CompiledSampler("eager")
    assert sampler._replays_for(torch.empty(1, VOCAB)) is None
    monkeypatch.setattr(sampler, "_replays_for", lambda _: replayed.draws)
    info, positions = batch_info(LAWS, SEEDS), torch.arange(len(LAWS))
    for step in range(4):
        logits = torch.randn(len(LAWS), VOCAB, generator=torch.Generator().manual_seed(step))
        others = info, False, [0] * len(LAWS), [None] * len(LAWS), positions + step
        assert torch.equal(sampler(outputs_of(logits), *others), plain(outputs_of(logits), *others))
    assert replayed.backend.num_replays == 3


def test_no_replay_is_made_of_eager_draws_or_on_another_streams_buffers(monkeypatch):
    from compiled_sampler.integrations.sglang import drawing

    stream = SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(drawing, "ReplayedDraws", lambda *_: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    logits = SimpleNamespace(is_cuda=True, device="cuda")
    assert drawing.CompiledSampler("eager")._replays_for(logits) is None
    sampler = drawing.CompiledSampler("compiled")
    first = sampler._replays_for(logits)
    assert first is not None
    assert sampler._replays_for(logits) is first
    stream.cuda_stream = 2
    assert sampler._replays_for(logits) is not first
