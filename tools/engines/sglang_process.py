"""One SGLang engine on a GPU in a process of its own, which answers questions: started by ``sglang_gpu``."""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from compiled_sampler import functional
from tools.engines.vllm_gpu import ENVIRONMENT, Process
from tools.engines.vllm_process import PROMPTS, answer_questions

OURS = {"COMPILED_SAMPLER_SGLANG": "1"}
ENGINES: dict[str, dict[str, Any]] = {
    "ours": {"environment": OURS},
    "stock": {"engine": {"sampling_backend": "flashinfer"}},  # SGLang's default; it takes no seeds
    "stock_seeded": {"engine": {"enable_deterministic_inference": True}},
    "ours_eager": {"environment": OURS, "engine": {"disable_cuda_graph": True}},
    "ours_chunked": {"environment": OURS, "engine": {"chunked_prefill_size": 16}},
    "ours_seeded": {"environment": OURS, "engine": {"enable_deterministic_inference": True}},
}
SIZES = [1, 2, 4, 8, 16, 32, 64, 128]
ARGUMENTS = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "sampling_backend": "compiled_sampler",
    "grammar_backend": "none",
    "mem_fraction_static": 0.4,
    "max_total_tokens": 32_768,
    "max_running_requests": max(SIZES),
    "cuda_graph_bs_decode": SIZES,
    "disable_prefill_cuda_graph": True,
    "disable_flashinfer_autotune": True,
    "sleep_on_idle": True,
    "random_seed": 0,
    "log_level": "info",
}

LAWS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"top_p": 0.7},
    {"temperature": 1.5, "top_k": 50},
    {"temperature": 0.7, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 0.8, "logit_bias": {"7": 1.5}, "top_k": 5},
    {"temperature": 1.2},
]
"""Laws of the requests whose tokens are compared, in turn; none with a min_p, which SGLang has no seeds for."""
REQUESTS = [(PROMPTS[place % 8], LAWS[(place + place // 8) % 8]) for place in range(16)]
HASHES = "SGLANG_GPU_HASHES"  # environment variable: the file of an engine's hashes; none is noted while it is absent
SETTLE = ".settle"  # suffix of a file: while it is there, the sampler waits until its kernels are compiled
HOST = ".host"  # suffix of a file: while it is empty, the sampler writes what its calls took since it last did


def watch() -> None:
    """What SGLang calls as a plugin: note hashes of the logits that its sampler sees."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_executor.model_runner.create_sampler", watched, HookType.AFTER)


def watched(sampler: Any) -> None:
    """Have a sampler write a line of seed, position and hash for each row, and what its calls take of the host."""
    forward, place = sampler.forward, Path(os.environ[HASHES])
    settle, host, calls_us = place.with_suffix(SETTLE), place.with_suffix(HOST), list[float]()

    def noted(outputs: Any, info: Any, *args: Any, **named: Any) -> Any:
        if place.exists() and info.sampling_seed is not None:
            rows = outputs.next_token_logits.float().cpu().numpy()
            keys = zip(info.sampling_seed.tolist(), args[3].tolist(), rows, strict=False)
            lines = [
                f"{seed} {at + 1} {hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest()}\n"
                for seed, at, row in keys
            ]
            with place.open("a") as file:
                file.writelines(lines)
        if settle.exists():
            functional.warmup()
            settle.unlink()
        if host.exists() and not host.stat().st_size:
            host.write_text(f"{median(calls_us or [0.0]):.0f}")
            calls_us.clear()
        began = time.perf_counter()
        token_ids = forward(outputs, info, *args, **named)
        calls_us.append(1e6 * (time.perf_counter() - began))
        return token_ids

    sampler.forward = noted


class Engine:
    """An engine of SGLang; the case says how: ``folder`` of the model, ``engine``."""

    def __init__(self, case: dict[str, Any]) -> None:
        """Start it."""
        began = time.perf_counter()
        import sglang

        self.engine = sglang.Engine(model_path=case["folder"], **case["engine"])
        self.started = {"start_s": round(time.perf_counter() - began, 1)}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """What a question asks for: ``tokens``, the ``time`` of a round, that of the ``host``, or to ``settle``."""
        do: Callable[..., dict[str, Any]] = getattr(self, f"_{question.pop('do')}")
        return do(**question)

    def _generate(self, prompts: list[list[int]], laws: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
        params = [{"max_new_tokens": count, "ignore_eos": True, **law} for law in laws]
        made: list[dict[str, Any]] = self.engine.generate(input_ids=prompts, sampling_params=params)
        return made

    def _tokens(self, order: list[int], is_cold: bool, count: int = 24) -> dict[str, Any]:
        """The tokens of some requests, and their hashes by position."""
        end = time.monotonic() + 10
        while is_cold and not self.engine.flush_cache().success and time.monotonic() < end:
            time.sleep(0.01)  # a step that runs ahead of the last request is not over
        place = Path(os.environ[HASHES])
        place.write_text("")
        laws = [{**REQUESTS[each][1], "sampling_seed": 100 + each} for each in order]
        outputs = self._generate([REQUESTS[each][0] for each in order], laws, count)
        hashes: dict[str, dict[str, str]] = defaultdict(dict)
        for seed, position, digest in (line.split() for line in place.read_text().splitlines()):
            hashes[seed][position] = digest
        place.unlink()
        cached = sum(each["meta_info"]["cached_tokens"] for each in outputs)
        rows = {
            str(each): {"tokens": output["output_ids"], "logits": hashes[str(100 + each)]}
            for each, output in zip(order, outputs, strict=True)
        }
        return {"rows": rows, "cached": cached}

    def _settle(self) -> dict[str, Any]:
        """How long the kernels of the calls so far took to be compiled."""
        began = time.perf_counter()
        Path(os.environ[HASHES]).with_suffix(SETTLE).touch()
        self._generate([[5, 6, 7]], [{"sampling_seed": 1}], 2)
        return {"seconds": round(time.perf_counter() - began, 1)}

    def _host(self) -> dict[str, Any]:
        """The median of the microseconds that the host spent in calls of the sampler since the last such question."""
        place = Path(os.environ[HASHES]).with_suffix(HOST)
        place.touch()
        self._generate([[5, 6, 7]], [{"sampling_seed": 1}], 2)
        host_us = int(place.read_text())
        place.unlink()
        return {"us": host_us}

    def _time(self, rows: int, tokens: int, law: dict[str, Any]) -> dict[str, Any]:
        """Milliseconds a step of a round, its prefill included."""
        laws = [{"temperature": 0.8, **law, "sampling_seed": 900 + row} for row in range(rows)]
        began = time.perf_counter()
        self._generate([[5 + row, 6, 7] for row in range(rows)], laws, tokens)
        return {"ms": 1e3 * (time.perf_counter() - began) / tokens}


def started(name: str, work: Path, folder: Path) -> Process:
    """An engine that begins to start."""
    case = {"name": name, "module": "tools.engines.sglang_process", "folder": str(folder)}
    engine = {**ARGUMENTS, **ENGINES[name].get("engine", {})}
    if engine.get("enable_deterministic_inference"):
        del engine["sampling_backend"]
    environment = {**ENVIRONMENT, **ENGINES[name].get("environment", {}), HASHES: str(work / f"{name}.hashes")}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "TRITON_CACHE_DIR": str(work / "triton")}
    environment["PYTHONPATH"] = os.pathsep.join([str(work / "plugin"), os.environ.get("PYTHONPATH", "")])
    return Process({**case, "engine": engine}, environment, work / f"{name}.log")


def make_plugin(folder: Path) -> None:
    """Metadata by which SGLang finds the plugin ``watch``."""
    metadata = folder / "sglang_gpu_watch-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-gpu-watch\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nwatch = tools.engines.sglang_process:watch\n")


if __name__ == "__main__":
    answer_questions(Engine)
