"""A vLLM engine in a process of its own, which runs rounds of requests and says what it drew from which logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
ENGINE = {"enforce_eager": True, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "block_size": 32}
EOS = 1


def make_model(folder: Path, vocab_size: int, seed: int, spread: float = 1.0) -> Path:
    """A random Qwen3 of 2 layers in a new folder, its logits times ``spread``; one word a token: "t3", "t4", ..."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    ids = {"eos_token_id": EOS, "pad_token_id": 0, "bos_token_id": 2, "max_position_embeddings": 512}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab_size, initializer_range=0.2, **sizes, **heads, **ids))
    with torch.no_grad():
        model.lm_head.weight *= spread
    model.save_pretrained(folder)
    words = {"<pad>": 0, "</s>": EOS, "<s>": 2, **{f"t{each}": each for each in range(3, vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"eos_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def run(model: Path, rounds: list[list[dict[str, Any]]], **given: Any) -> dict[str, Any]:
    """``requests_of`` rounds, each one call of ``generate``, ``steps`` of each, and the ``statistics`` and ``metrics``.

    ``given`` are ``engine``, arguments of LLM; ``install``, those of ``install``; ``environment``; ``keeps_rows``.
    """
    environment = {**os.environ, **ENVIRONMENT, **given.pop("environment", {})}
    job = json.dumps({"model": str(model), "rounds": rounds, **given})
    command = [sys.executable, "-W", "ignore", "-m", "tests.engines.vllm_engine"]
    made = subprocess.run(
        command, input=job, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    marked = [line for line in made.stdout.splitlines() if line.startswith(MARK)]
    if not marked:
        raise RuntimeError(f"the engine did not end well:\n{made.stdout[-2000:]}\n{made.stderr[-6000:]}")
    results: dict[str, Any] = json.loads(marked[-1].removeprefix(MARK))
    return results


MARK = "RESULTS "


class Recorder:
    """Hashes of the logits that a runner draws from, by request and position; the last one of a position counts."""

    def __init__(self, keeps_rows: bool) -> None:
        self.keeps_rows = keeps_rows
        self.by_request: dict[str, dict[int, str]] = {}
        self.rows: dict[str, dict[int, list[float]]] = {}
        self.steps = 0

    def install(self) -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        drawn = GPUModelRunner._sample

        def recorded(runner: Any, logits: Any, drafts: Any) -> Any:
            self.record(runner, logits, drafts)
            return drawn(runner, logits, drafts)

        GPUModelRunner._sample = recorded

    def record(self, runner: Any, logits: Any, drafts: Any) -> None:
        batch, row = runner.input_batch, 0
        self.steps += 1
        counts = [0] * batch.num_reqs if drafts is None else drafts.num_draft_tokens
        for request_id, known, count in zip(batch.req_ids, batch.num_tokens_no_spec, counts, strict=False):
            name = request_id.rpartition("-")[0]
            hashes, rows = self.by_request.setdefault(name, {}), self.rows.setdefault(name, {})
            for position in range(int(known), int(known) + count + 1):
                hashes[position] = blake2b(logits[row].numpy().tobytes(), digest_size=8).hexdigest()
                rows[position] = logits[row].tolist() if self.keeps_rows else []
                row += 1


def sampling_params(given: dict[str, Any]) -> Any:
    """Parameters of vLLM, structured outputs by a ``choice`` among them."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = {"max_tokens": 16, **given}
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}  # JSON's keys are text
    if "choice" in given:
        given["structured_outputs"] = StructuredOutputsParams(choice=given.pop("choice"))
    return SamplingParams(**given)


def requests_of(found: Any, recorder: Recorder) -> dict[str, Any]:
    """What is returned of one request: ``logits`` as hashes by position, ``all`` tokens of n choices."""
    out, logprobs = found.outputs[0], found.outputs[0].logprobs
    tables = [{str(key): [each.logprob, each.rank] for key, each in step.items()} for step in logprobs or []]
    logits = recorder.by_request.get(found.request_id, {})
    made = {"tokens": list(out.token_ids), "all": [list(each.token_ids) for each in found.outputs], "logits": logits}
    return {**made, "rows": recorder.rows.get(found.request_id), "logprobs": tables, "cached": found.num_cached_tokens}


def main() -> None:
    """Run the job of the standard input."""
    job = json.loads(sys.stdin.read())
    from vllm import LLM
    from vllm.exceptions import VLLMValidationError

    from compiled_sampler.integrations import vllm as adapter

    if job.get("install") is not None:
        adapter.install(**job["install"])
    recorder, results = Recorder(bool(job.get("keeps_rows"))), dict[str, Any](rounds=[], steps=[])
    llm = LLM(job["model"], disable_log_stats=False, **{**ENGINE, **job.get("engine", {})})
    recorder.install()
    for requests in job["rounds"]:
        before, recorder.by_request, recorder.rows = recorder.steps, {}, {}
        prompts = [{"prompt_token_ids": each["prompt"]} for each in requests]
        params = [sampling_params(each["params"]) for each in requests]
        try:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results["rounds"].append([requests_of(each, recorder) for each in outputs])
        except (ValueError, VLLMValidationError) as error:
            results["rounds"].append([{"error": str(error)}])
        results["steps"].append(recorder.steps - before)
    counters = [each for each in llm.get_metrics() if hasattr(each, "value")]
    results["metrics"] = {each.name: each.value for each in counters}
    results["statistics"] = adapter.statistics()
    print("\n" + MARK + json.dumps(results), flush=True)
    llm.llm_engine.engine_core.shutdown()  # its process would keep the pipes open
    os._exit(0)


if __name__ == "__main__":
    main()
