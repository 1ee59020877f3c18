"""What a sampler must offer to be asked: an adapter, and the choices that it declares instead of being failed for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Seeds = Sequence[int | None]  # the seed of each row; a row of None draws afresh
LEAST_RANGE = 2**31 - 1  # seeds and positions up to here are taken by every sampler that is asked


@dataclass(frozen=True, slots=True)
class Params:
    """The parameters of one row; the defaults keep every token.

    Args:
        temperature: 0 (greedy), or what the logits are divided by.
        top_k: 0 (off) or the number of tokens to keep.
        top_p: 1 (off) or the share of the mass to keep.
        min_p: 0 (off) or the least probability relative to the likeliest token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def features(self) -> frozenset[str]:
        """Names of what these parameters use: of "greedy", "temperature", "top_k", "top_p" and "min_p"."""
        used = {
            "greedy": self.temperature == 0.0,
            "temperature": self.temperature not in (0.0, 1.0),
            "top_k": self.top_k > 0,
            "top_p": self.top_p < 1.0,
            "min_p": self.min_p > 0.0,
        }
        return frozenset(name for name, is_used in used.items() if is_used)


@dataclass(frozen=True, slots=True)
class Semantics:
    """Choices that differ between correct samplers. A question follows what is declared here.

    Args:
        seeds: what a seed fixes. "row": a token is a function of its own row, parameters, seed and position; "call": a
            call is a function of all its arguments, one generator for all rows; "none": nothing.
        seed_range: the smallest and the largest seed that are taken; from 0 to 2**31 - 1 at least.
        largest_position: the largest position that is taken, 2**31 - 1 at least.
        filters: the order in which top_k, top_p and min_p act; an earlier one changes the mass that top_p sees.
        top_p_base: top_p is a share of the mass "kept" by the filters before it, or of the whole "row".
        keeps_at_boundary: whether a token is kept when the mass before it is exactly top_p times the base.
        top_k_ties: of tokens equal to the k-th, keep those of the "lowest_id", "all", or "any" that make k.
        top_p_ties: of equal tokens at the boundary, keep the "lowest_id" first, "all", or "any".
        greedy_ties: of equal largest logits, take the "lowest_id" or "any".
        nan: a NaN logit counts as "masked" (-inf), the row gets "any" token of the vocabulary, or a draw "raises".
        infinity: the tokens of +inf are "drawn" from, equally likely; or "any" token; or the call "raises".
        largest_logit: finite logits of this size and below are drawn by their law at temperature 1.
        all_masked: the token of a row without a finite logit is "minus_one", or "any"; or the call "raises".
        unseeded: whether a seed of None is allowed and draws afresh.
        unsupported: features that are not there, of those of ``Params.features``.
        dtypes: of logits, the formats that are taken besides float32.
        padded_vocab: whether logits may have more columns than the vocabulary.
        consumes_logits: whether a call may overwrite its logits; other arguments stay as they are in any case.
        rules: the rules of ``verify``; "match" promises the tokens of ``sample``, any other name their law.
        draft_kinds: what drafts may be under rules other than match, of "one_hot" and "probabilities".
        tolerance: of ``probs``, the largest error in total variation that is promised.
        replay_us: microseconds of the host that a replay of 64 rows may take.
    """

    seeds: Literal["row", "call", "none"] = "row"
    seed_range: tuple[int, int] = (-(2**63), 2**64 - 1)
    largest_position: int = 2**63 - 1
    filters: tuple[str, ...] = ("top_k", "top_p", "min_p")
    top_p_base: Literal["kept", "row"] = "kept"
    keeps_at_boundary: bool = False
    top_k_ties: Literal["lowest_id", "all", "any"] = "lowest_id"
    top_p_ties: Literal["lowest_id", "all", "any"] = "lowest_id"
    greedy_ties: Literal["lowest_id", "any"] = "lowest_id"
    nan: Literal["masked", "any", "raises"] = "masked"
    infinity: Literal["drawn", "any", "raises"] = "drawn"
    largest_logit: float = 3.4e38
    all_masked: Literal["minus_one", "any", "raises"] = "minus_one"
    unseeded: bool = True
    unsupported: frozenset[str] = frozenset()
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    padded_vocab: bool = False
    consumes_logits: bool = False
    rules: tuple[str, ...] = ()
    draft_kinds: tuple[str, ...] = ("one_hot", "probabilities")
    tolerance: float = 1e-5
    replay_us: float = 1000.0

    def __post_init__(self) -> None:
        """Refuse ranges that leave out what every question needs."""
        first, last = self.seed_range
        if first > 0 or last < LEAST_RANGE:
            raise ValueError(f"seed_range must hold 0 to 2**31 - 1, got {self.seed_range}; hash seeds in the adapter")
        if self.largest_position < LEAST_RANGE:
            raise ValueError(f"largest_position must be 2**31 - 1 or more, got {self.largest_position}")

    def refused(self, seeds: Iterable[int | None], positions: Tensor) -> str:
        """The declaration that some of the seeds or positions lie outside of, in words; nothing if all are taken."""
        numbers = [seed for seed in seeds if seed is not None]
        first, last = self.seed_range
        if numbers and not first <= min(numbers) <= max(numbers) <= last:
            return f"seed_range={self.seed_range}"
        is_far = len(positions) > 0 and int(positions.max()) > self.largest_position
        return f"largest_position={self.largest_position}" if is_far else ""


class Drafted(NamedTuple):
    """N requests with drafts to verify; request n has ``num_drafts[n] + 1`` consecutive rows of logits."""

    logits: Tensor
    """``[sum(num_drafts + 1), V]``."""
    params: Sequence[Params]
    """N parameters."""
    seeds: Sequence[int]
    """N seeds."""
    positions: Tensor
    """int64 ``[N]`` on the CPU, the position of the first token; row j of a request is at ``position + j``."""
    drafts: Tensor
    """int64 ``[N, K]``, -1 behind the drafts of a request."""
    num_drafts: Sequence[int]
    """N counts, 0..K."""
    probs: Tensor | None
    """float32 ``[sum(num_drafts), V]``, the laws that the drafts were drawn from; None for one-hot drafts."""


class Verified(NamedTuple):
    """What a verification commits."""

    token_ids: Tensor
    """int64 ``[N, K+1]``; what lies behind ``num_emitted`` is not read."""
    num_emitted: Tensor
    """int64 ``[N]``, the tokens to commit."""
    num_accepted: Tensor
    """int64 ``[N]``, the drafts among them."""


class Adapter(Protocol):
    """A sampler under test, made by ``target(vocab_size, device)``; only ``sample`` is needed.

    These methods are optional, and what is missing is not asked:

    - ``verify(drafted, rule) -> Verified``;
    - ``verify_trees(drafted, parents) -> Verified``, by the rule match: ``parents`` int64 ``[N, K]`` names the earlier
      draft that each one follows, -1 for none; row j + 1 of a request follows draft j;
    - ``draft(logits, params, seeds, positions, offset, rule) -> token ids``, the sampler's own drafter;
    - ``probs(logits, params) -> float [R, V]``, the law that is drawn from;
    - ``logprobs(logits, params, token_ids) -> float [R]``, of that law;
    - ``status(logits, params, seeds, positions) -> a set of "nan", "infinity", "all_masked" for each row``;
    - ``sample_with_status(logits, params, seeds, positions) -> (tokens, status)``, both of one draw;
    - ``capture(logits, params, seeds, positions) -> f``: ``f`` with as many other rows is a replay, and returns tokens.
      Calls with the same two lists are further steps of the same requests; questions of cost make only such calls, with
      positions on the device;
    - ``paths() -> {name: target}``: other samplers that promise the same tokens, such as another backend.

    Arguments are copies, which an adapter may write if it declares so, and what it returns is copied before its next
    call, which may overwrite it.
    """

    semantics: ClassVar[Semantics]

    def sample(self, logits: Tensor, params: Sequence[Params], seeds: Seeds, positions: Tensor) -> Tensor:
        """The token of each row.

        Args:
            logits: ``[R, V]`` on the device of the adapter; any row stride.
            params: R parameters.
            seeds: R seeds of the declared ``seed_range``, or None.
            positions: int64 ``[R]`` on the CPU, from 0 to the declared ``largest_position``.

        Returns:
            Integers ``[R]`` on any device.
        """
        ...


Target = Callable[[int, torch.device], Adapter]  # makes an adapter for a vocabulary size on a device
