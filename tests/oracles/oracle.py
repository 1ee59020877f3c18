"""The slow truth: the contract in Python ints, fractions and float64, one row and one token at a time.

Nothing of the package is imported here; what the package gets right it must get right twice.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)
STREAM_VERSION = 1

NAN_SEEN, ALL_MASKED, POSITIVE_INFINITY = 1, 2, 4

WORD = 2**32


def philox_4x32_10(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words from a counter of four and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 % WORD, (product0 >> 32) ^ c3 ^ k1, product0 % WORD
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return c0, c1, c2, c3


def row_words(seed: int, position: int, stream: int = TARGET, draw_index: int = 0) -> tuple[int, ...]:
    """The four key words of a row; the seed counts modulo 2**64."""
    seed %= 2**64
    last = STREAM_VERSION + 2**8 * draw_index
    return philox_4x32_10((position % WORD, position >> 32, stream, last), (seed % WORD, seed >> 32))


def mix(words: Sequence[int], token_id: int) -> int:
    """The 32 bits of one token of a row."""
    h = (token_id * (words[0] | 1) + words[1]) % WORD
    h ^= h >> 16
    h = (h * 0x7FEB352D + words[2]) % WORD
    h ^= h >> 15
    h = (h * 0x846CA68B + words[3]) % WORD
    return h ^ (h >> 16)


def token_bits(seed: int, position: int, token_id: int, stream: int = TARGET) -> int:
    return mix(row_words(seed, position, stream), token_id)


def exponential(bits: int) -> float:
    """``-log2(1 - u)`` for ``u = (bits | 1) / 2**32``, from the side of the interval that keeps every digit."""
    odd = bits | 1
    return -math.log1p(-odd / WORD) / math.log(2.0) if odd < WORD // 2 else -math.log2((WORD - odd) / WORD)


def gumbel(bits: int) -> float:
    """``-log2`` of the exponential variable: the noise that is added to a base-2 scaled logit."""
    return -math.log2(exponential(bits))


def visible(logits: Sequence[float]) -> list[int]:
    """Ids of the tokens that can be drawn: neither NaN nor ``-inf``."""
    return [i for i, x in enumerate(logits) if x > -math.inf]


def order(logits: Sequence[float]) -> list[int]:
    """Ids of the visible tokens, logit descending, then id ascending; ``-0.0 == 0.0``."""
    return sorted(visible(logits), key=lambda i: -logits[i])


def scaled(logits: Sequence[float], temperature: float) -> list[float]:
    """Base-2 scaled logits relative to the maximum; beside a ``+inf`` token every finite one is ``-inf``."""
    top = max((logits[i] for i in visible(logits)), default=0.0)
    if top == math.inf:
        return [0.0 if x == math.inf else -math.inf for x in logits]
    scale = math.log2(math.e) / temperature
    return [(x - top) * scale if x > -math.inf else -math.inf for x in logits]


def masses(logits: Sequence[float], temperature: float) -> list[float]:
    """Unnormalised probabilities in float64, 1 for the likeliest token."""
    return [2.0**t if t > -1000.0 else 0.0 for t in scaled(logits, temperature)]


def _is_greedy(temperature: float, top_k: int) -> bool:
    return temperature == 0.0 or top_k == 1


def reference_keep(
    logits: Sequence[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_p_base: str = "top_k",
) -> list[int]:
    """Ids that pass top-k, then top-p, then min-p, in their order; nothing where every token is masked.

    A row with ``+inf`` tokens is a row of those tokens alone, equally likely.
    """
    ids = order(logits)
    if not ids or _is_greedy(temperature, top_k):
        return ids[:1]
    mass, t = masses(logits, temperature), scaled(logits, temperature)
    in_top_k = ids[:top_k] if top_k else ids
    base = sum(Fraction(mass[i]) for i in (ids if top_p_base == "all" else in_top_k))
    cut = Fraction(top_p) * base
    kept, before = [], Fraction(0)
    for i in in_top_k:
        if kept and top_p < 1.0 and before >= cut:
            break
        kept.append(i)
        before += Fraction(mass[i])
    infinite = logits[ids[0]] == math.inf
    floor = math.log2(min_p) if min_p > 0.0 else -math.inf
    return [i for i in kept if (t[i] == 0.0 if infinite else t[i] >= floor)]


def exact_law(weights: Iterable[float | int], keep: Iterable[int]) -> list[Fraction]:
    """Probabilities of all tokens when those in ``keep`` share the probability in proportion to their weights."""
    chosen = set(keep)
    parts = [Fraction(w) if i in chosen else Fraction(0) for i, w in enumerate(weights)]
    total = sum(parts)
    return [part / total for part in parts]


def greedy(logits: Sequence[float]) -> int:
    """The first token of the order; -1 where every token is masked."""
    return next(iter(order(logits)), -1)


def score(logits: Sequence[float], token_id: int, temperature: float, words: Sequence[int]) -> float:
    """The score of a token in the race, in float64; among ``+inf`` tokens the noise alone."""
    noise = gumbel(mix(words, token_id))
    x = logits[token_id]
    return noise if x == math.inf else x * math.log2(math.e) / temperature + noise


def draw(
    logits: Sequence[float],
    *,
    seed: int,
    position: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_p_base: str = "top_k",
    stream: int = TARGET,
) -> int:
    """The token drawn: the best score among the tokens kept, the lowest id among equals; -1 where all are masked."""
    if _is_greedy(temperature, top_k):
        return greedy(logits)
    keep = reference_keep(logits, temperature, top_k, top_p, min_p, top_p_base)
    words = row_words(seed, position, stream)
    return max(sorted(keep), key=lambda i: score(logits, i, temperature, words), default=-1)


def status(logits: Sequence[float]) -> int:
    return (
        NAN_SEEN * any(math.isnan(x) for x in logits)
        | ALL_MASKED * (not visible(logits))
        | POSITIVE_INFINITY * any(x == math.inf for x in logits)
    )
