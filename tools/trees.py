"""How many tokens does a step give when drafts are trees, and how wide should they be?

    python -m tools.trees [--requests 64] [--tokens 48] [--json FILE]

A small model drafts for a larger one, both of ``tools.model``; requests continue paragraphs of Python's help. Under
``match`` the tokens are those without drafts, so only the place of each token among the w drafts of its position
matters, and one pass over a stream serves every depth and shape:

- coupled: the w best of the small model's race on the target's noise, ``draft(width=w)``;
- likeliest: the w first tokens of the small model's order;
- independent: w draws of the small model, each with noise of its own.

Beside them two that draw another text of the same law, and so get streams of their own:

- recursive rejection: w draws without replacement, ``draft(coupled=False, width=w)``, under the rule ``rejection``;
- multi-round rejection (Miao et al., SpecInfer, arXiv 2305.09781): w independent draws, each judged by what the ones
  before it left of the target's law.

Two shapes: "full", w children of every node, and "comb", w children of the first child alone, which are w nodes for
each step of depth. Nothing is timed: these are properties of the models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compiled_sampler import Plan, Sampler, SamplingParams
from tools.measuring import environment, write_json
from tools.model.tokenizer import Tokenizer
from tools.toy_engine.cached_model import CachedModel
from tools.toy_engine.runs import load_models, prompt_texts
from tools.toy_engine.speculation import Models

WIDTHS, DEPTHS = (1, 2, 4), range(1, 7)
SHAPES = "full", "comb"
LAWS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature .8, k 40, p .9": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
}
_PRIME = 7919


class Decoder:
    """Requests that decode in step, with the logits of both models at each position."""

    def __init__(self, models: Models, tokenizer: Tokenizer, params: dict[str, Any], count: int, length: int) -> None:
        texts = prompt_texts(None)
        prompts = [tokenizer.encode(texts[n * _PRIME % len(texts)])[: 20 + n % 9] for n in range(count)]
        self.sampler = Sampler(models.target.config.vocab_size, count, backend="eager")
        slots = [self.sampler.add_request(SamplingParams(**params, seed=n)) for n in range(count)]
        self.plan: Plan = self.sampler.plan(slots)
        most = max(map(len, prompts)) + length
        self._models = [CachedModel(model, count, most) for model in models]
        for model in self._models:
            for slot, prompt in zip(slots, prompts, strict=True):
                model.read(slot, prompt[:-1])
        self.positions = torch.tensor([len(prompt) for prompt in prompts])
        self._last = torch.tensor([prompt[-1] for prompt in prompts])

    def logits(self) -> tuple[Tensor, Tensor]:
        """Of the target and of the small model, float32 ``[N, V]``."""
        target, draft = (model.logits(self.plan.slot_ids, self.positions - 1, self._last) for model in self._models)
        return target, draft

    def push(self, tokens: Tensor) -> None:
        """Go on with a token of each request."""
        self._last, self.positions = tokens, self.positions + 1


def places_of_match(decoder: Decoder, length: int) -> dict[str, np.ndarray]:
    """By drafter, the place of each token among its drafts, int64 ``[N, length]``; ``max(WIDTHS)`` if it is none."""
    places: dict[str, list[Tensor]] = {"coupled": [], "likeliest": [], "independent": []}
    widest, sampler, plan = max(WIDTHS), decoder.sampler, decoder.plan
    for _ in range(length):
        target, draft = decoder.logits()
        tokens = sampler.sample(plan, target, decoder.positions).token_ids
        own = [sampler.draft(plan, draft, decoder.positions, False, offset).token_ids for offset in range(widest)]
        drafts = {
            "coupled": sampler.draft(plan, draft, decoder.positions, width=widest).token_ids,
            "likeliest": draft.topk(widest).indices,
            "independent": torch.stack(own, 1),
        }
        for name, each in drafts.items():
            is_token = each == tokens[:, None]
            places[name].append(torch.where(is_token.any(-1), is_token.to(torch.int64).argmax(-1), widest))
        decoder.push(tokens)
    return {name: torch.stack(each, 1).numpy() for name, each in places.items()}


def places_of_rejection(decoder: Decoder, length: int, width: int, source: np.random.Generator) -> np.ndarray:
    """The place of the draft that is accepted, int64 ``[N, length]``; ``max(WIDTHS)`` where all are rejected."""
    made = []
    for _ in range(length):
        target, draft = decoder.logits()
        laws = [decoder.sampler.probs(decoder.plan, each).double().numpy() for each in (target, draft)]
        judged = [judge(p / p.sum(), q / q.sum(), width, source) for p, q in zip(*laws, strict=True)]
        decoder.push(torch.tensor([token for token, _ in judged]))
        made.append([place for _, place in judged])
    return np.array(made).T


def places_of_recursion(decoder: Decoder, length: int, width: int) -> np.ndarray:
    """The place of the sibling that the rule ``rejection`` accepts, as ``places_of_rejection``."""
    made, sampler, plan = list[Tensor](), decoder.sampler, decoder.plan
    with_drafts = sampler.plan(plan.slots, num_drafts=[width] * len(plan.slots))
    parents = [[-1] * width] * len(plan.slots)
    for _ in range(length):
        target, draft = decoder.logits()
        siblings = sampler.draft(plan, draft, decoder.positions, coupled=False, width=width).token_ids
        rows = target.repeat_interleave(width + 1, 0)  # those behind the drafts draw what is not kept
        proposals = draft.repeat_interleave(width, 0)
        call = with_drafts, rows, siblings, decoder.positions, "rejection"
        out = sampler.verify(*call, parents=parents, draft_logits=proposals)
        assert out.node_ids is not None
        made.append(torch.where(out.node_ids[:, 0] >= 0, out.node_ids[:, 0], max(WIDTHS)))
        decoder.push(out.token_ids[:, 0])
    return torch.stack(made, 1).numpy()


def judge(p: np.ndarray, q: np.ndarray, width: int, source: np.random.Generator) -> tuple[int, int]:
    """The token of one position by multi-round rejection of ``width`` draws, and its place among them."""
    for place in range(width):
        token = int(source.choice(len(q), p=q))
        if source.random() * q[token] < p[token]:
            return token, place
        left = np.maximum(p - q, 0.0)
        if left.sum() <= 0.0:
            break
        p = left / left.sum()
    return int(source.choice(len(p), p=p)), max(WIDTHS)


def tokens_per_step(places: np.ndarray, width: int, depth: int, shape: str) -> float:
    """Mean tokens of a step of trees so wide and deep."""
    steps = tokens = 0
    for row in places:
        at = 0
        while at + depth < len(row):  # a step that the end cuts is not counted
            accepted = 0
            while accepted < depth and row[at + accepted] < width:
                accepted += 1
                if shape == "comb" and row[at + accepted - 1]:  # only the first child has children
                    break
            steps, tokens, at = steps + 1, tokens + accepted + 1, at + accepted + 1
    return tokens / max(steps, 1)


def nodes(width: int, depth: int, shape: str) -> int:
    """Nodes of a tree."""
    return width * depth if shape == "comb" else sum(width**level for level in range(1, depth + 1))


def measured(count: int, length: int) -> list[dict[str, Any]]:
    """A record for each law, drafter, width and shape."""
    models, tokenizer = load_models()
    records = []
    for law, params in LAWS.items():
        places = dict[tuple[str, int], np.ndarray]()
        decoder = Decoder(models, tokenizer, params, count, length)
        for name, each in places_of_match(decoder, length).items():
            places |= {(f"{name}, match", width): each for width in WIDTHS}
        for width in WIDTHS:
            decoder = Decoder(models, tokenizer, params, count, length)
            recursive = places_of_recursion(decoder, length, width)
            places["independent, recursive rejection", width] = recursive
        for width in WIDTHS:
            decoder = Decoder(models, tokenizer, params, count, length)
            rejected = places_of_rejection(decoder, length, width, np.random.default_rng(width))
            places["independent, multi-round rejection", width] = rejected
        for (drafter, width), each in places.items():
            for shape in SHAPES if width > 1 else SHAPES[1:]:
                by_depth = {depth: round(tokens_per_step(each, width, depth, shape), 3) for depth in DEPTHS}
                counts = {depth: nodes(width, depth, shape) for depth in DEPTHS}
                record = {"law": law, "drafter": drafter, "width": width, "shape": shape}
                records.append(record | {"nodes": counts, "tokens_per_step": by_depth})
    return records


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="of each request")
    parser.add_argument("--json", type=Path, help="store the numbers in this file")
    options = parser.parse_args(argv)
    records = measured(options.requests, options.tokens)
    for law in LAWS:
        table = Table("drafter", "w", "shape", *(f"depth {depth}" for depth in DEPTHS), title=law)
        for record in records:
            if record["law"] == law:
                numbers = (f"{each:.2f}" for each in record["tokens_per_step"].values())
                table.add_row(record["drafter"], str(record["width"]), record["shape"], *numbers)
        Console(width=140, highlight=False).print(table)
    if options.json:
        facts = {"requests": options.requests, "tokens": options.tokens}
        write_json(str(options.json), {"environment": environment("cpu"), **facts, "records": records})


if __name__ == "__main__":
    sys.exit(main())
