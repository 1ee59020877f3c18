"""Each parameter of a request inside a vLLM engine: seen in what is drawn, or refused by its name."""

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from compiled_sampler import Logprobs, Sampler, SamplingParams
from tests.engines.vllm_engine import EOS, make_model, run
from tools.engines.vllm_process import NGRAM

pytestmark = pytest.mark.full

VOCAB, LENGTH = 64, 24
PROMPT = [5, 6, 7, 5, 6, 7, 5]
PLAIN = {"seed": 3, "temperature": 0.9, "max_tokens": LENGTH, "ignore_eos": True}
EVERY: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 30,
    "top_p": 0.95,
    "min_p": 0.01,
    "seed": 11,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "logit_bias": {"7": 2.0, "9": -1.0},
    "allowed_token_ids": list(range(1, 50)),
    "min_tokens": 10,
    "stop_token_ids": [13],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every": {**EVERY, "bad_words": ["t7", "t8 t9"], "logprobs": 4},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 1.0},
    "seed": {"seed": 4},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 50.0},
    "frequency_penalty": {"temperature": 0.0, "frequency_penalty": 2.0},
    "presence_penalty": {"temperature": 0.0, "presence_penalty": 2.0},
    "logit_bias": {"logit_bias": {"9": 100.0}},
    "allowed_token_ids": {"allowed_token_ids": [20, 21, 22]},
    "bad_words": {"bad_words": ["t9"], "logit_bias": {"9": 100.0}},
    "min_tokens": {"min_tokens": 12, "ignore_eos": False, "logit_bias": {str(EOS): 100.0}},
    "ignore_eos": {"logit_bias": {str(EOS): 100.0}},
    "eos": {"logit_bias": {str(EOS): 100.0}, "ignore_eos": False},
    "stop_token_ids": {"stop_token_ids": [9], "logit_bias": {"9": 100.0}},
    "all masked": {"allowed_token_ids": [9], "bad_words": ["t9"], "ignore_eos": False},
    "choice": {"choice": ["t5", "t7"], "ignore_eos": False},
    "n": {"n": 3},
    "dry": {"temperature": 0.0, "logit_bias": {"9": 20.0}, "extra_args": {"dry_multiplier": 5.0}},
    "watermark": {"extra_args": {"watermark_tokens": 2}},
    "raw logprobs": {"logprobs": 5},
    "all logprobs": {"logprobs": -1, "top_k": 4},
}
REFUSED: dict[str, Any] = {
    "logprob_token_ids": [3],
    "thinking_token_budget": 4,
    "trace_decode_token_ids": [3] * LENGTH,
    "temperature": 1.0,
}
ENGINES: dict[str, dict[str, Any]] = {"plain": {}, "ngram": {"speculative_config": NGRAM}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "target", VOCAB, seed=0, spread=1.5)


@pytest.fixture(scope="module", params=ENGINES)
def made(request, model):
    """All settings in one batch of an engine, and then each refused one alone."""
    together = [{"prompt": PROMPT, "params": {**PLAIN, **each}} for each in SETTINGS.values()]
    alone = [[{"prompt": PROMPT, "params": {**PLAIN, name: value}}] for name, value in REFUSED.items()]
    engine = {**ENGINES[request.param], "max_num_seqs": 32, "max_logprobs": VOCAB}
    found = run(model, [together, *alone], install={"backend": "eager"}, engine=engine, keeps_rows=True)
    return found | {"by_name": dict(zip(SETTINGS, found["rounds"][0], strict=True))}


def redrawn(found: dict[str, Any], params: SamplingParams, logprobs: Logprobs | None = None) -> tuple[list[int], Any]:
    """Tokens of the definition from the logits of an engine, at the positions of the text."""
    sampler = Sampler(VOCAB, 1, backend="reference", history_len=64)
    plan = sampler.plan([sampler.add_request(params, PROMPT)])
    tokens, outputs = [], []
    for place in range(len(found["tokens"])):
        position = len(PROMPT) + place
        logits = torch.tensor([found["rows"][str(position)]])
        outputs.append(sampler.sample(plan, logits, torch.tensor([position]), logprobs=logprobs))
        tokens += outputs[-1].tolist()
    return tokens, outputs


def test_tokens_are_those_of_the_definition_at_the_positions_of_the_text(made):
    params = SamplingParams(seed=3, temperature=0.9)
    found = made["by_name"]["plain"]
    assert len(found["tokens"]) == LENGTH
    assert redrawn(found, params)[0] == found["tokens"]


def test_a_request_with_every_parameter_draws_by_all_of_them(made):
    mine = {**EVERY, "logit_bias": {7: 2.0, 9: -1.0}, "bad_words_token_ids": [[7], [8, 9]], "stop_token_ids": [13, EOS]}
    found = made["by_name"]["every"]
    tokens, outputs = redrawn(found, SamplingParams(**mine), Logprobs(top=4, rank=True))
    assert tokens == found["tokens"]
    assert len(tokens) >= 10
    for token, output, table in zip(tokens, outputs, found["logprobs"], strict=True):
        assert table[str(token)][0] == pytest.approx(output.logprobs.token.item(), abs=1e-6)
        assert [table[str(each)][1] for each in output.logprobs.top_token_ids[0].tolist()] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_a_filter_that_keeps_one_token_draws_the_likeliest(made, name):
    assert made["by_name"][name]["tokens"] == made["by_name"]["greedy"]["tokens"]
    assert made["by_name"][name]["tokens"] != made["by_name"]["plain"]["tokens"]


def test_another_seed_draws_other_tokens(made):
    assert made["by_name"]["seed"]["tokens"] != made["by_name"]["plain"]["tokens"]


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_penalty_draws_as_by_the_definition(made, name):
    found = made["by_name"][name]
    assert redrawn(found, SamplingParams(**SETTINGS[name]))[0] == found["tokens"]
    assert redrawn(found, SamplingParams(temperature=0.0))[0] != found["tokens"]


@pytest.mark.parametrize("name", ["dry", "watermark"])
def test_what_extra_args_bring_draws_as_by_the_definition(made, name):
    found, given = made["by_name"][name], {"seed": 3, "temperature": 0.9, **SETTINGS[name]}
    own = given.pop("extra_args")
    given["logit_bias"] = {int(token): bias for token, bias in given.get("logit_bias", {}).items()}
    assert redrawn(found, SamplingParams(**given, **own))[0] == found["tokens"]
    assert redrawn(found, SamplingParams(**given))[0] != found["tokens"]


def test_lists_of_tokens_hold(made):
    tokens = {name: found["tokens"] for name, found in made["by_name"].items()}
    assert tokens["logit_bias"] == tokens["stop_token_ids"] * LENGTH == [9] * LENGTH
    assert set(tokens["allowed_token_ids"]) == {20, 21, 22}
    assert 9 not in tokens["bad_words"]
    assert EOS not in tokens["min_tokens"][:12]
    assert tokens["min_tokens"][12:] == tokens["eos"] == tokens["all masked"] == [EOS]
    assert tokens["ignore_eos"] == [EOS] * LENGTH
    assert tokens["choice"] in ([5, EOS], [7, EOS])


def test_each_of_n_choices_has_its_own_seed(made):
    first, second, third = made["by_name"]["n"]["all"]
    assert first == made["by_name"]["plain"]["tokens"]
    assert second == made["by_name"]["seed"]["tokens"]  # vLLM counts the seed up
    assert third not in (first, second)


def test_logprobs_of_all_tokens_are_those_of_the_raw_logits(made):
    found = made["by_name"]["all logprobs"]
    for place, table in enumerate(found["logprobs"]):
        expected = torch.tensor(found["rows"][str(len(PROMPT) + place)]).double().log_softmax(-1)
        given = [table[str(token)][0] for token in range(VOCAB)]
        torch.testing.assert_close(torch.tensor(given, dtype=torch.float64), expected, atol=3e-6, rtol=2e-6)


def test_what_the_sampler_does_not_have_is_refused_by_name_and_the_engine_goes_on(made):
    for name, found in zip(REFUSED, made["rounds"][1:], strict=True):
        if name == "temperature":
            assert len(found[0]["tokens"]) == LENGTH
        else:
            assert name in found[0]["error"]


def test_processed_logprobs_are_of_the_law_that_tokens_are_drawn_from(model):
    params = {**PLAIN, "top_k": 3, "logprobs": 5}
    engine = {"logprobs_mode": "processed_logprobs"}
    made = run(model, [[{"prompt": PROMPT, "params": params}]], install={"backend": "eager"}, engine=engine)
    for table in made["rounds"][0][0]["logprobs"]:
        values = torch.tensor([logprob for logprob, _ in table.values()], dtype=torch.float64)
        assert len(table) == 5  # two of them are dropped by the filter
        assert values.isfinite().sum() == 3
        assert values.exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_batches_that_fall_to_the_stock_sampler_are_counted_and_ours_go_on_behind_them(model):
    """A request with penalties meets batches that vLLM draws; then it goes on from all its tokens."""
    law = {**PLAIN, "temperature": 0.0, "repetition_penalty": 1.5, "max_tokens": 20}
    odd = {"prompt": [9], "params": {**PLAIN, "max_tokens": 6, "logprob_token_ids": [3, 4]}}
    rounds = [[{"prompt": PROMPT, "params": law}], [{"prompt": PROMPT, "params": law}, odd]]
    install = {"backend": "eager", "on_unsupported": "stock"}
    made = run(model, rounds, install=install, keeps_rows=True)
    assert made["statistics"]["stock_batches"] == 6
    assert made["statistics"]["batches"] == made["steps"][0] + made["steps"][1] - 6
    assert any("logprob_token_ids" in name for name in made["statistics"])
    for found in (made["rounds"][0][0], made["rounds"][1][0]):
        assert redrawn(found, SamplingParams(temperature=0.0, repetition_penalty=1.5))[0] == found["tokens"]


def test_an_engine_that_cannot_be_served_does_not_start(model):
    with pytest.raises(RuntimeError, match=r"logprobs_mode must be one of .*, got 'raw_logits'"):
        run(model, [], install={}, engine={"logprobs_mode": "raw_logits"})
