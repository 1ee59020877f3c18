"""The slow truth of logprobs: float64 and Python ints, one row and one token at a time.

Nothing of the package is imported here; what the package gets right it must get right twice.
"""

import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from tests.oracles import oracle

KEEP_ALL = -(2**63)
NOTHING = -1


def kept(logits: Sequence[float], filters: dict[str, Any], top_p_base: str = "top_k") -> list[int]:
    return oracle.reference_keep(logits, top_p_base=top_p_base, **filters)


def law(
    of: str, raw: Sequence[float], edited: Sequence[float], filters: dict[str, Any], top_p_base: str = "top_k"
) -> dict[int, float]:
    """The logprob of each token that has one, in the law "raw", "processed" or "filtered"."""
    if of == "raw":
        return _log_softmax(raw, oracle.visible(raw), 1.0)
    ids = kept(edited, filters, top_p_base) if of == "filtered" else oracle.visible(edited)
    return _log_softmax(edited, ids, filters.get("temperature", 1.0) or 1.0)


def _log_softmax(logits: Sequence[float], ids: Sequence[int], temperature: float) -> dict[int, float]:
    """Beside a ``+inf`` token only such tokens have a probability, each the same."""
    infinite = [i for i in ids if logits[i] == math.inf]
    if infinite:
        return {i: -math.log(len(infinite)) for i in infinite}
    top = max((logits[i] for i in ids), default=0.0)
    scaled = {i: float((Fraction(logits[i]) - Fraction(top)) / Fraction(temperature)) for i in ids}
    total = math.fsum(math.exp(t) if t > -1000.0 else 0.0 for t in scaled.values())
    return {i: t - math.log(total) for i, t in scaled.items()}


def entropy(logprobs: dict[int, float]) -> float:
    """The entropy of a law in nats; -inf where no token has a probability."""
    return -math.fsum(math.exp(lp) * lp for lp in logprobs.values() if lp > -700.0) if logprobs else -math.inf


def rank(logits: Sequence[float], token_id: int) -> int:
    """The place of a token in the order, from 1; -1 for a masked one."""
    ids = oracle.order(logits)
    return ids.index(token_id) + 1 if token_id in ids else NOTHING


def top(logits: Sequence[float], count: int, only: Sequence[int] | None = None) -> list[int]:
    """The first ``count`` tokens of the order, of those in ``only``; then -1."""
    ids = [i for i in oracle.order(logits) if only is None or i in set(only)]
    return (ids + [NOTHING] * count)[:count]


def boundary(logits: Sequence[float], filters: dict[str, Any], top_p_base: str = "top_k") -> int:
    """The last kept token as (order key, id) in one integer; a constant where the request has no filter."""
    ids = kept(logits, filters, top_p_base)
    if not ids:
        return NOTHING
    top_k = filters.get("top_k", 0)
    is_off = (top_k == 0 or top_k >= len(logits)) and filters.get("top_p", 1.0) == 1.0 and not filters.get("min_p")
    if is_off and filters.get("temperature") != 0.0:
        return KEEP_ALL
    return packed(logits[ids[-1]], ids[-1])


def packed(logit: float, token_id: int) -> int:
    """The order key of a float32 above 31 bits that fall with the id."""
    (bits,) = struct.unpack("<i", struct.pack("<f", logit))
    key = bits if bits >= 0 else -(bits + 2**31)
    return (key << 32) | (2**31 - 1 - token_id)


def error_bound(logprob: float) -> float:
    """How far a float32 logprob may be from float64: 2e-6, below -8 in proportion."""
    return 2e-6 * max(1.0, -logprob / 8.0)
