"""One vLLM engine on a GPU in a process of its own, which answers one question after another: started by ``vllm_gpu``.

    python -m tools.engines.vllm_process '{"runner": "v2", "sampler": "ours", "model": "small", ...}'

A question is a line of JSON on standard input, its answer a line on standard output; an engine that waits for a
question leaves the GPU and the processor to others.
"""

from __future__ import annotations

import cProfile
import hashlib
import json
import os
import pstats
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

MODELS = {  # vocabulary, hidden, intermediate, layers, heads, KV heads, size of a head, factor of the logits
    "small": (151_936, 1024, 3072, 4, 16, 8, 128, 0.75),  # four layers of the shapes of a Qwen3 of 0.6B parameters
    "1B": (151_936, 2048, 6144, 14, 16, 8, 128, 0.5),
    "loop": (128, 256, 512, 2, 4, 2, 64, 2.5),  # repeats itself, so that n-gram drafts are accepted
    "law": (12, 256, 512, 2, 4, 2, 64, 0.2),  # so few tokens that each text of three has a count
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SHARED = [(7 * each) % 100 + 10 for each in range(70)]  # two blocks of 32 tokens that the cache of prefixes may hold
PROMPTS = [[5, 6, 7] * 4, [9, 3], [*SHARED, 4], [*SHARED, 8, 9], [11], [*range(20, 60)], [8, 8, 8], [30, 31, 30, 31]]
METRICS = ("vllm:num_preemptions", "vllm:prefix_cache_hits", "vllm:spec_decode_num_accepted_tokens")
LAWS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"top_p": 0.7},
    {"temperature": 0.6, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 0.8, "logit_bias": {7: 1.5}, "top_k": 5},
    {"temperature": 0.5, "min_tokens": 20},
]
"""Laws of the requests whose tokens are compared, one for each of ``PROMPTS``."""


def make_model(name: str, folder: Path, seed: int = 0) -> Path:
    """Random weights in bfloat16 whose logits have a spread of about 5; stored once in a folder."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    vocab, hidden, inner, layers, heads, kv_heads, head, factor = MODELS[name]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": head}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": False}
    ids = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2, "max_position_embeddings": 4096}
    config = Qwen3Config(vocab_size=vocab, initializer_range=0.2, dtype="bfloat16", **sizes, **attention, **ids)
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= factor
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer(vocab).save_pretrained(folder)
    return folder


def make_tokenizer(vocab_size: int) -> Any:
    """A tokenizer of a byte a token, and of tokens that stand for no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "</s>", "<s>", *alphabet, *(f"<{each}>" for each in range(vocab_size))][:vocab_size]
    tokenizer = Tokenizer(models.BPE({word: place for place, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    special = {"eos_token": "</s>", "pad_token": "<pad>", "bos_token": "<s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


class Engine:
    """An engine of vLLM, with what was noted of its sampler's calls."""

    def __init__(self, case: dict[str, Any]) -> None:
        """Start it; the case says how: ``runner``, ``sampler``, ``folder``, ``drafts``, ``engine``, ``install``."""
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if case["runner"] == "v2" else "0"
        began = time.perf_counter()
        from vllm import LLM

        self.adapter = None
        if case["sampler"] == "ours":
            from compiled_sampler.integrations import vllm as adapter

            adapter.install(**case.get("install", {}))
            self.adapter = adapter
        imported = time.perf_counter()
        drafts = {"speculative_config": NGRAM} if case.get("drafts") == "ngram" else {}
        self.llm = LLM(case["folder"], **drafts, **case.get("engine", {}))
        self.started = {
            "import_s": round(imported - began, 1),
            "start_s": round(time.perf_counter() - imported, 1),
        }
        self.is_v2 = case["runner"] == "v2"
        self.host: list[float] = []
        self.hashes: dict[str, dict[int, str]] | None = None
        self.runner: Any = None  # of several ranks, each has a process of its own
        if case.get("engine", {}).get("tensor_parallel_size", 1) == 1:
            self.runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
            self._watch()

    def _watch(self) -> None:
        """Time each call of the sampler on the host, and hash its logits where that is asked for."""
        if not self.is_v2:
            runner, drawn = self.runner, self.runner._sample

            def sample(logits: Any, drafts: Any) -> Any:
                if self.hashes is not None:
                    batch = runner.input_batch
                    counts = [0] * batch.num_reqs if drafts is None else drafts.num_draft_tokens
                    known = zip(batch.req_ids, batch.num_tokens_no_spec, counts, strict=False)
                    keys = [
                        (runner.requests[name].sampling_params.seed, int(first) + place)
                        for name, first, count in known
                        for place in range(count + 1)
                    ]
                    self._hash(keys, logits)
                return self._timed(drawn, logits, drafts)

            runner._sample = sample
            return
        for name in ("sampler", "rejection_sampler"):
            stock = getattr(self.runner, name)
            if stock is not None:
                setattr(self.runner, name, Watched(stock, self))

    def note_v2(self, logits: Any, batch: Any) -> None:
        """Hash the rows of a V2 batch."""
        if self.hashes is None:
            return
        seeds = self.runner.sampler.sampling_states.seeds.np[batch.expanded_idx_mapping.tolist()].tolist()
        positions = (batch.positions[batch.logits_indices] + 1).tolist()
        self._hash(list(zip(seeds, positions, strict=True)), logits)

    def _hash(self, keys: list[tuple[int, int]], logits: Any) -> None:
        assert self.hashes is not None
        for (seed, position), row in zip(keys, logits.float().cpu().numpy(), strict=True):
            self.hashes[str(seed)][position] = hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest()

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        import torch

        began = time.perf_counter()
        with torch.profiler.record_function("SAMPLER"):
            made = call(*args)
        self.host.append(1e6 * (time.perf_counter() - began))
        return made

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """What a question asks for."""
        made: dict[str, Any] = getattr(self, "_" + question.pop("do"))(**question)
        return made

    def _time(self, rows: int, tokens: int, law: dict[str, Any]) -> dict[str, Any]:
        """Milliseconds a step of a round, those of the processor, and microseconds of the sampler's calls."""
        # What the processor takes depends less on what else a shared host does; with several threads it may be more.
        self.host.clear()
        began, cpu = time.perf_counter(), time.process_time()
        self._generate(rows, tokens, law)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        host = self.host[1:] or [0.0]
        per_step = {"ms": 1e3 * took / tokens, "cpu_ms": 1e3 * cpu / tokens}
        return {**per_step, "host_us": median(host), "host_max_us": max(host)}

    def _generate(self, rows: int, tokens: int, law: dict[str, Any]) -> list[list[int]]:
        from vllm import SamplingParams

        law = {"temperature": 0.8, **law}
        seeds = [None if law.get("seed", 0) is None else 900 + row for row in range(rows)]
        given = {**law, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(**{**given, "seed": seed}) for seed in seeds]
        prompts = [{"prompt_token_ids": [5 + row, 6, 7]} for row in range(rows)]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in outputs]

    def _tokens(self, order: list[int], count: int = 48) -> dict[str, Any]:
        """The tokens of some of ``PROMPTS`` in an order, and a hash of the logits of each position."""
        from vllm import SamplingParams

        self.hashes = defaultdict(dict)
        given = {"max_tokens": count, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(seed=100 + place, **given, **LAWS[place]) for place in order]
        outputs = self.llm.generate([{"prompt_token_ids": PROMPTS[each]} for each in order], params, use_tqdm=False)
        hashes, self.hashes = self.hashes, None
        return {
            str(place): {"tokens": list(each.outputs[0].token_ids), "logits": hashes[str(100 + place)]}
            for place, each in zip(order, outputs, strict=True)
        }

    def _profile(self, rows: int, tokens: int, law: dict[str, Any]) -> dict[str, Any]:
        """Where a step's time goes: the sampler's host, its calls of the driver, its kernels, and its functions."""
        import torch
        from torch.profiler import ProfilerActivity

        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            self._generate(rows, tokens, law)
            torch.accelerator.synchronize()
        spans = [each for each in profiler.events() if each.name == "SAMPLER" and each.device_type.name == "CPU"][1:]
        calls: Counter[str] = Counter()
        times: Counter[str] = Counter()
        kernels: Counter[str] = Counter()
        starts = sorted((each.time_range.start, each.time_range.end) for each in spans)
        launched = 0.0
        for each in profiler.events():
            if each.device_type.name != "CPU" or not _is_within(each.time_range.start, starts):
                continue
            if each.name.startswith("cuda") or each.name.startswith("cu"):
                calls[each.name] += 1
                times[each.name] += each.time_range.elapsed_us()
            for kernel in each.kernels:
                kernels[kernel.name[:60]] += kernel.duration
                launched += kernel.duration
        count = max(1, len(spans))
        by_function = cProfile.Profile()
        by_function.runcall(self._generate, rows, tokens, law)
        stats: Any = pstats.Stats(by_function)
        slowest = sorted(stats.stats.items(), key=lambda item: -item[1][3])
        return {
            "steps": count,
            "host_us": sum(end - start for start, end in starts) / count,
            "kernel_us": launched / count,
            "driver": {name: [calls[name] / count, times[name] / count] for name, _ in times.most_common(8)},
            "kernels": {name: us / count for name, us in kernels.most_common(12)},
            "functions": [
                f"{Path(file).name}:{line} {name}: {calls_ / tokens:.1f} calls, {1e6 * total / tokens:.0f} us a step"
                for (file, line, name), (_, calls_, _, total, _) in slowest[:70]
            ],
        }

    def _settle(self, seconds: float) -> dict[str, Any]:
        """How long it took until no stage was compiled in the background any more; stages that stay in eager torch."""
        began, lowering = time.perf_counter(), self._lowering()
        while lowering is not None and lowering.queued_stages and time.perf_counter() - began < seconds:
            time.sleep(0.2)
            lowering = self._lowering()
        left = {} if lowering is None else {**lowering.queued_stages, **lowering.eager_stages}
        return {"seconds": round(time.perf_counter() - began, 1), "left": left}

    def _lowering(self) -> Any:
        """How the stages of our sampler run, if there is one."""
        if self.adapter is None or self.runner is None:
            return None
        from compiled_sampler.integrations.vllm import plugin

        state = self.runner.sampler._stock if self.is_v2 else plugin.state_of(self.runner)._sampler.engine
        engine = state._engine if self.is_v2 else state
        return engine.sampler.statistics().lowering

    def _state(self) -> dict[str, Any]:
        """The memory of the device that this process has, and what the adapter counted."""
        import torch

        torch.cuda.synchronize()
        counted = {} if self.adapter is None else self.adapter.statistics()
        return {
            "allocated_mb": torch.cuda.memory_allocated() / 2**20,
            "reserved_mb": torch.cuda.memory_reserved() / 2**20,
            "statistics": counted,
            "metrics": {each.name: each.value for each in self.llm.get_metrics() if each.name in METRICS},
        }


class Watched:
    """A sampler of a V2 runner whose calls are noted."""

    def __init__(self, stock: Any, engine: Engine) -> None:
        """Stand for a sampler."""
        self._stock, self._engine = stock, engine

    def __call__(self, logits: Any, batch: Any, *args: Any) -> Any:
        """Its call."""
        self._engine.note_v2(logits, batch)
        return self._engine._timed(self._stock, logits, batch, *args)

    def __getattr__(self, name: str) -> Any:
        """Its attributes."""
        return getattr(self._stock, name)


def _is_within(time_us: float, spans: list[tuple[float, float]]) -> bool:
    return any(start <= time_us <= end for start, end in spans)


def answer_questions(kind: Callable[[dict[str, Any]], Any]) -> None:
    """Start an engine of a kind and answer questions until there are none."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an engine prints is no answer
    engine = kind(json.loads(sys.argv[1]))
    print(json.dumps(engine.started), file=answers)
    for line in sys.stdin:
        try:
            answer = engine.answer(json.loads(line))
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"error": repr(error)[:500]}
        print(json.dumps(answer), file=answers)
    os._exit(0)


if __name__ == "__main__":
    answer_questions(Engine)
