"""Golden bits of every mode, rule, edit and logprob, through the public API alone: ``python -m tests.golden --record``.

Every backend must give the hashes of ``golden.json``. Inputs are made of integers, so that no version of torch or numpy
makes others of them. ``--record`` is for new cases: a hash that changes is a change of the sampler's bits.
"""

import functools
import hashlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_sampler import (
    EditInput,
    EditRows,
    LogitEdit,
    Logprobs,
    SampleOutputs,
    Sampler,
    SamplingParams,
    functional,
    replay,
)

DATA = Path(__file__).with_name("golden.json")
NUM_REQUESTS = {1009: 48, 64: 24}
"""N by V."""
WIDTH, HISTORY = 3, 32
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BASES, RULES, LOGPROB_LAWS = ("top_k", "all"), ("match", "rejection", "block"), ("raw", "processed", "filtered")
FORMS = ("one_hot", "probs", "logits", "processed", "handles", "cache")
"""Of what drafts were drawn from; the last two are handles of ``Sampler.draft``."""

LAWS: dict[str, tuple[dict[str, Any], ...]] = {
    "greedy": ({"temperature": 0.0}, {"top_k": 1, "temperature": 0.7}),
    "no_filter": ({}, {"temperature": 0.6}, {"temperature": 2.5}),
    "min_p": ({"min_p": 0.05}, {"min_p": 0.3, "temperature": 1.5}),
    "top_k_top_p[64]": ({"top_k": 20, "top_p": 0.9}, {"top_k": 63, "temperature": 0.8, "min_p": 0.01}),
    "top_k": ({"top_k": 300}, {"top_k": 65, "min_p": 0.02, "temperature": 1.3}),
    "full": ({"top_p": 0.97, "temperature": 1.5}, {"top_k": 200, "top_p": 0.5}, {"temperature": 0.0}, {"top_p": 0.3}),
}
"""Filters of requests in turn, by the mode that is the cheapest for them at the larger V."""

EDITS: dict[str, tuple[dict[str, Any], ...]] = {
    "none": (),
    "allowed_token_ids": ({"allowed_token_ids": range(0, 60, 3)},),
    "logit_bias": ({"logit_bias": {1: 3.5, 8: -math.inf, 30: -2.25, 40: 6.0}},),
    "min_tokens": ({"min_tokens": 5, "stop_token_ids": range(0, 32, 2)},),
    "penalties": (
        {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": -0.4},
        {"repetition_penalty": 1.3, "repetition_scope": "output"},
        {"frequency_penalty": -1.1, "presence_penalty": 2.0},
    ),
    "dry": (
        {"dry_multiplier": 3.0, "dry_allowed_length": 1, "dry_sequence_breakers": (2,)},
        {"dry_multiplier": 0.8, "dry_range": 5},
    ),
    "bad_words": (
        {"bad_words_token_ids": ((3,), (10, 12), (4, 4))},
        {"bad_words_token_ids": ((4, 7),), "bad_words_scope": "all"},
    ),
    "stops": ({"stop_token_ids": range(0, 64, 5), "eos_token_id": 7},),
    "watermark": ({"watermark_tokens": 2},),
    "user": ({"extra_args": {"Shifted": {"factor": 0.75}}},),
    "token_bitmask": (),
    "top_n_sigma": ({"top_n_sigma": 1.25},),
    "min_k": ({"min_k": True, "min_k_tau": 60.0},),
    "p_less": ({"p_less": True},),
    "typical_p": ({"typical_p": 0.6},),
    "xtc": ({"xtc_probability": 0.5, "xtc_threshold": 0.02},),
}
"""Parameters of requests in turn, of which every third has none; the mask comes with the call."""
ROW_FILTERS = tuple(EDITS)[-5:]
EDITS["all"] = tuple(given for name in EDITS if name != "watermark" for given in EDITS[name])


@dataclass(frozen=True)
class ShiftedParams:
    """What a request sets."""

    factor: float


@dataclass(frozen=True)
class Shifted(LogitEdit):
    """An edit of a user: it reads a parameter, a tensor of the call, the position and the token before."""

    params = ShiftedParams
    inputs: ClassVar[Mapping[str, EditInput]] = {"shift": EditInput(torch.float32)}
    history_tokens = 1

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """The logits scaled and shifted, but for that of the token before."""
        assert rows.history is not None
        shifted = x * rows.params["factor"] + rows.inputs["shift"] + (rows.positions & 3).float()
        return torch.where(ids == rows.history[:, -1:], x, shifted)


class Batch(NamedTuple):
    """Tensors of requests with up to ``WIDTH`` drafts: N requests, D drafts, ``R = N + D`` rows."""

    logits: Tensor
    """``[R, V + 1]``: some rows have ties, NaN, infinities or no token, and the last column is no token."""
    near: Tensor
    """``[R, V]``, each row near that of the target."""
    draft_logits: Tensor
    """``[D, V]``, those of them that drafts are drawn from."""
    probs: Tensor
    """float32 ``[R, V]``, of the target."""
    draft_probs: Tensor
    """float32 ``[D, V]``."""
    drafts: Tensor
    """int64 ``[N, WIDTH]``, often the likeliest token of their row."""
    num_drafts: list[int]
    firsts: Tensor
    """int64 ``[N]``, the first row of each request."""
    bitmask: Tensor
    """int32 ``[R, ceil(V / 32)]``."""
    shift: Tensor
    """float32 ``[R]``, what ``Shifted`` reads."""


@functools.cache
def batch(vocab_size: int, dtype: torch.dtype) -> Batch:
    """Of integers of Philox, whose stream numpy promises."""
    source = np.random.Generator(np.random.Philox(key=vocab_size))
    count = NUM_REQUESTS[vocab_size]

    def integers(low: int, high: int, *shape: int) -> Tensor:
        span = np.uint64(high - low)
        return torch.from_numpy((source.bit_generator.random_raw(math.prod(shape)) % span).astype(np.int64) + low).view(
            shape
        )

    num_drafts = [n % (WIDTH + 1) for n in range(count)]
    firsts = torch.tensor([0, *(drafts + 1 for drafts in num_drafts[:-1])]).cumsum(0)
    rows = sum(num_drafts) + count
    logits = (integers(-(2**16), 2**16 + 1, 3, rows, vocab_size + 1).sum(0) / 2.0**14).to(torch.float32)
    logits[:, vocab_size] = 1e4
    logits[1::11] = logits[1::11].round()
    near = logits[:, :vocab_size] + integers(-64, 65, rows, vocab_size) / 64.0
    probs, draft_probs = (_probs(each[:, :vocab_size]) for each in (logits, near))
    logits[2, 5], logits[3, 6], logits[4, 7], logits[5] = math.nan, math.inf, -math.inf, -math.inf
    is_last = torch.zeros(rows, dtype=torch.bool)
    is_last[firsts + torch.tensor(num_drafts)] = True
    judging = torch.arange(rows)[~is_last]
    owner = torch.arange(count).repeat_interleave(torch.tensor(num_drafts))
    drafts = torch.full((count, WIDTH), -1)
    drafts[owner, judging - firsts[owner]] = torch.where(
        integers(0, 3, len(judging)) > 0, near[judging].argmax(-1), integers(0, vocab_size, len(judging))
    )
    drafts[7, 0] = vocab_size
    words = integers(-(2**31), 2**31, 2, rows, -(-vocab_size // 32)).to(torch.int32)
    bitmask, shift = words[0] | words[1], integers(-8, 9, rows) / 8.0
    logits, near = logits.to(dtype), near.to(dtype)
    return Batch(logits, near, near[judging], probs, draft_probs[judging], drafts, num_drafts, firsts, bitmask, shift)


def _probs(logits: Tensor) -> Tensor:
    """Powers of two over their sum, float32 ``[R, V]``."""
    weights = torch.from_numpy(np.ldexp(1.0, (logits * 1.5).round().int().numpy()))
    return (weights / weights.sum(-1, keepdim=True)).to(torch.float32)


@functools.cache
def sampler_of(backend: str, vocab_size: int, dtype: torch.dtype, base: str = "top_k", width: int = 0) -> Sampler:
    """Shared by all cases, since compiling costs seconds; with a width its drafts are cached."""
    options: dict[str, Any] = {"draft_cache_len": width, "history_len": HISTORY, "edits": [Shifted()]}
    return Sampler(vocab_size, NUM_REQUESTS[vocab_size], "cpu", dtype, backend, base, **options)


def params_of(law: str, edit: str, count: int) -> list[SamplingParams]:
    laws, edits = LAWS[law], EDITS[edit]
    return [
        SamplingParams(**laws[n % len(laws)], **(edits[n % len(edits)] if edits and n % 3 else {}), seed=2**56 * n - n)
        for n in range(count)
    ]


class Call(NamedTuple):
    """One call of the sampler with requests of its own, and what its results are named by."""

    kind: str
    vocab_size: int
    dtype: str
    law: str = "full"
    edit: str = "none"
    base: str = "top_k"
    rule: str = ""
    form: str = "one_hot"
    logprobs: str = ""

    @property
    def name(self) -> str:
        """The kind, V, the dtype, and what is not at its default."""
        more = (
            f"{key}={value}" for key, value in self._asdict().items() if value != self._field_defaults.get(key, value)
        )
        return " ".join([self.kind, f"V={self.vocab_size}", self.dtype, *more])

    def results(self, backend: str) -> Any:
        given = batch(self.vocab_size, DTYPES[self.dtype])
        if self.kind.startswith("functional"):
            return self._of_functions(given, backend)
        width = WIDTH if self.form == "cache" else 0
        sampler = sampler_of(backend, self.vocab_size, DTYPES[self.dtype], self.base, width)
        prompts = [[n % 5, 4, 10, 4][: n % 5] for n in range(NUM_REQUESTS[self.vocab_size])]
        outputs = [[4, 3, 10, 4, 10][: n % 6] for n in range(len(prompts))]
        params = params_of(self.law, self.edit, len(prompts))
        slots = [sampler.add_request(*each) for each in zip(params, prompts, outputs, strict=True)]
        positions = torch.tensor([len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)])
        try:
            return self._of_sampler(sampler, slots, given, positions)
        finally:
            for slot in slots:
                sampler.remove_request(slot)

    def _of_sampler(self, sampler: Sampler, slots: list[int], given: Batch, positions: Tensor) -> Any:
        read = self._read(given, slice(None) if self.kind == "verify" else given.firsts)
        if self.kind == "verify":
            return self._verified(sampler, slots, given, positions, read)
        plan, logits = sampler.plan(slots), given.logits[given.firsts]
        asked = functools.partial(sampler.sample, plan, logits, positions, **read)
        of_kind = {
            "sample": asked,
            "consumed": lambda: asked(consume_logits=True),
            "restored": lambda: (*asked(consume_logits="restore"), logits),
            "coupled draft": lambda: sampler.draft(plan, logits, positions, **read).drawn,
            "own draft": lambda: sampler.draft(plan, logits, positions, False, 1, **read).drawn,
            "probs": lambda: sampler.probs(plan, logits, positions=positions, **read),
            "edited": lambda: sampler.edited_logits(plan, logits, positions, **read),
            "replay": lambda: self._replayed(sampler, slots, logits, asked(logprobs=Logprobs(boundary=True))),
        }
        return of_kind[self.kind]()

    def _read(self, given: Batch, rows: Any) -> dict[str, Any]:
        """What the call has besides its plan, logits and positions."""
        read: dict[str, Any] = {}
        if self.edit in ("user", "all"):
            read["edit_inputs"] = {"shift": given.shift[rows]}
        if self.edit in ("token_bitmask", "all"):
            read["token_bitmask"] = given.bitmask[rows]
        if self.logprobs:
            flags = {
                "rank": True,
                "entropy": True,
                "num_kept": True,
                "boundary": self.edit not in (*ROW_FILTERS, "all"),
            }
            read["logprobs"] = Logprobs(top=5, of=self.logprobs, token_ids=(0, 7, 63), **flags)
        return read

    def _replayed(self, sampler: Sampler, slots: list[int], logits: Tensor, drawn: SampleOutputs) -> Any:
        """The kept set; its logprobs are torch's, whose bits are promised by nobody."""
        assert drawn.logprobs is not None
        assert drawn.logprobs.boundary is not None
        requests = [sampler.request(slot) for slot in slots]
        return replay(logits[:, : self.vocab_size], requests, drawn.token_ids, drawn.logprobs.boundary)[1]

    def _verified(
        self, sampler: Sampler, slots: list[int], given: Batch, positions: Tensor, options: dict[str, Any]
    ) -> Any:
        plan = sampler.plan(slots, num_drafts=given.num_drafts)
        if self.form in ("from probs", "from probs, probs"):
            proposed = given.draft_probs if self.form != "from probs" else None
            return sampler.verify_from_probs(plan, given.probs, given.drafts, positions, proposed, self.rule)
        if self.form in ("handles", "cache"):
            plan = sampler.plan(slots, num_drafts=[WIDTH] * len(slots))
            rows = torch.arange(len(slots) * (WIDTH + 1)) % len(given.logits)
            logits, proposed = given.logits[rows], given.near[rows].view(len(slots), WIDTH + 1, -1)
            handles = [
                sampler.draft(plan, proposed[:, step].contiguous(), positions + step, False, step)
                for step in range(WIDTH)
            ]
            return [*(each.drawn for each in handles), sampler.verify(plan, logits, handles, positions, self.rule)]
        options |= {
            "one_hot": {},
            "probs": {"draft_probs": given.draft_probs},
            "logits": {"draft_logits": given.draft_logits},
            "processed": {"draft_logits": given.draft_logits, "draft_logits_are": "processed"},
        }[self.form]
        return sampler.verify(plan, given.logits, given.drafts, positions, self.rule, **options)

    def _of_functions(self, given: Batch, backend: str) -> Any:
        count = len(given.firsts)
        params = params_of(self.law, "none", count)
        names = ("temperature", "top_k", "top_p", "min_p")
        filters = {name: torch.tensor([getattr(each, name) for each in params]) for name in names}
        filters |= {name: filters[name].double() for name in names if name != "top_k"}
        seeds = torch.tensor([each.seed for each in params])
        drawn_by = {"seeds": seeds, "positions": torch.arange(count) * 2**33}
        options: dict[str, Any] = {"vocab_size": self.vocab_size, "backend": backend}
        if self.kind == "functional probs":
            return functional.probs(given.logits[given.firsts], **filters, **options)
        if self.kind == "functional sample":
            return functional.sample(given.logits[given.firsts], **filters, **drawn_by, **options)
        options |= {**drawn_by, "num_drafts": torch.tensor(given.num_drafts), "rule": self.rule}
        if self.form == "from probs":
            return functional.verify_from_probs(given.probs, given.drafts, **options)
        proposed = {"probs": given.draft_probs, "logits": given.draft_logits}.get(self.form)
        options |= {} if proposed is None else {f"draft_{self.form}": proposed}
        return functional.verify(given.logits, given.drafts, **filters, **options)


def calls(vocab_size: int, dtype: str) -> list[Call]:
    """All cases of one V and dtype; their names differ."""
    call = functools.partial(Call, vocab_size=vocab_size, dtype=dtype)
    of_functions = [("match", "one_hot"), ("block", "from probs"), *product(RULES[1:], FORMS[:3])]
    draws = ("sample", "coupled draft", "own draft", "probs")
    by_law = (*draws, "functional sample", "functional probs", "replay")
    by_edit = (*draws, "edited", *(("consumed", "restored") if dtype == "float32" else ()))
    edits = tuple(EDITS)[1:]
    judged = [("match", "one_hot"), ("rejection", "logits"), ("block", "one_hot")]
    return [
        *(call(kind, law=law) for law, kind in product(LAWS, by_law)),
        *(call(kind, law=law, base="all") for law, kind in product(LAWS, ("sample", "probs"))),
        *(call("verify", law=law, rule="match") for law in LAWS),
        *(call("verify", law=law, rule=rule, form="logits") for law, rule in product([*LAWS][:-1], RULES[1:])),
        *(call("verify", rule=rule, form=form) for rule, form in product(RULES[1:], FORMS)),
        *(call("verify", rule=rule, base="all", form="logits") for rule in RULES[1:]),
        *(call("verify", rule=rule, form="from probs") for rule in RULES),
        *(call("verify", rule=rule, form="from probs, probs") for rule in RULES[1:]),
        *(call("functional verify", rule=rule, form=form) for rule, form in of_functions),
        *(call(kind, edit=edit) for edit, kind in product(edits, by_edit)),
        call("verify", edit="watermark", rule="match"),
        *(
            call("verify", edit=edit, rule=rule, form=form)
            for edit, (rule, form) in product(edits, judged)
            if edit != "watermark"
        ),
        *(call("sample", logprobs=of, law=law) for of, law in product(LOGPROB_LAWS, LAWS)),
        *(call("sample", logprobs=of, edit=edit) for of, edit in product(LOGPROB_LAWS, edits)),
        *(
            call("verify", logprobs=of, rule=rule, edit=edit)
            for of, rule, edit in product(LOGPROB_LAWS, RULES, ("none", "all"))
        ),
    ]


def hash_of(results: Any) -> str:
    """Of dtypes, shapes and bits of all tensors."""
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            stored = part.contiguous()
            digest.update(f"{stored.dtype} {[*stored.shape]}".encode())
            digest.update(stored.view(torch.uint8).numpy().tobytes() if stored.numel() else b"")
        elif part is None:
            digest.update(b"None")
        else:
            # The hashes are older than ``node_ids``, which chains do not have; where there are some, they count.
            has_none = getattr(part, "node_ids", part) is None
            for each in part._replace(node_ids=()) if has_none else part:
                add(each)

    add(results)
    return digest.hexdigest()[:16]


def sizes() -> list[tuple[int, str]]:
    return [*product(NUM_REQUESTS, DTYPES)]


def record() -> dict[str, str]:
    """The hashes of all cases by name."""
    return {call.name: hash_of(call.results("eager")) for size in sizes() for call in calls(*size)}


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit("usage: python -m tests.golden --record")
    DATA.write_text(json.dumps(record(), indent=0) + "\n")
