"""The same prompts and seeds in engines that batch, speculate, cache and schedule in other ways: the same tokens.

Under rejection and block, with a draft model that says what it drew from, tokens have the law of the target.
"""

import os
import re
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.vllm_engine import ENVIRONMENT, ROOT, make_model, run
from tools.engines import vllm_law
from tools.engines.vllm_process import LAWS, NGRAM, PROMPTS

pytestmark = pytest.mark.full

VOCAB = 128
REQUESTS = [
    {"prompt": prompt, "params": {"seed": 100 + place, "max_tokens": 48, "ignore_eos": place != 7, **law}}
    for place, (prompt, law) in enumerate(zip(PROMPTS, LAWS, strict=True))
]
OURS = {"install": {"backend": "eager"}}
ENGINES: dict[str, dict[str, Any]] = {
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


def agreement(first: dict[str, Any], second: dict[str, Any], prompt_len: int) -> tuple[int, int]:
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


def compared(name: str, first: list[Any], second: list[Any]) -> tuple[int, int]:
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
    params: dict[str, Any] = {**vllm_law.LAW, "max_tokens": 3, "ignore_eos": True, "detokenize": False}
    requests = [{"prompt": vllm_law.PROMPT, "params": {**params, "seed": seed}} for seed in range(COUNT)]
    engine = {"speculative_config": speculation, "max_num_seqs": 128}
    made = run(target, [requests], install={"backend": "eager", "rule": rule}, engine=engine)
    drawn = [tuple(each["tokens"]) for each in made["rounds"][0]]
    accepted = made["metrics"]["vllm:spec_decode_num_accepted_tokens"]
    assert COUNT / 10 < accepted < made["metrics"]["vllm:spec_decode_num_draft_tokens"]
    assert vllm_law.p_value(drawn, vllm_law.law_of(target)) > vllm_law.FALSE_ALARM
    assert vllm_law.p_value(drawn, vllm_law.law_of(drafter)) < vllm_law.FALSE_ALARM
