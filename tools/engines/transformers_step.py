"""How long does a decode step of transformers take with our sampler, with the stock one, and without the model?

Command line::

    .engines/bin/python -m tools.engines.transformers_step [--rows 8] [--vocab 151936] [--spread 6] [--json FILE]

A tiny random Qwen3 decodes, so that the sampler shows. A step is the difference of two calls of different lengths, each
the shortest of several; ``model`` is a step whose token is fixed, so a sampler's part is its step without that.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CASES: dict[str, dict[str, Any]] = {
    "temperature .8": {"temperature": 0.8, "top_k": 0},
    "k 50 + p .9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "p .9": {"temperature": 0.8, "top_k": 0, "top_p": 0.9},
    "min_p .05": {"temperature": 0.8, "top_k": 0, "min_p": 0.05},
    "greedy": {"do_sample": False},
}
Row = dict[str, float | str]


def build(vocab_size: int, spread: float) -> Any:
    """A model of one layer whose step is little more than its logits, with this standard deviation."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
    config = Qwen3Config(vocab_size=vocab_size, eos_token_id=None, pad_token_id=0, **sizes, **heads)
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight *= spread / (0.5 * sizes["hidden_size"] ** 0.5)
    return model


def step_us(call: Callable[[int], object], steps: int, repeats: int) -> float:
    """Microseconds of a step: the shortest call of ``steps`` more tokens, without the shortest of a few tokens."""
    call(4)
    short, long = (min(_seconds(call, tokens) for _ in range(repeats)) for tokens in (4, steps + 4))
    return (long - short) / steps * 1e6


def _seconds(call: Callable[[int], object], tokens: int) -> float:
    start = time.perf_counter()
    call(tokens)
    return time.perf_counter() - start


def fixed(model: Any, input_ids: torch.Tensor, stopping_criteria: Any, generation_config: Any, **given: Any) -> Any:
    """The loop of ``sample`` with a token that nobody draws."""
    from compiled_sampler.integrations.transformers.sampling import Text, forward_of

    names = {"logits_processor", "synced_gpus", "streamer"}
    model_kwargs = {name: value for name, value in given.items() if name not in names}
    text = Text(input_ids, stopping_criteria, None, None)
    forward = forward_of(model, generation_config, model_kwargs)
    outputs, column = model._prefill(input_ids, generation_config, model_kwargs), torch.full((len(input_ids),), 7)
    while not text.is_finished:
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
        text.append(column, None)
        inputs = model.prepare_inputs_for_generation(text.token_ids, next_sequence_length=1, **model_kwargs)
        outputs = forward(**inputs, return_dict=True)
    return text.token_ids


def measure(model: Any, rows: int, steps: int, repeats: int) -> list[Row]:
    """A row for each case, in microseconds of a step."""
    from compiled_sampler.integrations.transformers import sample

    prompts, found = torch.randint(3, 1000, (rows, 8)), list[Row]()
    settings = {"attention_mask": torch.ones_like(prompts), "do_sample": True}
    for name, law in CASES.items():
        given = {**settings, **law}

        def call(tokens: int, given: dict[str, Any] = given, **more: Any) -> object:
            return model.generate(prompts, max_new_tokens=tokens, **given, **more)

        def ours(tokens: int, call: Callable[..., object] = call) -> object:
            return call(tokens, custom_generate=sample, seeds=list(range(rows)))

        def idle(tokens: int, call: Callable[..., object] = call) -> object:
            return call(tokens, custom_generate=fixed)

        times = {"model": idle, "ours": ours, "stock": call}
        found.append({"case": name, **{key: step_us(each, steps, repeats) for key, each in times.items()}})
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time decode steps of transformers.")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--spread", type=float, default=6.0, help="standard deviation of the logits")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(build(options.vocab, options.spread), options.rows, options.steps, options.repeats)
    print("| case | model, ms | sample, ms | stock, ms | share of a step, sample | stock |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in found:
        model, ours, stock = (float(row[name]) / 1e3 for name in ("model", "ours", "stock"))
        print(
            f"| {row['case']} | {model:.2f} | {ours - model:.2f} | {stock - model:.2f} | {1 - model / ours:.0%} | "
            f"{1 - model / stock:.0%} |"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
