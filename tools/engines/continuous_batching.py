"""How many tokens a second does continuous batching of transformers give with our sampler, and with the stock one?

Command line::

    .engines/bin/python -m tools.engines.continuous_batching [--device cuda] [--rows 1 8 32 128] [--vocab 151936]
                                                             [--cases greedy ...] [--tokens 64] [--repeats 7]
                                                             [--json FILE [--append]]

A tiny random Qwen3 decodes, so that the sampler shows. The time is that of a whole call: prompts of 8 tokens, then
``tokens`` steps of all rows; a step's share is the call's time over the tokens of a request. The first calls are not
timed: transformers captures a graph for each size of batch that it meets, and requests that come one after the other
make many.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from compiled_sampler import functional
from tools.engines.transformers_step import CASES, build
from tools.measuring import environment, write_json

PROMPT = 8
_MOST_SECONDS = 600  # of the first step, which compiles
_UNTIMED_CALLS = 3
Row = dict[str, Any]


def collected(manager: Any, prompts: list[list[int]], given: list[dict[str, Any]]) -> int:
    """Add requests and wait for all of them; the number of tokens."""
    names = [manager.add_request(prompt, **each) for prompt, each in zip(prompts, given, strict=True)]
    found: dict[str, int] = {}
    while len(found) < len(names):
        output = manager.get_result(timeout=_MOST_SECONDS)
        if output is None or output.error is not None:
            raise RuntimeError("a request failed" if output is None else output.error)
        if output.is_finished():
            found[output.request_id] = len(output.generated_tokens)
    return sum(found.values())


@contextlib.contextmanager
def written_cache() -> Iterator[None]:
    """Within, caches of transformers begin as zeros.

    Its warm-up draws from a cache that nobody has written. What memory held before may be NaN, for which the stock
    sampler (``torch.multinomial``) ends the process.
    """
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    def made(self: Any, *args: Any, **others: Any) -> None:
        make(self, *args, **others)
        for each in (*self.key_cache, *self.value_cache):
            each.zero_()

    make = PagedAttentionCache.__init__
    with mock.patch.object(PagedAttentionCache, "__init__", made):
        yield


def measure(model: Any, law: dict[str, Any], rows: int, options: argparse.Namespace, is_ours: bool) -> Row:
    """Tokens a second and microseconds a step of one sampler, the median of calls."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from compiled_sampler.integrations.transformers.continuous_batching import installed

    is_cuda = options.device.startswith("cuda")
    sizes = {"num_blocks": max(16, 2 * rows), "max_batch_tokens": max(64, PROMPT * rows)}
    blocks = ContinuousBatchingConfig(**sizes, max_requests_per_batch=rows, use_cuda_graph=is_cuda)
    fixed = {"do_sample": True, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": options.tokens}
    config = GenerationConfig(
        **{**fixed, **{name: value for name, value in law.items() if (name, value) != ("top_k", 0)}}
    )
    prompts = torch.randint(3, 1000, (rows, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    given = [{"seed": seed} if is_ours else {} for seed in range(rows)]
    seconds = []
    way = installed() if is_ours else contextlib.nullcontext()
    run = model.continuous_batching_context_manager(config, continuous_batching_config=blocks)
    with way, written_cache(), run as manager:
        for call in range(options.repeats + _UNTIMED_CALLS):
            start = time.perf_counter()
            count = collected(manager, prompts, given)
            seconds.append(time.perf_counter() - start)
            if is_ours and call < _UNTIMED_CALLS:
                functional.warmup()  # steps are captured once the draw is compiled
    took = median(seconds[_UNTIMED_CALLS:])
    return {"tokens_per_s": round(count / took, 1), "step_us": round(took / options.tokens * 1e6, 1)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--spread", type=float, default=6.0, help="standard deviation of the logits")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="store the numbers in this file, after each case")
    parser.add_argument("--append", action="store_true", help="keep the other cases of that file")
    options = parser.parse_args()
    model = build(options.vocab, options.spread).to(options.device)
    model.set_attn_implementation("paged|eager")
    found = [row for row in _stored(options) if row["case"] not in options.cases]
    for name in options.cases:
        law = CASES[name]
        for rows in options.rows:
            ours, stock = (measure(model, law, rows, options, is_ours) for is_ours in (True, False))
            found.append({"case": name, "rows": rows, "ours": ours, "stock": stock})
            print(_line(found[-1]), flush=True)
            if options.json:
                sizes = {"vocab": options.vocab, "tokens": options.tokens, "spread": options.spread}
                write_json(options.json, {**environment(options.device), **_transformers(), **sizes, "table": found})


def _stored(options: argparse.Namespace) -> list[Row]:
    """The rows of the file, if it is appended to."""
    table: list[Row] = json.loads(Path(options.json).read_text())["table"] if options.append else []
    return table


def _transformers() -> dict[str, str]:
    import transformers

    return {"transformers": transformers.__version__}


def _line(row: Row) -> str:
    times = [f"{row[who][key]:,.0f}" for key in ("tokens_per_s", "step_us") for who in ("ours", "stock")]
    return f"| {row['case']} | {row['rows']} | {' | '.join(times)} |"


def rendered(measured: dict[str, Any]) -> str:
    """The table, and with what it was measured."""
    lines = [
        "| case | rows | tokens/s, ours | stock | us a step, ours | stock |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *map(_line, measured["table"]),
    ]
    machine = f"{measured['device']}; transformers {measured['transformers']}, torch {measured['torch']}"
    return "\n".join(lines) + f"\n\n{machine}."


if __name__ == "__main__":
    main()
