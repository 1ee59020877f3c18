"""The history of requests that come with tokens."""

import numpy as np

from compiled_sampler.edits.history import NO_SUCCESSOR, ORDINAL, SUCCESSOR, TOKEN, UNWRITTEN
from compiled_sampler.edits.recording import Text, entries_of

LENGTH = 12


def walked(text: Text) -> np.ndarray:
    """The entries of one request, token by token."""
    made = np.array([[UNWRITTEN], [0], [NO_SUCCESSOR]], np.int32).repeat(LENGTH, 1)
    last: dict[int, int] = {}
    drawn: dict[int, int] = {}
    for place, token in enumerate(text.token_ids):
        made[TOKEN, place] = token
        if token == UNWRITTEN:
            continue
        drawn[token] = drawn.get(token, 0) + (place >= text.prompt_len)
        made[ORDINAL, place] = drawn[token]
        if token in last:
            made[SUCCESSOR, last[token]] = place
        last[token] = place
    return made


def test_the_histories_of_requests_that_come_together_are_those_of_each() -> None:
    """Empty ones, equal ones, unknown tokens, and one token that ends a text and begins the next."""
    numbers = np.random.default_rng(0)
    texts = [
        Text((), 0),
        Text([4, 7, 7, 3, 3], 2),
        Text([3, 3], 0),
        Text([UNWRITTEN, 5, UNWRITTEN, 5], 3),
        Text([5], 1),
    ]
    for _ in range(100):
        tokens = numbers.integers(-1, 4, numbers.integers(0, LENGTH + 1))
        texts.append(Text(np.where(tokens < 0, UNWRITTEN, tokens).tolist(), int(numbers.integers(0, len(tokens) + 1))))
    assert np.array_equal(entries_of(texts, LENGTH), np.stack([walked(text) for text in texts]))
