"""Inside a vLLM engine: the same tokens however it batches, speculates, caches and schedules; each parameter is seen.

Under rejection and block, with a draft model that says what it drew from, tokens have the law of the target.
"""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

import pytest
import torch

from compiled_sampler import Logprobs, Sampler, SamplingParams
from tests.engines.vllm_engine import ENVIRONMENT, EOS, ROOT, make_model, run
from tools.engines import vllm_law
from tools.engines.vllm_process import LAWS, NGRAM, PROMPTS

pytestmark = pytest.mark.full

VOCAB = 128
REQUESTS = [
    {"prompt": prompt, "params": {"seed": 100 + place, "max_tokens": 48, "ignore_eos": place != 7, **law}}
    for place, (prompt, law) in enumerate(zip(PROMPTS, LAWS, strict=True))
]
OURS = {"install": {"backend": "eager"}}
ENGINES = {
    "ngram": {"engine": {"speculative_config": NGRAM}},
    "no prefix caching": {"engine": {"enable_prefix_caching": False}},
    "restarted": {},
    "chunked prefill": {"engine": {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}},
    "preempting": {"engine": {"num_gpu_blocks_override": 18}},
    "preempting, ngram": {"engine": {"num_gpu_blocks_override": 18, "speculative_config": NGRAM}},
    "compiled": {"install": {"warmup": "off"}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "target", VOCAB, seed=0, spread=2.5)


@pytest.fixture(scope="module")
def alone(model):
    """An engine that draws each request alone, then all in a batch, in another order, and once more."""
    rounds = [*([each] for each in REQUESTS), REQUESTS, REQUESTS[::-1], REQUESTS]
    return run(model, rounds, **OURS)


def agreement(first, second, prompt_len):
    """Rows of equal and of other logits, up to the first token that differs behind other logits.

    Raises:
        AssertionError: equal logits, and another token.
    """
    equal = other = 0
    assert len(first["logits"]) >= len(first["tokens"]) > 0
    for place, (one, two) in enumerate(zip(first["tokens"], second["tokens"], strict=False)):
        position = str(prompt_len + place)
        is_equal = first["logits"][position] == second["logits"][position]
        assert one == two or not is_equal, f"position {position}: {one} and {two} from the same logits"
        equal, other = equal + is_equal, other + (not is_equal)
        if one != two:
            return equal, other
    assert len(first["tokens"]) == len(second["tokens"])
    return equal, other


def compared(name, first, second):
    """Rows of equal and of other logits of all requests; printed for docs/vllm.md."""
    pairs = zip(first, second, PROMPTS, strict=True)
    counts = [agreement(one, two, len(prompt)) for one, two, prompt in pairs]
    equal, other = (sum(column) for column in zip(*counts, strict=True))
    same = sum(one["tokens"] == two["tokens"] for one, two in zip(first, second, strict=True))
    print(f"\n| {name} | {same} of {len(first)} | {equal} | {other} |")
    return equal, other


def test_the_texts_are_long_enough_to_say_something(alone):
    texts = [each["tokens"] for each in alone["rounds"][8]]
    assert sum(map(len, texts)) > 300
    assert len(set(map(tuple, texts))) == 8


def test_a_batch_of_eight_in_two_orders_draws_what_requests_draw_alone(alone):
    each_alone = [round_[0] for round_ in alone["rounds"][:8]]
    for name, batch in {"batch of 8": alone["rounds"][8], "reversed": alone["rounds"][9][::-1]}.items():
        equal, _ = compared(name, each_alone, batch)
        assert equal > 100


def test_prompts_out_of_the_prefix_cache_draw_the_same(alone):
    first, again = alone["rounds"][2][0], alone["rounds"][10][2]
    assert first["cached"] == 0
    assert again["cached"] >= 64
    compared("prefix cached", [each[0] for each in alone["rounds"][:8]], alone["rounds"][10])


@pytest.mark.parametrize("name", ENGINES)
def test_another_engine_draws_the_same(name, model, alone):
    made = run(model, [REQUESTS], **{**OURS, **ENGINES[name]})
    equal, _ = compared(name, alone["rounds"][8], made["rounds"][0])
    assert equal > 100
    assert made["statistics"]["batches"] > 0
    assert made["statistics"]["stock_batches"] == 0
    if "ngram" in name:
        assert made["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 20
    assert (made["metrics"]["vllm:num_preemptions"] > 0) == ("preempting" in name)


def test_the_environment_variable_alone_reaches_the_process_of_an_engine(model, alone):
    environment = {"COMPILED_SAMPLER_VLLM": "backend=eager", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    made = run(model, [REQUESTS], environment=environment)
    assert [each["tokens"] for each in made["rounds"][0]] == [each["tokens"] for each in alone["rounds"][8]]


def test_without_the_adapter_the_tokens_are_others(model, alone):
    made = run(model, [REQUESTS])
    assert made["statistics"]["batches"] == 0
    drawn = [[each["tokens"] for each in round_] for round_ in (made["rounds"][0], alone["rounds"][8])]
    assert drawn[0][1] == drawn[1][1]  # greedy
    assert drawn[0][0] != drawn[1][0]


def test_the_examples_of_the_page_run(tmp_path):
    """``folder`` in them is a model."""
    folder = make_model(tmp_path / "model", 64, seed=0)
    blocks = re.findall(r"^```py\n(.*?)^```", (ROOT / "docs" / "vllm.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    script = f"folder = {str(folder)!r}\n" + "\n".join(blocks)
    command = [sys.executable, "-W", "ignore", "-c", script]
    made = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert made.returncode == 0, made.stderr[-4000:]
    lists = [line for line in made.stdout.splitlines() if line.startswith("[")]
    assert len(lists) == 2
    assert "{'batches': 8, 'stock_batches': 0}" in made.stdout


COUNT = 6000


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "target", vllm_law.VOCAB, seed=0)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "drafter", vllm_law.VOCAB, seed=1)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_tokens_have_the_law_of_the_target_and_not_that_of_the_drafter(rule, target, drafter):
    """False alarm of one case: 1e-6. The drafter's law is the control, which must fail."""
    drafts = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": vllm_law.DRAFTS}
    speculation = {**drafts, "draft_sample_method": "probabilistic"}
    params = {**vllm_law.LAW, "max_tokens": 3, "ignore_eos": True, "detokenize": False}
    requests = [{"prompt": vllm_law.PROMPT, "params": {**params, "seed": seed}} for seed in range(COUNT)]
    engine = {"speculative_config": speculation, "max_num_seqs": 128}
    made = run(target, [requests], install={"backend": "eager", "rule": rule}, engine=engine)
    drawn = [tuple(each["tokens"]) for each in made["rounds"][0]]
    accepted = made["metrics"]["vllm:spec_decode_num_accepted_tokens"]
    assert COUNT / 10 < accepted < made["metrics"]["vllm:spec_decode_num_draft_tokens"]
    assert vllm_law.p_value(drawn, vllm_law.law_of(target)) > vllm_law.FALSE_ALARM
    assert vllm_law.p_value(drawn, vllm_law.law_of(drafter)) < vllm_law.FALSE_ALARM


LENGTH = 24
PROMPT = [5, 6, 7, 5, 6, 7, 5]
PLAIN = {"seed": 3, "temperature": 0.9, "max_tokens": LENGTH, "ignore_eos": True}
EVERY = {"temperature": 0.8, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "seed": 11}
EVERY |= {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
EVERY |= {"logit_bias": {"7": 2.0, "9": -1.0}, "allowed_token_ids": list(range(1, 50))}
EVERY |= {"min_tokens": 10, "stop_token_ids": [13]}
SETTINGS = {
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
    "all logprobs": {"logprobs": -1, "top_k": 4},
}
REFUSED = {
    "logprob_token_ids": [3],
    "thinking_token_budget": 4,
    "trace_decode_token_ids": [3] * LENGTH,
    "temperature": 1.0,
}


@pytest.fixture(scope="module", params=[{}, {"speculative_config": NGRAM}], ids=["plain", "ngram"])
def made(request, model):
    """All settings in one batch of an engine, and then each refused one alone."""
    together = [{"prompt": PROMPT, "params": {**PLAIN, **each}} for each in SETTINGS.values()]
    alone = [[{"prompt": PROMPT, "params": {**PLAIN, name: value}}] for name, value in REFUSED.items()]
    engine = {**request.param, "max_num_seqs": 32, "max_logprobs": VOCAB}
    found = run(model, [together, *alone], install={"backend": "eager"}, engine=engine, keeps_rows=True)
    return found | {"by_name": dict(zip(SETTINGS, found["rounds"][0], strict=True))}


def redrawn(found, params, logprobs=None):
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


@pytest.mark.parametrize(
    "name", ["plain", "repetition_penalty", "frequency_penalty", "presence_penalty", "dry", "watermark"]
)
def test_tokens_are_those_of_the_definition_at_the_positions_of_the_text(made, name):
    found, given = made["by_name"][name], {"seed": 3, "temperature": 0.9, **SETTINGS[name]}
    given |= given.pop("extra_args", {})
    given["logit_bias"] = {int(token): bias for token, bias in given.get("logit_bias", {}).items()}
    assert len(found["tokens"]) == LENGTH
    assert redrawn(found, SamplingParams(**given))[0] == found["tokens"]
    law = {field: given[field] for field in ("seed", "temperature", "logit_bias")}
    assert (redrawn(found, SamplingParams(**law))[0] == found["tokens"]) == (name == "plain")


def test_a_request_with_every_parameter_draws_by_all_of_them(made):
    mine = {**EVERY, "logit_bias": {7: 2.0, 9: -1.0}, "bad_words_token_ids": [[7], [8, 9]], "stop_token_ids": [13, EOS]}
    found = made["by_name"]["every"]
    tokens, outputs = redrawn(found, SamplingParams(**mine), Logprobs(top=4, rank=True))
    assert tokens == found["tokens"]
    assert len(tokens) >= 10
    for token, output, table in zip(tokens, outputs, found["logprobs"], strict=True):
        assert table[str(token)][0] == pytest.approx(output.logprobs.token.item(), abs=1e-6)
        assert [table[str(each)][1] for each in output.logprobs.top_token_ids[0].tolist()] == [1, 2, 3, 4]


def test_each_filter_seed_and_list_of_tokens_holds(made):
    tokens = {name: found["tokens"] for name, found in made["by_name"].items()}
    assert tokens["top_k"] == tokens["top_p"] == tokens["min_p"] == tokens["greedy"]
    assert tokens["greedy"] != tokens["plain"] != tokens["seed"]
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
