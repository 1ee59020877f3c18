"""Does a text bear the watermark of a key?

    python -m tools.watermark --key 17 --tokens 5 --prompt 12 FILE

FILE holds token ids of a text, prompt first, separated by white space; ``--key`` is the seed of the request that drew
it, ``--tokens`` its ``watermark_tokens``, ``--prompt`` the number of tokens of the prompt. The score of a token is
``-log(u)`` of the uniform number u of the noise that it had under the key: exponential with mean 1 in a text that knows
nothing of the key, and larger where tokens won by that noise. A context counts once, since its noise does not change.
So the sum of n scores has a gamma law, and the p-value is exact: the probability that such a text has this sum or more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from scipy.stats import gamma

from compiled_sampler.core.noise import TARGET, noise_keys, token_bits
from compiled_sampler.edit_params import checked_token_id
from compiled_sampler.edits.history import History
from compiled_sampler.edits.recording import entries_of
from compiled_sampler.edits.watermark import MOST_WATERMARK_TOKENS, Watermarks, noise_positions
from compiled_sampler.scalars import as_int64, checked_int


class Detection(NamedTuple):
    """What a text shows."""

    num_scored: int
    """Tokens drawn in contexts that did not come before."""
    score: float
    """The sum of their scores; ``num_scored`` on average without a watermark."""
    p_value: float
    """Probability of so much or more without one."""


def detect(token_ids: Sequence[int], prompt_len: int, key: int, num_tokens: int) -> Detection:
    """Look for a watermark in the tokens behind the prompt.

    Args:
        token_ids: of the whole text.
        prompt_len: how many of them are the prompt's.
        key: seed of the request.
        num_tokens: ``watermark_tokens`` of the request, in [1, 8].

    Raises:
        TypeError: no ints.
        ValueError: a number that no request has, or a prompt beyond the text.
    """
    _check(token_ids, prompt_len, key, num_tokens)
    positions = torch.arange(prompt_len, len(token_ids))
    slots, contexts = torch.zeros_like(positions), set[tuple[int, ...]]()
    kept = []
    for position in positions.tolist():
        context = tuple(token_ids[max(position - num_tokens, 0) : position])
        kept.append(context not in contexts)
        contexts.add(context)
    entries = torch.from_numpy(entries_of(token_ids, prompt_len, max(len(token_ids), 1)))[None]
    history = History(entries, *torch.tensor([[prompt_len], [1]], dtype=torch.int32))
    where = noise_positions(slots, positions, Watermarks(torch.tensor([num_tokens], dtype=torch.int32)), history)
    seeds = torch.full_like(positions, as_int64(int(key)))
    drawn = torch.tensor(token_ids[prompt_len:], dtype=torch.int32)
    bits = token_bits(noise_keys(seeds, where, TARGET), drawn).to(torch.int64) & 0xFFFFFFFF
    scores = -((bits | 1).to(torch.float64) * 2.0**-32).log()[torch.tensor(kept, dtype=torch.bool)]
    count, total = len(scores), float(scores.sum())
    return Detection(count, total, float(gamma.sf(total, count)) if count else 1.0)


def _check(token_ids: Sequence[int], prompt_len: int, key: int, num_tokens: int) -> None:
    """Raise unless a request can have drawn such a text."""
    for token in token_ids:
        checked_token_id("token_ids", token)
    if not 0 <= checked_int("prompt_len", prompt_len) <= len(token_ids):
        raise ValueError(
            f"prompt_len (--prompt) must be in [0, {len(token_ids)}], the tokens of the text, got {prompt_len}; "
            "pass the prompt with what was drawn"
        )
    if not -(2**63) <= checked_int("key", key) < 2**64:
        raise ValueError(f"key (--key) must be in [-2**63, 2**64), got {key}; pass the seed of the request")
    if not 1 <= checked_int("num_tokens", num_tokens) <= MOST_WATERMARK_TOKENS:
        raise ValueError(
            f"num_tokens (--tokens) must be in [1, {MOST_WATERMARK_TOKENS}], got {num_tokens}; pass watermark_tokens "
            "of the request"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Print what a text shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--key", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        token_ids = [_token_id(word) for word in options.file.read_text().split()]
        found = detect(token_ids, options.prompt, options.key, options.tokens)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{found.num_scored} tokens, score {found.score:.1f}, p-value {found.p_value:.3g}")


def _token_id(word: str) -> int:
    """A word of the file as a number."""
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"FILE must hold token ids, got {word!r}; encode the text before") from None


if __name__ == "__main__":
    main()
