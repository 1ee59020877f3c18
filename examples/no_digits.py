"""An edit of the user: no token that has a digit, from a table that is made once of the tokens' texts.

python examples/no_digits.py
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_sampler import EditRows, LogitEdit, Sampler, SamplingParams

WORDS = ("one", "1", "two", "2nd", "three", "33", "four", "x4")


@dataclass(frozen=True)
class NoDigits(LogitEdit):
    """Masks every token whose text has a digit; a token without a text is kept."""

    words: tuple[str, ...] = WORDS

    def tables(self, vocab_size: int) -> Mapping[str, Tensor]:
        """Whether each token has a digit, bool ``[V]``."""
        has_digit = torch.zeros(vocab_size, dtype=torch.bool)
        for token, word in enumerate(self.words[:vocab_size]):
            has_digit[token] = any(letter.isdigit() for letter in word)
        return {"has_digit": has_digit}

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """The logits, -inf for tokens with a digit."""
        return torch.where(rows.tables["has_digit"], float("-inf"), x)


def main() -> None:
    """Draw for a request that wants no digits and for one that does not care."""
    sampler = Sampler(len(WORDS), 2, backend="eager", edits=[NoDigits()])
    slots = [
        sampler.add_request(SamplingParams(seed=1, extra_args={"NoDigits": {}})),
        sampler.add_request(SamplingParams(seed=1)),
    ]
    plan, logits = sampler.plan(slots), torch.zeros(2, len(WORDS))
    drawn = [sampler.sample(plan, logits, torch.full((2,), position)).tolist() for position in range(12)]
    for label, tokens in zip(("no digits", "any"), zip(*drawn, strict=True), strict=True):
        print(f"{label}: {' '.join(WORDS[token] for token in tokens)}")


if __name__ == "__main__":
    main()
