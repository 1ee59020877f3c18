"""The adapter draws the tokens of ``Sampler``, on SGLang's classes from its published source and on stand-ins.

On a GPU it draws those of the CPU, and does not wait for the device.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.functional import warmup
from graph_cache import LateCaptures
from tests.engines.sglang_engine import KINDS, LAWS, batch_info, engine, outputs_of
from tests.torch_states import no_waits

VOCAB = 64
ROWS = len(LAWS)
SEEDS = [11, -12, 13, 2**63 - 1, -(2**63), 0, 42]
POSITIONS = torch.tensor([0, 7, 15, 100, 3, 9, 2**20])
"""Of the token that each row read last."""


@pytest.fixture(params=KINDS)
def config(request):
    with engine(request.param) as made:
        yield made


def logits_of(rows, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits, info, positions, backend="eager", outputs=None, **changed):
    from compiled_sampler.integrations.sglang.drawing import CompiledSampler

    rows = len(logits)
    given = {"return_logprob": False, "top_logprobs_nums": [0] * rows, "token_ids_logprobs": [None] * rows, **changed}
    return CompiledSampler(backend)(outputs or outputs_of(logits), info, positions=positions, **given)


def sampler_with(laws, seeds):
    """A sampler and a plan of the same requests, whose numbers are those that float32 holds."""
    sampler = Sampler(VOCAB, len(laws), backend="eager", top_p_base="all")
    slots = []
    for law, seed in zip(laws, seeds, strict=True):
        stored = {name: value if name == "top_k" else float(np.float32(value)) for name, value in law.items()}
        slots.append(sampler.add_request(SamplingParams(seed=seed % 2**64, **stored)))
    return sampler, sampler.plan(slots)


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize("rows", [range(ROWS), [2], [0, 5, 6], [1], [4, 1], [3, 1]], ids=str)
def test_the_tokens_are_those_of_a_sampler_at_the_position_of_the_drawn_token_in_each_mode(rows):
    laws, seeds, positions = [LAWS[row] for row in rows], [SEEDS[row] for row in rows], POSITIONS[rows]
    sampler, plan = sampler_with(laws, seeds)
    for step in range(20):
        logits = logits_of(len(rows), step)
        drawn = draw(logits, batch_info(laws, seeds), positions + step)
        assert drawn.dtype == torch.int32
        assert drawn.tolist() == sampler.sample(plan, logits, positions + step + 1).tolist()


@pytest.mark.usefixtures("config")
def test_a_batch_of_greedy_rows_needs_no_seeds_and_other_batches_do():
    logits = logits_of(2)
    assert draw(logits, batch_info([{"top_k": 1}] * 2, None), POSITIONS[:2]).tolist() == logits.argmax(-1).tolist()
    with pytest.raises(RuntimeError, match="sampling_seed must be set; load the plugin"):
        draw(logits, batch_info([{"top_k": 1}, {}], None), POSITIONS[:2])
    for temperature in (2e-6, 1.01e-5):  # below the limit of the sampler
        drawn = draw(logits[:1], batch_info([{"temperature": temperature}], [3]), POSITIONS[:1])
        assert drawn.tolist() == logits[:1].argmax(-1).tolist()


@pytest.mark.usefixtures("config")
def test_a_row_without_any_token_gets_token_0_and_its_neighbours_keep_theirs():
    logits = logits_of(2)
    alone = draw(logits, batch_info([{}, {}], [1, 2]), POSITIONS[:2])[1]
    logits[0] = -torch.inf
    assert draw(logits, batch_info([{}, {}], [1, 2]), POSITIONS[:2]).tolist() == [0, int(alone)]


@pytest.mark.usefixtures("config")
def test_logprobs_are_sglangs_of_the_temperature_and_without_filters():
    logits = logits_of(ROWS)
    outputs, info = outputs_of(logits.clone()), batch_info(LAWS, SEEDS)
    drawn = draw(logits, info, POSITIONS, outputs=outputs, return_logprob=True)
    law = torch.log_softmax(logits / info.temperatures, -1)
    assert torch.equal(outputs.next_token_logprobs, law.gather(1, drawn.long()[:, None])[:, 0])


@pytest.mark.usefixtures("config")
def test_the_sampling_mask_is_what_the_token_was_drawn_from():
    logits, rows = logits_of(ROWS), [0, 3, 5]
    outputs, info = outputs_of(logits.clone()), batch_info(LAWS, SEEDS)
    info.return_sampling_masks = [row in rows for row in range(ROWS)]
    drawn = draw(logits, info, POSITIONS, outputs=outputs)
    sampler, plan = sampler_with(LAWS, SEEDS)
    law, masks = sampler.probs(plan, logits), outputs.next_token_sampling_mask_idx
    assert [row for row, mask in enumerate(masks) if mask is not None] == rows
    for row in rows:
        assert sorted(masks[row]) == law[row].nonzero()[:, 0].tolist()
        assert int(drawn[row]) in masks[row]


@pytest.mark.usefixtures("config")
def test_top_p_is_a_share_of_the_whole_row_as_sglangs_joint_filters_are():
    logits = logits_of(1) / 30  # 10 of 64 tokens hold less than half of the row
    outputs = outputs_of(logits)
    info = batch_info([{"top_k": 10, "top_p": 0.5}], [1], return_sampling_masks=[True])
    draw(logits, info, POSITIONS[:1], outputs=outputs)
    assert len(outputs.next_token_sampling_mask_idx[0]) == 10


def test_an_engine_with_speculation_or_a_trainers_law_is_refused_at_its_start(config):
    from compiled_sampler.integrations.sglang.drawing import CompiledSampler

    config.spec.speculative_algorithm = "EAGLE"
    with pytest.raises(ValueError, match="speculative_algorithm must be None, got 'EAGLE'"):
        CompiledSampler("eager")
    config.spec.speculative_algorithm = None
    config.exec.deterministic.rl_on_policy_target = "fsdp"
    with pytest.raises(ValueError, match="rl_on_policy_target must be None, got 'fsdp'"):
        CompiledSampler("eager")


BATCHES = {"all": LAWS, "narrow": [LAWS[0], LAWS[5], LAWS[6]], "greedy": [LAWS[2]] * 2, "plain": [LAWS[1], {}]}


@pytest.fixture
def modules():
    with engine("stand-in"):
        yield


def on_the_gpu(info):
    moved = {name: value.cuda() for name, value in vars(info).items() if isinstance(value, Tensor)}
    there = dataclasses.replace(info, **moved)
    there.max_top_k = info.max_top_k
    return there


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_the_tokens_are_those_of_the_cpu_and_a_step_waits_for_nothing(name, is_replayed, monkeypatch):
    from compiled_sampler.integrations.sglang.drawing import CompiledSampler

    if not is_replayed:
        monkeypatch.setattr(LateCaptures, "capture", lambda *_: None)
    laws = BATCHES[name]
    rows, info = len(laws), batch_info(laws, list(range(len(laws))))
    there, positions = on_the_gpu(info), torch.arange(rows) * 7
    sampler = CompiledSampler("compiled")
    for step in range(8):
        logits = torch.randn(rows, 5000, generator=torch.Generator().manual_seed(step)) * 3
        given = outputs_of(logits.cuda()), there, False, [0] * rows, [None] * rows, (positions + step).cuda()
        if step < 3:  # the last of them may be captured
            drawn = sampler(*given)
            warmup()
        else:
            with no_waits():
                drawn = sampler(*given)
        assert drawn.tolist() == draw(logits, info, positions + step, "eager").tolist()
    (replays,) = sampler._replays.values()
    statistics = replays._cache.statistics()
    assert statistics.variants == int(is_replayed)
    assert (statistics.replays >= 5) == is_replayed


@pytest.mark.gpu
@pytest.mark.usefixtures("modules")
def test_tokens_of_a_replayed_step_stay_when_the_next_one_is_replayed():
    from compiled_sampler.integrations.sglang.drawing import CompiledSampler

    info, logits, positions = batch_info(LAWS, SEEDS), logits_of(ROWS), POSITIONS.cuda()
    there, sampler, drawn = on_the_gpu(info), CompiledSampler("compiled"), []
    for step in range(8):
        given = outputs_of(logits.cuda()), there, False, [0] * ROWS, [None] * ROWS, positions + step
        drawn.append(sampler(*given))
        if step < 3:
            warmup()
    wanted = [draw(logits, info, POSITIONS + step, "eager").tolist() for step in range(8)]
    assert [tokens.tolist() for tokens in drawn] == wanted
    (replays,) = sampler._replays.values()
    assert replays._cache.statistics().replays >= 5
