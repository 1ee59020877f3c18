"""A text with a watermark, and its detector (Aaronson, 2022).

python examples/watermark.py  (needs scipy)

``SamplingParams(watermark_tokens=n)`` keys a token's noise by the seed and the n tokens before it. So whoever has the
seed can compute, from the text alone, the uniform number u of that noise for each token of the text. The score of a
token, ``-log(u)``, is exponential with mean 1 in a text that knows nothing of the seed, and larger where tokens won by
that noise. A context counts once, because it always has the same noise. The sum of n scores has a gamma law, so the
p-value is exact: the probability that a text without the watermark has this sum or more.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from scipy.stats import gamma

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.core.noise import TARGET, noise_keys, token_bits
from compiled_sampler.edits.recording import Text, entries_of
from compiled_sampler.edits.tables import History, Watermarks
from compiled_sampler.edits.watermark import noise_positions
from compiled_sampler.scalars import as_int64

VOCAB_SIZE, NUM_TOKENS = 1000, 60


class Detection(NamedTuple):
    """What a text shows."""

    num_scored: int
    """Tokens drawn in contexts that did not come before."""
    score: float
    """The sum of their scores; ``num_scored`` on average without a watermark."""
    p_value: float
    """Probability of so much or more without one."""


def detect(token_ids: Sequence[int], prompt_len: int, key: int, num_tokens: int) -> Detection:
    """Look for a watermark in the tokens after the prompt.

    Args:
        token_ids: of the whole text.
        prompt_len: how many of them are the prompt's.
        key: the seed of the request.
        num_tokens: its ``watermark_tokens``.
    """
    places = range(prompt_len, len(token_ids))
    contexts = [tuple(token_ids[max(place - num_tokens, 0) : place]) for place in places]
    first_place = {context: place for place, context in reversed([*zip(places, contexts, strict=True)])}
    positions = torch.tensor(sorted(first_place.values()), dtype=torch.int64)
    entries = torch.from_numpy(entries_of([Text(token_ids, prompt_len)], len(token_ids)))
    history = History(entries, *torch.tensor([[prompt_len], [1]], dtype=torch.int32))
    watermarks = Watermarks(torch.tensor([num_tokens], dtype=torch.int32))
    keyed_by = noise_positions(torch.zeros_like(positions), positions, watermarks, history)
    noise = noise_keys(torch.full_like(positions, as_int64(key)), keyed_by, TARGET)
    bits = token_bits(noise, torch.tensor(token_ids, dtype=torch.int32)[positions]).to(torch.int64) & 0xFFFFFFFF
    score = -float(((bits | 1).to(torch.float64) * 2.0**-32).log().sum())
    return Detection(len(positions), score, float(gamma.sf(score, len(positions))) if len(positions) else 1.0)


def main() -> None:
    """Draw a text with the watermark and look for two keys."""
    sampler = Sampler(VOCAB_SIZE, 1, backend="eager", history_len=NUM_TOKENS + 1)
    text = [7]
    plan = sampler.plan([sampler.add_request(SamplingParams(seed=17, watermark_tokens=3), text)])
    generator = torch.Generator().manual_seed(0)
    for position in range(1, NUM_TOKENS + 1):
        logits = torch.randn(1, VOCAB_SIZE, generator=generator)
        text += sampler.sample(plan, logits, torch.tensor([position])).tolist()
    for key in (17, 18):
        print(f"key {key}: p-value {detect(text, 1, key, 3).p_value:.1g}")


if __name__ == "__main__":
    main()
