"""Have tokens the target's law where vLLM's drafter says what it drew from, on a GPU?

    python -m tools.engines.vllm_law [--runner v2] [--rule rejection] [--requests 6000] [--work FOLDER] [--json FILE]

One vLLM engine of random weights with a draft model, in bfloat16, draws three tokens for each of many requests. Their
counts are compared with the law of the target in float64 by a chi-square test; the drafter's law is the control, which
must fail. Rounding of bfloat16 moves each probability by about 1 %, which 6,000 requests do not see.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from tools.engines.vllm_process import make_model

VOCAB, PROMPT, DRAFTS, FALSE_ALARM = 12, [5, 6, 7], 2, 1e-6
LAW: dict[str, Any] = {"temperature": 0.8, "top_k": 6}
Law = dict[tuple[int, ...], float]


def law_of(folder: Path) -> Law:
    """The law of the first three tokens after the prompt."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder).double().eval()
    texts = [(*PROMPT, *pair) for pair in product(range(VOCAB), repeat=2)]
    with torch.no_grad():
        logits = model(torch.tensor(texts)).logits[:, len(PROMPT) - 1 :] / LAW["temperature"]
    kept = logits >= logits.topk(LAW["top_k"], -1).values[..., -1:]
    laws = torch.where(kept, logits, -torch.inf).softmax(-1).tolist()
    made = {}
    for row, (first, second) in enumerate(product(range(VOCAB), repeat=2)):
        for third in range(VOCAB):
            made[first, second, third] = laws[row][0][first] * laws[row][1][second] * laws[row][2][third]
    return made


def p_value(drawn: list[tuple[int, ...]], law: Law) -> float:
    """Of a chi-square test, outcomes that are expected less than five times together."""
    from scipy.stats import chisquare

    counts, total = Counter(drawn), len(drawn)
    often = [each for each, probability in law.items() if probability * total >= 5]
    seen, expected = [counts[each] for each in often], [law[each] * total for each in often]
    seen, expected = [*seen, total - sum(seen)], [*expected, total - sum(expected)]
    return float(chisquare(seen, expected).pvalue)


def main() -> None:
    """Draw, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", default="v2", choices=["v1", "v2"])
    parser.add_argument("--rule", default="rejection", choices=["match", "rejection", "block"])
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--work", type=Path, default=Path("/tmp/vllm_law"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ |= {
        "VLLM_USE_V2_MODEL_RUNNER": str(int(options.runner == "v2")),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    target, drafter = (make_model("law", options.work / name, seed) for seed, name in enumerate(("target", "drafter")))
    from vllm import LLM, SamplingParams

    from compiled_sampler.integrations import vllm as adapter

    adapter.install(rule=options.rule, backend="eager")
    speculation = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": DRAFTS}
    llm = LLM(
        str(target),
        speculative_config={**speculation, "draft_sample_method": "probabilistic"},
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=128,
        kv_cache_memory_bytes=1 << 28,
        gpu_memory_utilization=0.05,
        disable_log_stats=False,
    )
    given = {**LAW, "max_tokens": 3, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(seed=seed, **given) for seed in range(options.requests)]
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * options.requests, params, use_tqdm=False)
    drawn = [tuple(each.outputs[0].token_ids) for each in outputs]
    metrics = {each.name: getattr(each, "value", None) for each in llm.get_metrics()}
    found = {
        "runner": options.runner,
        "rule": options.rule,
        "requests": options.requests,
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens"),
        "drafted": metrics.get("vllm:spec_decode_num_draft_tokens"),
        "target_p": p_value(drawn, law_of(target)),
        "drafter_p": p_value(drawn, law_of(drafter)),
        "statistics": adapter.statistics(),
    }
    found["passed"] = found["target_p"] > FALSE_ALARM > found["drafter_p"]
    print(json.dumps(found), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
