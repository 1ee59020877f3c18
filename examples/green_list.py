"""An edit of the user: a green-list watermark (Kirchenbauer et al., 2301.10226), keyed and biased by request.

python examples/green_list.py

Half of the vocabulary, which a hash of the token before and the request's key chooses, gets a bias. So a text of the
request has more green tokens than the half that others have.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_sampler import EditRows, LogitEdit, Sampler, SamplingParams

VOCAB_SIZE, NUM_TOKENS = 1000, 60


def is_green(ids: Tensor, before: Tensor, key: Tensor) -> Tensor:
    """Whether tokens are green behind another token: bool, of integers that wrap at 32 bits (murmur3's mixing)."""
    bits = (ids ^ (before * 0x3C6EF372)) + key.to(torch.int32)
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * -0x7A143595
    bits = (bits ^ ((bits >> 13) & 0x7FFFF)) * -0x3D4D51CB
    return (bits ^ ((bits >> 16) & 0xFFFF)) & 1 == 0


@dataclass(frozen=True)
class GreenParams:
    """What a request sets."""

    key: int
    bias: float = 2.0


@dataclass(frozen=True)
class GreenList(LogitEdit):
    """Adds a bias to the logits of green tokens."""

    params = GreenParams
    history_tokens = 1

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """The logits, green ones with the bias of the request."""
        assert rows.history is not None
        green = is_green(ids, rows.history[:, -1:], rows.params["key"])
        return torch.where(green, x + rows.params["bias"], x)


def share_of_green(text: list[int], key: int) -> float:
    """The share of the tokens of a text, but for the first, that are green behind the token before."""
    tokens = torch.tensor(text, dtype=torch.int32)
    return float(is_green(tokens[1:], tokens[:-1], torch.tensor(key)).float().mean())


def main() -> None:
    """Draw a text with the watermark and one without, side by side in one batch."""
    sampler = Sampler(VOCAB_SIZE, 2, backend="eager", history_len=NUM_TOKENS + 1, edits=[GreenList()])
    texts = [[7], [7]]
    slots = [
        sampler.add_request(SamplingParams(seed=1, extra_args={"GreenList": {"key": 17, "bias": 4.0}}), texts[0]),
        sampler.add_request(SamplingParams(seed=1), texts[1]),
    ]
    plan, generator = sampler.plan(slots), torch.Generator().manual_seed(0)
    for position in range(1, NUM_TOKENS + 1):
        logits = torch.randn(1, VOCAB_SIZE, generator=generator).repeat(2, 1)
        for text, token in zip(texts, sampler.sample(plan, logits, torch.full((2,), position)).tolist(), strict=True):
            text.append(token)
    marked, plain = (share_of_green(text, 17) for text in texts)
    print(f"green tokens: {marked:.0%} with the watermark, {plain:.0%} without")


if __name__ == "__main__":
    main()
