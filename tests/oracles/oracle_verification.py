"""The slow truth of draft verification: exact laws in fractions, over all sequences of drafts of small vocabularies.

Nothing of the package is imported here. The rules are those of the papers, prefix by prefix: ``rejection`` (Leviathan
et al., arXiv 2211.17192) and ``block`` (Sun et al., arXiv 2403.10444).
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

Tokens = tuple[int, ...]
Row = Sequence[Fraction]
Rows = Mapping[Tokens, Row]
"""The law of the next token after every prefix."""
Law = Mapping[Tokens, Fraction]


class Outcome(NamedTuple):
    """What may happen to one sequence of drafts."""

    num_accepted: int
    probability: Fraction
    last: Row
    """The law of the token after the accepted drafts."""


def prefixes(vocab_size: int, length: int) -> list[Tokens]:
    return [x for n in range(length + 1) for x in itertools.product(range(vocab_size), repeat=n)]


def fixed_drafter(drafts: Tokens, vocab_size: int) -> Rows:
    """The law of a drafter that always proposes the same sequence."""
    xs = prefixes(vocab_size, len(drafts) - 1)
    return {x: [Fraction(i == drafts[len(x)]) for i in range(vocab_size)] for x in xs}


def accept_probability(p: Row, q: Row, draft: int) -> Fraction:
    """``min(1, p / q)`` of a draft: 0 where the target never draws it, 1 where only the draft law never does."""
    if not p[draft]:
        return Fraction(0)
    return min(Fraction(1), p[draft] / q[draft]) if q[draft] else Fraction(1)


def residual_sum(p: Row, q: Row, carry: Fraction = Fraction(1)) -> Fraction:
    """``sum(relu(carry * p - q))``."""
    return sum((max(carry * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)), Fraction(0))


def residual(p: Row, q: Row, carry: Fraction = Fraction(1)) -> Row:
    """``relu(carry * p - q)``, normalised; p where nothing is left."""
    total = residual_sum(p, q, carry)
    return [max(carry * a - b, Fraction(0)) / total for a, b in zip(p, q, strict=True)] if total else p


def product_law(rows: Rows, length: int) -> dict[Tokens, Fraction]:
    """The law of ``length`` tokens, each drawn after those before it."""
    law = {(): Fraction(1)}
    for _ in range(length):
        law = {(*x, i): weight * p for x, weight in law.items() for i, p in enumerate(rows[x])}
    return law


def completed_law(emitted: Law, rows: Rows, length: int) -> dict[Tokens, Fraction]:
    """The law of ``length`` tokens that begin with emitted ones and go on as the rows say."""
    law = dict(emitted)
    while short := [x for x in law if len(x) < length]:
        for x in short:
            weight = law.pop(x)
            for i, p in enumerate(rows[x]):
                law[*x, i] = law.get((*x, i), Fraction(0)) + weight * p
    return law


def rejection_law(ps: Rows, qs: Rows, width: int) -> dict[Tokens, Fraction]:
    """The law of the emitted tokens of ``rejection`` (arXiv 2211.17192) for ``width`` drafts from ``qs``."""
    emitted: Counter[Tokens] = Counter()
    alive = {(): Fraction(1)}
    for _ in range(width):
        going_on = {}
        for x, weight in alive.items():
            kept = [q * accept_probability(ps[x], qs[x], d) for d, q in enumerate(qs[x])]
            going_on |= {(*x, d): weight * k for d, k in enumerate(kept)}
            for i, p in enumerate(residual(ps[x], qs[x])):
                emitted[*x, i] += weight * (1 - sum(kept)) * p
        alive = going_on
    return dict(emitted) | {(*x, i): weight * p for x, weight in alive.items() for i, p in enumerate(ps[x])}


def block_carry(ps: Rows, qs: Rows, drafts: Tokens) -> list[Fraction]:
    """``p_i = min(1, p_(i-1) * p / q)`` of block verification, from ``p_0 = 1`` on."""
    carry = [Fraction(1)]
    for i, d in enumerate(drafts):
        p, q = ps[drafts[:i]][d], qs[drafts[:i]][d]
        carry.append(min(Fraction(1), carry[-1] * p / q) if q else Fraction(1))
    return carry


def block_lengths(ps: Rows, qs: Rows, drafts: Tokens) -> list[Fraction]:
    """The probability that exactly 0, 1, ... drafts are accepted by block verification (arXiv 2403.10444)."""
    carry = block_carry(ps, qs, drafts)
    lengths, left = [carry[-1]], 1 - carry[-1]
    for i in reversed(range(len(drafts))):
        total = residual_sum(ps[drafts[:i]], qs[drafts[:i]], carry[i])
        accept = Fraction(1) if carry[i] == 1 else total / (total + 1 - carry[i])
        lengths.insert(0, left * accept)
        left *= 1 - accept
    return lengths


def block_law(ps: Rows, qs: Rows, width: int) -> dict[Tokens, Fraction]:
    """The law of the emitted tokens of ``block`` for ``width`` drafts from ``qs``."""
    emitted: Counter[Tokens] = Counter()
    for drafts, weight in product_law(qs, width).items():
        if not weight:
            continue
        carry = block_carry(ps, qs, drafts)
        for i, length in enumerate(block_lengths(ps, qs, drafts)):
            x = drafts[:i]
            for token, p in enumerate(residual(ps[x], qs[x], carry[i]) if i < width else ps[x]):
                emitted[*x, token] += weight * length * p
    return dict(emitted)


def expected_accepted(emitted: Law) -> Fraction:
    """The mean number of drafts before the last token."""
    return sum(((len(x) - 1) * p for x, p in emitted.items()), Fraction(0))


def emitted_law(outcomes: Sequence[Sequence[Outcome]], qs: Rows, width: int) -> dict[Tokens, Fraction]:
    """The law of the emitted tokens, from what happens to each sequence of drafts and how often it is drawn."""
    law: Counter[Tokens] = Counter()
    for (drafts, weight), may_happen in zip(product_law(qs, width).items(), outcomes, strict=True):
        for num_accepted, probability, last in may_happen if weight else ():
            for token, p in enumerate(last):
                law[*drafts[:num_accepted], token] += weight * probability * p
    return dict(law)


def total_variation(first: Law, second: Law) -> Fraction:
    return sum((abs(first.get(x, 0) - second.get(x, 0)) for x in {*first, *second}), Fraction(0)) / 2


def loss(emitted: Law, ps: Rows, length: int) -> Fraction:
    """Total variation between ``length`` tokens that begin with emitted ones and the target's own."""
    return total_variation(completed_law(emitted, ps, length), product_law(ps, length))


def impossible(emitted: Law, ps: Rows) -> Fraction:
    """The probability that a token is emitted which the target never draws."""
    return sum((w for x, w in emitted.items() if not all(ps[x[:i]][t] for i, t in enumerate(x))), Fraction(0))
