"""Sampling parameters of one request, checked when they are made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter, is_
from typing import Any

from compiled_sampler.edits import EDIT_SPECS, PARAMETERS
from compiled_sampler.edits.edit_spec import checked_extra_args
from compiled_sampler.request_formats import generation_config_fields, openai_fields
from compiled_sampler.scalars import checked_float, checked_int

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e30


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request; numbers of numpy are stored as Python's, with the value that they hold.

    Args:
        temperature: 0 (greedy) or in [1e-5, 1e30]; the logits are divided by it.
        top_k: 0 (off) or the number of tokens to keep, in the order logit descending, id ascending.
        top_p: in (0, 1]; keeps the shortest prefix of the order that holds this share of the mass; 1 keeps all.
        min_p: in [0, 1]; keeps tokens at least this many times as likely as the likeliest; 0 keeps all.
        seed: any int in [-2**63, 2**64), taken modulo 2**64; None lets the sampler draw one.
        repetition_penalty: in [2**-20, 2**20]; logits of tokens of the history are divided by it where positive, else
            multiplied; 1 is none.
        repetition_scope: "all" for tokens of the prompt and drawn ones (vLLM, transformers), "output" for the latter
            alone (SGLang, TokenSpeed).
        frequency_penalty: in [-2, 2]; subtracted from a token's logit for each time that it was drawn.
        presence_penalty: in [-2, 2]; subtracted once if the token was drawn.
        dry_multiplier: in [0, 2**20]; above 0 a token that would prolong a repetition of n tokens, n at least
            ``dry_allowed_length``, loses ``dry_multiplier * dry_base**(n - dry_allowed_length)``; 0 is none (DRY of
            text-generation-webui and llama.cpp; n counts up to 50).
        dry_base: in [1, 2**10].
        dry_allowed_length: in [1, 50], the shortest repetition that is penalized.
        dry_range: the last tokens of the text that are looked at; 0 looks at all (``dry_penalty_last_n`` of llama.cpp).
        dry_sequence_breakers: token ids that no repetition holds, and that DRY does not penalize.
        logit_bias: maps token ids to what is added to their logits, finite or -inf; stored as pairs by ascending id.
        allowed_token_ids: the only tokens that may be drawn; None allows all.
        bad_words_token_ids: sequences of tokens; the last token of one is masked where the others were just drawn.
        bad_words_scope: "output" for sequences that begin in what was drawn (vLLM), "all" also in the prompt
            (transformers).
        min_tokens: tokens drawn before one of ``stop_token_ids`` or ``eos_token_id`` can be; they are masked till then.
        stop_token_ids: tokens that end the request; the one that was drawn is emitted.
        eos_token_id: another such token, of the model.
        ignore_eos: True to draw on behind ``eos_token_id``.
        watermark_tokens: in [0, 8]; above 0 the hash of so many tokens before it keys the noise of a token, instead of
            its position, with ``seed`` as the key of the watermark (``docs/edits.md``).
        extra_args: maps names of edits that the user wrote to their parameters, a mapping or ``LogitEdit.params``; the
            request has just these edits (``docs/custom-edits.md``). Stored as pairs by name.
        top_n_sigma: >= 0; keeps tokens whose logit is within so many standard deviations of the largest; 0 keeps all.
        p_less: True to keep tokens that are at least as likely as a token is to be drawn twice.
        typical_p: in (0, 1]; keeps the tokens whose surprise is nearest to the entropy, up to this share of the mass; 1
            keeps all.
        xtc_probability: in [0, 1], of a draw that excludes its top choices but the least likely one; 0 for none.
        xtc_threshold: in [0, 1], the least probability of a top choice; above 0.5 there are never two.
        min_k: True to keep the tokens before the largest drop of the ordered logits, each drop divided by its rank.
        min_k_tau: >= 0; min-k keeps the first n tokens at least, n times the range of the logits at most ``min_k_tau``.

    Raises:
        TypeError: a parameter of the wrong type.
        ValueError: a parameter out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    repetition_scope: str = "all"
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    dry_sequence_breakers: Iterable[int] | None = ()
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = ()
    allowed_token_ids: Iterable[int] | None = None
    bad_words_token_ids: Iterable[Iterable[int]] | None = ()
    bad_words_scope: str = "output"
    min_tokens: int = 0
    stop_token_ids: Iterable[int] | None = ()
    eos_token_id: int | None = None
    ignore_eos: bool = False
    watermark_tokens: int = 0
    extra_args: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = ()
    top_n_sigma: float = 0.0
    p_less: bool = False
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_k: bool = False
    min_k_tau: float = 3.0

    def __repr__(self) -> str:
        """The parameters that are not at their defaults, as they are passed."""
        changed = (f.name for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    @classmethod
    def from_generation_config(
        cls, generation_config: Any, seed: int | None = None, prompt_len: int | None = None
    ) -> SamplingParams:
        """What ``generate`` of transformers would draw with: its filters and edits; greedy without ``do_sample``.

        Args:
            generation_config: a ``GenerationConfig``, or anything with its fields; one that is None has the default of
                ``generate``, which is 50 for ``top_k``. Its eos and suppressed tokens may be ids that no logit has:
                ``for_vocab(vocab_size)`` of the result leaves these out.
            seed: of the request.
            prompt_len: tokens of the prompt, which ``min_length`` counts; ``min_new_tokens`` needs none.

        Raises:
            TypeError, ValueError: a field out of range, or one that the sampler does not have: beams,
                ``no_repeat_ngram_size``, ``guidance_scale``, a ``sequence_bias`` of several tokens and others.
        """
        return cls(**generation_config_fields(generation_config, prompt_len), seed=seed)

    @classmethod
    def from_openai(cls, body: Mapping[str, Any], eos_token_id: int | None = None) -> SamplingParams:
        """The parameters of a request body of OpenAI's API, with vLLM's further ones, also within ``vllm_xargs``.

        None is a field that is not set; -1 switches ``top_k`` and ``top_n_sigma`` off, and is no ``seed``.

        Args:
            body: of a chat or completions request; what is the engine's matter, such as ``max_tokens``, is passed over.
            eos_token_id: of the model.

        Raises:
            TypeError, ValueError: a field out of range, or one that the sampler does not have: ``stop`` as text, ``n``
                and ``best_of`` above 1, a ``response_format``, unknown fields.
        """
        return cls(**openai_fields(body), eos_token_id=eos_token_id)

    def __post_init__(self) -> None:
        """Check every parameter."""
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, checked_float(name, getattr(self, name)))
        object.__setattr__(self, "top_k", checked_int("top_k", self.top_k))
        if self.seed is not None:
            object.__setattr__(self, "seed", checked_int("seed", self.seed))
        if not (self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE):
            raise ValueError(
                f"temperature must be 0 or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}], got {self.temperature}; "
                "0 is greedy sampling"
            )
        if self.top_k < 0:
            way_out = "did you mean 0?" if self.top_k == -1 else "pass 0 to switch it off,"  # vLLM's -1
            raise ValueError(f"top_k must be >= 0, got {self.top_k}; {way_out} 0 keeps every token")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; 1.0 keeps every token")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}; 0.0 keeps every token")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be in [-2**63, 2**64), got {self.seed}; take it modulo 2**64")
        self._check_edits()

    def _check_edits(self) -> None:
        """Check the parameters that edit logits or end the request, and store them in one form."""
        values = _edit_values(self)
        if all(map(is_, values, _EDIT_DEFAULTS)):
            return  # most requests; equal is not enough, as True is equal to 1
        for name, value, default in zip(_EDIT_NAMES, values, _EDIT_DEFAULTS, strict=True):
            if value is not default:  # defaults are as they are stored
                check = PARAMETERS[name].check if name in PARAMETERS else checked_extra_args
                object.__setattr__(self, name, check(name, value))
        for spec in EDIT_SPECS:
            spec.check_request(self)

    def for_vocab(self, vocab_size: int) -> SamplingParams:
        """The same request without what a model's or an engine's config says of ids that no logit has.

        Stop and eos tokens at V and beyond, and biases of -inf for such ids (``suppress_tokens``), are left out, as
        nothing can draw these ids. With no stop token left, ``min_tokens`` becomes 0. All else stays for
        ``add_request`` to refuse: any other ``logit_bias`` of such an id is a mistake.

        Args:
            vocab_size: V, the number of logits that the model has.

        Raises:
            TypeError, ValueError: no int, or one below 1.
        """
        if checked_int("vocab_size", vocab_size) < 1:
            raise ValueError(f"vocab_size must be >= 1, got {vocab_size}; logits.shape[-1]")
        stored: Any = self
        stops = tuple(token for token in stored.stop_token_ids if token < vocab_size)
        eos = None if self.eos_token_id is None or self.eos_token_id >= vocab_size else self.eos_token_id
        bias = tuple(pair for pair in stored.logit_bias if pair[0] < vocab_size or pair[1] != -math.inf)
        least = self.min_tokens if stops or eos is not None or self.ignore_eos else 0
        kept = stops, eos, bias, least
        if kept == (stored.stop_token_ids, self.eos_token_id, stored.logit_bias, self.min_tokens):
            return self
        return replace(self, stop_token_ids=stops, eos_token_id=eos, logit_bias=bias, min_tokens=least)

    @property
    def all_stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end the request: ``stop_token_ids``, and ``eos_token_id`` unless it is ignored."""
        stops: Any = self.stop_token_ids
        eos = () if self.eos_token_id is None or self.ignore_eos else (self.eos_token_id,)
        return tuple(dict.fromkeys((*stops, *eos)))

    @property
    def custom(self) -> tuple[tuple[str, Any], ...]:
        """``extra_args`` as pairs: the name of an edit of the user, and its parameters."""
        stored: Any = self.extra_args
        return tuple(stored)

    @property
    def edits(self) -> tuple[str, ...]:
        """The names of the edits that the request needs: those of ``edits.names.EDITS`` in their order, the user's."""
        if _edit_values(self) == _EDIT_DEFAULTS:
            return ()
        draws = self.temperature > 0.0  # a greedy request has no law, so filters of whole rows leave it alone
        wanted = (spec.name for spec in EDIT_SPECS if spec.wanted(self) and (draws or spec.kind != "filter"))
        return (*wanted, *(name for name, _ in self.custom))

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one, of the lowest id among equals: temperature 0 or top_k 1."""
        return self.temperature == 0.0 or self.top_k == 1


_LAW_FIELDS = ("temperature", "top_k", "top_p", "min_p", "seed")
_EDIT_FIELDS = tuple(field for field in fields(SamplingParams) if field.name not in _LAW_FIELDS)
"""The other parameters, which edit logits, filter whole rows or end the request."""
_EDIT_NAMES, _EDIT_DEFAULTS = zip(*((field.name, field.default) for field in _EDIT_FIELDS), strict=True)
_edit_values = attrgetter(*_EDIT_NAMES)
