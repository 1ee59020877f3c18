"""The law of tokens under rejection and block, with a draft model that says what it drew from, inside vLLM."""

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from scipy.stats import chisquare

from tests.engines.vllm_engine import make_model, run

pytestmark = pytest.mark.full

VOCAB, PROMPT, COUNT, FALSE_ALARM = 12, [5, 6, 7], 6000, 1e-6
LAW = {"temperature": 0.8, "top_k": 6}


def probabilities(folder: Path) -> dict[tuple[int, ...], float]:
    """The law of the first three tokens behind the prompt, by transformers in float64."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder).double().eval()
    texts = [(*PROMPT, *pair) for pair in product(range(VOCAB), repeat=2)]
    with torch.no_grad():
        logits = model(torch.tensor(texts)).logits[:, len(PROMPT) - 1 :] / LAW["temperature"]
    kept = logits >= logits.topk(LAW["top_k"], -1).values[..., -1:]
    laws = torch.where(kept, logits, -torch.inf).softmax(-1)
    made = {}
    for row, (first, second) in enumerate(product(range(VOCAB), repeat=2)):
        for third in range(VOCAB):
            made[first, second, third] = (laws[row, 0, first] * laws[row, 1, second] * laws[row, 2, third]).item()
    return made


def p_value(drawn: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Of a chi-square test, outcomes that are expected less than five times together."""
    counts, total = Counter(drawn), len(drawn)
    often = [each for each, probability in law.items() if probability * total >= 5]
    seen = [counts[each] for each in often]
    expected = [law[each] * total for each in often]
    pairs = [*zip(seen, expected, strict=True), (total - sum(seen), total - sum(expected))]
    return float(chisquare(*zip(*pairs, strict=True)).pvalue)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "target", VOCAB, seed=0)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "drafter", VOCAB, seed=1)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_tokens_have_the_law_of_the_target_and_not_that_of_the_drafter(rule: str, target: Path, drafter: Path) -> None:
    """False alarm of one case: 1e-6. The drafter's law is the control, which must fail."""
    drafts = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 2}
    speculation = {**drafts, "draft_sample_method": "probabilistic"}
    params: dict[str, Any] = {**LAW, "max_tokens": 3, "ignore_eos": True, "detokenize": False}
    requests = [{"prompt": PROMPT, "params": {**params, "seed": seed}} for seed in range(COUNT)]
    engine = {"speculative_config": speculation, "max_num_seqs": 128}
    made = run(target, [requests], install={"backend": "eager", "rule": rule}, engine=engine)
    drawn = [tuple(each["tokens"]) for each in made["rounds"][0]]
    accepted = made["metrics"]["vllm:spec_decode_num_accepted_tokens"]
    assert COUNT / 10 < accepted < made["metrics"]["vllm:spec_decode_num_draft_tokens"]
    assert p_value(drawn, probabilities(target)) > FALSE_ALARM
    assert p_value(drawn, probabilities(drafter)) < FALSE_ALARM
