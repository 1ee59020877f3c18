"""A server, ``vllm serve``, which answers the questions of ``vllm_gpu`` over the loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.engines.vllm_process import LAWS, PROMPTS

PATTERNS = ["[0-9]{12}", "(yes|no|perhaps)", "[a-f]{4}-[a-f]{4}"]


class Server:
    """``COMPILED_SAMPLER_VLLM=1 vllm serve`` with vLLM's defaults, and its clients."""

    def __init__(self, case: Mapping[str, Any], environment: Mapping[str, str], log: Path, port: int = 8741) -> None:
        """Start it; it is ready when ``started`` returns."""
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "1" if case["runner"] == "v2" else "0"}
        ours = {"COMPILED_SAMPLER_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **runner}
        command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.cli.main", "serve", case["folder"]]
        options = ["--port", str(port), "--max-model-len", "512", "--kv-cache-memory-bytes", str(1 << 30)]
        self.name, self._log, self._began = case["name"], log.open("w"), time.time()
        self._model, self._url = case["folder"], f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [*command, *options, "--gpu-memory-utilization", "0.05"],
            env={**os.environ, **environment, **ours},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def started(self) -> dict[str, Any]:
        """How long it took to start."""
        while self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=2):
                    return {"start_s": round(time.time() - self._began, 1)}
            except OSError:
                time.sleep(0.5)
        return {"error": f"{self.name} ended"}

    def ask(self, do: str, **question: Any) -> dict[str, Any]:
        """The answer to a question, of those that a server has one to."""
        if do == "tokens":
            return self._tokens(**question)
        return self._structured() if do == "state" else {}

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _complete(self, **request: Any) -> dict[str, Any]:
        body = json.dumps({"model": self._model, **request}).encode()
        headers = {"Content-Type": "application/json"}
        sent = urllib.request.Request(f"{self._url}/v1/completions", body, headers)
        try:
            with urllib.request.urlopen(sent, timeout=120) as answer:
                made: dict[str, Any] = json.load(answer)["choices"][0]
                return made
        except urllib.error.HTTPError as error:
            return {"status": error.code, "error": error.read().decode()[:300]}

    def _tokens(self, order: list[int], count: int = 48) -> dict[str, Any]:
        """The tokens of some of ``PROMPTS``, of requests that come at once."""

        def tokens(place: int) -> dict[str, Any]:
            law = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 100 + place, **LAWS[place]}
            given = {"max_tokens": count, "ignore_eos": True, "return_token_ids": True}
            made = self._complete(prompt=PROMPTS[place], **given, **law)
            return {"tokens": made.get("token_ids", [str(made)]), "logits": {}}

        with ThreadPoolExecutor(len(order)) as clients:
            return dict(zip(map(str, order), clients.map(tokens, order), strict=True))

    def _structured(self) -> dict[str, Any]:
        """Texts that follow grammars, alone and at once; logprobs; and a request that is refused."""

        def text(place: int) -> str:
            pattern = {"structured_outputs": {"regex": PATTERNS[place]}}
            made = self._complete(prompt=PROMPTS[place], max_tokens=24, seed=7 + place, temperature=0.9, **pattern)
            return str(made.get("text", made))

        places = range(len(PATTERNS))
        alone = [text(place) for place in places]
        with ThreadPoolExecutor(len(PATTERNS)) as clients:
            at_once = [*clients.map(text, places)]
        top = self._complete(prompt=[5, 6], max_tokens=2, logprobs=3, seed=1).get("logprobs")
        refused = self._complete(prompt=[5, 6], max_tokens=2, vllm_xargs={"typical_p": 7.0})
        return {"structured": alone, "at_once": at_once == alone, "logprobs": top, "refused": refused}
