"""The slow truth of edits: logits of one row as Python loops over float32 numbers, from the contract's formulas.

Nothing of the package is imported here. Every operation is done in numpy's float32, so it is rounded once.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

F = np.float32
MASKED = F(-math.inf)


def edited(
    logits: Sequence[float], params: Mapping[str, Any], prompt: Sequence[int], output: Sequence[int], mask: Any = None
) -> np.ndarray:
    """The logits of one row after all edits of its request, float32 ``[V]``; parameters that are missing are off.

    The output has the drafts before the row, and -1 where a row had no token. The mask is words of a bitmask.
    """
    x = np.array(logits, F)
    for token in range(len(x)):
        if mask is not None and not int(np.uint32(np.int64(mask[token // 32]) & 0xFFFFFFFF)) >> token % 32 & 1:
            x[token] = MASKED
        if params.get("allowed_token_ids") is not None and token not in params["allowed_token_ids"]:
            x[token] = MASKED
    for token, bias in dict(params.get("logit_bias") or {}).items():
        x[token] = MASKED if bias == -math.inf else normal(normal(x[token]) + normal(F(bias)))
    if len(output) < params.get("min_tokens", 0):
        for token in stops(params):
            x[token] = MASKED
    for token in {*prompt, *output} - {-1}:
        x[token] = penalized(x[token], params, token in output, list(output).count(token))
    lower_repetitions(x, [*prompt, *output], params)
    tokens = [*prompt, *output] if params.get("bad_words_scope") == "all" else list(output)
    for word in params.get("bad_words_token_ids") or ():
        start = list(word[:-1])
        if not start or tokens[-len(start) :] == start:
            x[word[-1]] = MASKED
    return x


def penalized(x: F, params: Mapping[str, Any], is_drawn: bool, count: int) -> F:
    """The logit of a token of the history; as it was where no penalty changes it."""
    repetition, before = F(params.get("repetition_penalty", 1.0)), x
    frequency, presence = (normal(F(params.get(f"{name}_penalty", 0.0))) for name in ("frequency", "presence"))
    is_repeated = repetition != 1 and (params.get("repetition_scope", "all") == "all" or is_drawn)
    x = normal(x)
    if is_repeated:
        x = normal(x * F(1.0 / np.float64(repetition)) if x > 0 else x * repetition)
    x = normal(x - normal(frequency * F(count)))
    x = normal(x - presence * F(is_drawn))
    return x if is_repeated or (is_drawn and (frequency or presence)) else before


def lower_repetitions(x: np.ndarray, tokens: Sequence[int], params: Mapping[str, Any]) -> None:
    """Subtract what DRY does from the logits of one row; a penalty that is a denormal is none."""
    for token, length in repetitions(tokens, params).items():
        if penalty := dry_penalty(length, params):
            x[token] = normal(normal(x[token]) - penalty)


def repetitions(tokens: Sequence[int], params: Mapping[str, Any]) -> dict[int, int]:
    """The length of the repetition that each token would prolong, for those that DRY penalizes.

    It is the longest part of the text in front of an earlier token of that id that the text also ends with, within
    ``dry_range``, without breakers and without -1, and at most 50 tokens.
    """
    found = dict[int, int]()
    if not params.get("dry_multiplier"):
        return found
    seen = list(tokens[-params["dry_range"] :]) if params.get("dry_range") else list(tokens)
    breakers = {-1, *params.get("dry_sequence_breakers", ())}
    for place in range(len(seen)):
        length = 0
        while length < min(place, 50) and seen[place - 1 - length] == seen[-1 - length] not in breakers:
            length += 1
        if length >= params.get("dry_allowed_length", 2) and seen[place] not in breakers:
            found[seen[place]] = max(found.get(seen[place], 0), length)
    return found


def dry_penalty(length: int, params: Mapping[str, Any]) -> F:
    """What the logit of a token loses that would prolong a repetition of this length, at most the largest float32."""
    power = Fraction(params.get("dry_base", 1.75)) ** (length - params.get("dry_allowed_length", 2))
    return normal(F(min(float(Fraction(params["dry_multiplier"]) * power), float(np.finfo(F).max))))


def normal(x: F) -> F:
    """The number, 0 for a denormal."""
    return F(0.0) if abs(x) < np.finfo(F).tiny else x


def stops(params: Mapping[str, Any]) -> set[int]:
    """The tokens that end the request."""
    eos = params.get("eos_token_id")
    return {*params.get("stop_token_ids", ()), *([] if eos is None or params.get("ignore_eos") else [eos])}


def noise_position(position: int, tokens: Sequence[int], num_tokens: int) -> int:
    """What keys the noise at a position of a text, whose tokens may be -1 where there is none."""
    if not num_tokens:
        return position
    lanes = [0, 0]
    for place in range(position - num_tokens, position):
        token = tokens[place] if 0 <= place < len(tokens) else -1
        lanes[0] = (lanes[0] * 48271 + token + 2) % (2**31 - 1)
        lanes[1] = (lanes[1] * 69621 + token + 2) % (2**31 - 19)
    return lanes[0] * 2**31 + lanes[1]
