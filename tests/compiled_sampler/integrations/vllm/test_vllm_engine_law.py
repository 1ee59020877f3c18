"""The law of tokens under rejection and block, with a draft model that says what it drew from, inside vLLM."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.vllm_engine import make_model, run
from tools.engines.vllm_law import DRAFTS, FALSE_ALARM, LAW, PROMPT, VOCAB, law_of, p_value

pytestmark = pytest.mark.full

COUNT = 6000


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "target", VOCAB, seed=0)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "drafter", VOCAB, seed=1)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_tokens_have_the_law_of_the_target_and_not_that_of_the_drafter(rule: str, target: Path, drafter: Path) -> None:
    """False alarm of one case: 1e-6. The drafter's law is the control, which must fail."""
    drafts = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": DRAFTS}
    speculation = {**drafts, "draft_sample_method": "probabilistic"}
    params: dict[str, Any] = {**LAW, "max_tokens": 3, "ignore_eos": True, "detokenize": False}
    requests = [{"prompt": PROMPT, "params": {**params, "seed": seed}} for seed in range(COUNT)]
    engine = {"speculative_config": speculation, "max_num_seqs": 128}
    made = run(target, [requests], install={"backend": "eager", "rule": rule}, engine=engine)
    drawn = [tuple(each["tokens"]) for each in made["rounds"][0]]
    accepted = made["metrics"]["vllm:spec_decode_num_accepted_tokens"]
    assert COUNT / 10 < accepted < made["metrics"]["vllm:spec_decode_num_draft_tokens"]
    assert p_value(drawn, law_of(target)) > FALSE_ALARM
    assert p_value(drawn, law_of(drafter)) < FALSE_ALARM
