"""Each edit in each call, backend, dtype, base of top-p and mode: what the slow truth says, or an error."""

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.edits import EDIT_SPECS, PARAMETERS
from compiled_sampler.modes import TOP_P_BASES
from tests.builders import custom_edits
from tests.builders.custom_edits import Text, custom_sampler, edited_before, random_inputs, row_of
from tests.builders.edits import FILTERS, OF_EDIT, Request, V, added_to, edited_rows, random_mask
from tests.oracles import oracle_edits
from tests.tiers import tiers

COUNTS = (3, 0, 2, 3, 1, 3, 2, 3, 3)
"""Drafts of each request."""
WIDTH, ROWS, PROPOSED = max(COUNTS), sum(COUNTS) + len(COUNTS), sum(COUNTS)
PLACES = [(n, place) for n, count in enumerate(COUNTS) for place in range(count + 1)]
FIRST = [row for row, (_, place) in enumerate(PLACES) if place == 0]
JUDGING = [row for row, (n, place) in enumerate(PLACES) if place < COUNTS[n]]
"""Rows of logits: the first of each request, and those that judge a draft."""
LAWS = ({"temperature": 0.9, "top_k": 50, "top_p": 0.9}, {"temperature": 1.4, "top_k": 25, "top_p": 0.8, "min_p": 0.01})
"""Of requests in turn."""
LAWS_MODE = "top_k_top_p[64]"
"""Their mode, unless "full" is forced."""
PROMPT, OUTPUT = [12, 10, 4, 4], [3, 10, 4, 4]
HOT = (1, 3, 4, 8, 10, 12, 14, 100)
"""Tokens that are drawn often, of the history and of the lists below."""

EDITS: dict[str, dict[str, Any]] = {
    "allowed_token_ids": OF_EDIT["allowed_token_ids"],
    "logit_bias": OF_EDIT["logit_bias"],
    "min_tokens": {"min_tokens": 6, "stop_token_ids": tuple(range(0, 64, 2))},
    "repetition_penalty": {"repetition_penalty": 7.0},
    "repetition_scope": {"repetition_penalty": 7.0, "repetition_scope": "output"},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "dry": OF_EDIT["dry"],
    "dry_base": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_base": 1.2},
    "dry_range": {"dry_multiplier": 10.0, "dry_allowed_length": 1, "dry_range": 5},
    "dry_sequence_breakers": {"dry_multiplier": 10.0, "dry_allowed_length": 1, "dry_sequence_breakers": (10,)},
    "bad_words": OF_EDIT["bad_words"],
    "bad_words_scope": {"bad_words_token_ids": ((3,), (10, 4, 4, 3, 10, 4, 4, 8), (4, 4, 4)), "bad_words_scope": "all"},
    "stops": {"stop_token_ids": HOT[:6], "eos_token_id": 14},
    "ignore_eos": {"stop_token_ids": (3, 100), "eos_token_id": 4, "ignore_eos": True},
    "watermark": {"watermark_tokens": 2},
    **{name: OF_EDIT[name] for name in FILTERS},
    "typical_p": {"typical_p": 0.3},
    **{name: {"extra_args": {name: custom_edits.OF_EDIT[name]}} for name in custom_edits.EDITS},
    "token_bitmask": {},
}
"""Parameters that need one edit each, and every parameter; of the last one the mask comes with the call."""
CALLS = ("probs", "sample", "draft", "uncoupled draft", "match", "rejection of logits", "block", "block of logits")
OF_LOGITS = tuple(call for call in CALLS if call.endswith("of logits"))
REFUSED = {("watermark", call): "watermark_tokens must be verified by verify" for call in CALLS[5:]}
UNCHANGED = {
    ("watermark", "probs"),
    ("watermark", "uncoupled draft"),
    *((edit, call) for edit in ("stops", "ignore_eos") for call in ("probs", *CALLS[2:4])),
}
"""What an edit has no part in: noise is not that of the position in a draft of its own noise, and no part of a law; and
drafts and laws end no request."""
SEED = 7
"""Of logits and drafts with which the controls see every edit."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Given(NamedTuple):
    """What a call reads besides the plan."""

    logits: Tensor  # [ROWS, V]
    proposed: Tensor  # [PROPOSED, V], of the drafter
    drafts: Tensor  # int64 [N, WIDTH]
    positions: Tensor  # int64 [N]
    of_edits: dict[str, Any]  # a mask and what edits of the user read, a row for each row of logits

    def first(self, name: str) -> Any:
        """A tensor of ``of_edits`` for the first row of each request."""
        each = self.of_edits[name]
        return each[FIRST] if isinstance(each, Tensor) else {key: part[FIRST] for key, part in each.items()}


@functools.cache
def sampler_of(dtype: torch.dtype, base: str, backend: str = "eager") -> Sampler:
    return custom_sampler(backend, len(COUNTS), logits_dtype=dtype, top_p_base=base)


def requests_with(given: dict[str, Any]) -> list[Request]:
    laws = [LAWS[n % len(LAWS)] for n in range(len(COUNTS))]
    return [Request({"seed": n, **law, **given}, PROMPT, OUTPUT) for n, law in enumerate(laws)]


@functools.cache
def raw(dtype: torch.dtype) -> Given:
    """Without edits; drafts are often likely tokens, and all are token ids."""
    source, generator = random.Random(SEED), torch.Generator().manual_seed(SEED)
    logits, other = (1.5 * torch.randn(rows, V, generator=generator) for rows in (ROWS, PROPOSED))
    logits[:, HOT] += 3.0
    logits[:, HOT[1:3]] += 1.0
    drafts = torch.full((len(COUNTS), WIDTH), -1)
    for row in JUDGING:
        drafts[PLACES[row]] = int(logits[row].argmax()) if source.random() < 0.5 else source.choice(HOT)
    positions = torch.full((len(COUNTS),), len(PROMPT) + len(OUTPUT))
    return Given(logits.to(dtype), (logits[JUDGING] + other).to(dtype), drafts, positions, {})


def of_edits(edit: str, rows: int = ROWS) -> dict[str, Any]:
    if edit == "token_bitmask":
        return {"token_bitmask": random_mask(random.Random(1), rows, V)}
    return {"edit_inputs": random_inputs(rows, 2)} if edit in custom_edits.EDITS else {}


@functools.cache
def edited(edit: str, dtype: torch.dtype) -> Given:
    """What the slow truth makes of the logits of target and drafter, float32: every row with the drafts before it."""
    given, requests, read = raw(dtype), requests_with(EDITS[edit]), of_edits(edit)
    texts = [requests[n]._replace(output=[*OUTPUT, *given.drafts[n, :place].tolist()]) for n, place in PLACES]

    def made(logits: Tensor, rows: Sequence[int]) -> Tensor:
        if edit in custom_edits.EDITS:
            inputs = [row_of(read["edit_inputs"], row) for row in rows]
            tokens = [[*texts[row].prompt, *texts[row].output] for row in rows]
            return edited_before(logits, [Text([edit], *pair) for pair in zip(tokens, inputs, strict=True)])
        mask = read["token_bitmask"][list(rows)] if read else None
        return edited_rows(logits, [texts[row] for row in rows], mask)

    return given._replace(logits=made(given.logits, range(ROWS)), proposed=made(given.proposed, JUDGING))


def outcomes(
    sampler: Sampler, requests: Sequence[Request], given: Given, mode: str | None, names: Sequence[str] = CALLS
) -> dict[str, Any]:
    """What each of ``CALLS`` returns for the requests, as lists; the message of its error where it is refused."""
    slots = [each.added(sampler) for each in requests]
    plan, plan_of, where = sampler.plan(slots, mode), sampler.plan(slots, mode, COUNTS), given.positions
    first, one = given.logits[FIRST].contiguous(), {name: given.first(name) for name in given.of_edits}
    for slot, drafts, count in zip(slots, given.drafts.tolist(), COUNTS, strict=True):
        sampler.set_history(slot, len(PROMPT) + len(OUTPUT), drafts[:count])
    of_logits = {"draft_logits": given.proposed}
    verify = functools.partial(sampler.verify, plan_of, given.logits, given.drafts, where, **given.of_edits)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: (sampler.probs(plan_of, given.logits, positions=where, **given.of_edits),),
        lambda: sampler.sample(plan, first, where, **one),
        lambda: sampler.draft(plan, first, where, True, **one).drawn[:2],
        lambda: sampler.draft(plan, first, where, False, **one).drawn[:2],
        lambda: verify("match"),
        lambda: verify("rejection", **of_logits),
        lambda: verify("block"),
        lambda: verify("block", **of_logits),
    )
    found = {name: listed(call) for name, call in zip(CALLS, calls, strict=True) if name in names}
    for slot in slots:
        sampler.remove_request(slot)
    return found


def listed(call: Callable[[], Sequence[Tensor | None]]) -> Any:
    try:
        return [each.tolist() for each in call() if each is not None]
    except ValueError as error:
        return str(error)


def ended(call: str, found: Any, stops: set[int]) -> Any:
    """Results of a request without stop tokens, cut at the first one, with ``finished``."""
    if call == "sample":
        return [*found, [token in stops for token in found[0]]]
    if call in CALLS[:4]:
        return found
    rows = zip(*found, strict=True)
    return [list(each) for each in zip(*(_cut(*row, stops) for row in rows), strict=True)]


def _cut(
    tokens: list[int], emitted: int, accepted: int, matching: int, status: int, stops: set[int]
) -> tuple[Any, ...]:
    """A row of ``verify``: an accepted draft that ends the request has no token behind it."""
    end = next((n for n, token in enumerate(tokens[:emitted]) if token in stops), None)
    if end is None:
        return tokens, emitted, accepted, matching, status, False
    tokens = [*tokens[: end + 1], *[-1] * (WIDTH - end)]
    return tokens, end + 1, min(accepted, end + 1), matching, status, True


@functools.cache
def drawn_plainly(dtype: torch.dtype, base: str) -> dict[str, Any]:
    given = raw(dtype)
    given = given._replace(logits=given.logits.float(), proposed=given.proposed.float())
    return outcomes(sampler_of(torch.float32, base), requests_with({}), given, None)


@functools.cache
def ignored(edit: str, dtype: torch.dtype, base: str) -> dict[str, Any]:
    """What the calls would return without the edit; the stop tokens that ``min_tokens`` comes with still act.

    Where logits of the drafter are given: without it in these alone.
    """
    stops = oracle_edits.stops(EDITS[edit]) if edit == "min_tokens" else set()
    of_target = edited(edit, dtype)._replace(proposed=raw(dtype).proposed.float())
    found = outcomes(sampler_of(torch.float32, base), requests_with({}), of_target, None, OF_LOGITS)
    return {call: ended(call, each, stops) for call, each in {**drawn_plainly(dtype, base), **found}.items()}


@functools.cache
def expected(edit: str, dtype: torch.dtype, base: str) -> dict[str, Any]:
    """What requests without edits get for logits that the slow truth edited before."""
    found = outcomes(sampler_of(torch.float32, base), requests_with({}), edited(edit, dtype), None)
    stops = oracle_edits.stops(EDITS[edit])
    found = {call: ended(call, each, stops) for call, each in found.items()}
    return {**found, **marked(dtype, base)} if edit == "watermark" else found


def marked(dtype: torch.dtype, base: str) -> dict[str, Any]:
    """What a watermark changes: each row is drawn at the position that its text hashes to."""
    given, plain = raw(dtype), sampler_of(torch.float32, base)
    texts = [[*PROMPT, *OUTPUT, *given.drafts[n, :place].tolist()] for n, place in PLACES]
    keyed = torch.tensor([oracle_edits.noise_position(len(text), text, 2) for text in texts])
    with added_to(requests_with({}), plain) as [(_, slots)]:
        drawn = plain.sample(plain.plan([slots[n] for n, _ in PLACES]), given.logits.float(), keyed)
    tokens = dict(zip(PLACES, drawn.token_ids.tolist(), strict=True))
    rows = []
    for n, count in enumerate(COUNTS):
        hits = [tokens[n, place] == int(given.drafts[n, place]) for place in range(count)]
        accepted = [*hits, False].index(False)
        emitted = [tokens[n, place] for place in range(accepted + 1)]
        rows.append(([*emitted, *[-1] * (WIDTH - accepted)], accepted + 1, accepted, sum(hits), 0, False))
    first = [tokens[n, 0] for n in range(len(COUNTS))]
    none = [0] * len(COUNTS)
    matched = [list(each) for each in zip(*rows, strict=True)]
    return {"sample": [first, none, [False] * len(COUNTS)], "draft": [first, none], "match": matched}


CELLS = [*itertools.product(DTYPES, TOP_P_BASES, (None, "full"))]
FIRST_TIER = [(edit, "eager", *CELLS[5 * n % len(CELLS)]) for n, edit in enumerate(EDITS)]
"""Each edit once, and each dtype, base and mode with some of them."""
EVERY = [
    *((edit, "eager", *cell) for edit in EDITS for cell in CELLS),
    *((edit, "reference", *CELLS[0]) for edit in EDITS),
    *((edit, "compiled", *CELLS[0]) for edit in ("repetition_penalty", "typical_p", "Stepped")),
]


@pytest.mark.parametrize(
    ("edit", "backend", "dtype", "base", "mode"),
    tiers([*FIRST_TIER, *((edit, "reference", *CELLS[0]) for edit in ("dry", "xtc", "Stepped"))], EVERY),
    ids=str,
)
def test_an_edit_acts_in_every_call_or_is_refused(edit, backend, dtype, base, mode):
    given = raw(dtype)._replace(of_edits=of_edits(edit))
    found = outcomes(sampler_of(dtype, base, backend), requests_with(EDITS[edit]), given, mode)
    wanted, without = expected(edit, dtype, base), ignored(edit, dtype, base)
    for call in CALLS:
        if (edit, call) in REFUSED:
            assert REFUSED[edit, call] in found[call]
            continue
        assert found[call] == wanted[call], call
        told = [found[call][index] != without[call][index] for index in (0, -1)]  # tokens or laws, and who finished
        assert any(told) is ((edit, call) not in UNCHANGED), call


def test_every_edit_and_every_parameter_of_one_with_another_value_than_its_default_is_in_the_matrix():
    default, params = SamplingParams(), [SamplingParams(**given) for given in EDITS.values()]
    assert {spec.name for spec in EDIT_SPECS if spec.parameters} <= {name for each in params for name in each.edits}
    assert all(any(getattr(each, name) != getattr(default, name) for each in params) for name in PARAMETERS)


def test_the_cells_differ():
    """The mode without a forced one is another, and the bases of top-p give other laws."""
    assert sampler_of(DTYPES[0], "top_k").mode_for([each.params for each in requests_with({})]).name == LAWS_MODE
    first, second = (drawn_plainly(DTYPES[0], base)["probs"] for base in TOP_P_BASES)
    assert first != second


# Compiled for one row.


PROMPT_OF_ONE, OUTPUT_OF_ONE = [3, 10, 4, 4, 12, 3, 10], [4, 4, 12, 8, 3, 10, 4]
STEPS, TOGETHER = 3, "all together"
ALL_EDITS = {key: value for each in OF_EDIT.values() for key, value in each.items()}
CASES: dict[str, dict[str, Any]] = {
    **OF_EDIT,
    "watermark": {"watermark_tokens": 2},
    **{name: {"extra_args": {name: given}} for name, given in custom_edits.OF_EDIT.items()},
    "token_bitmask": {},
    TOGETHER: ALL_EDITS,
}
LAW = {"seed": 3, "temperature": 0.9}


@functools.cache
def sampler_of_one(device: str, backend: str) -> Sampler:
    return custom_sampler(backend, 1, device=device)


def outcomes_of_one(sampler: Sampler, request: Request, edit: str) -> dict[str, Any]:
    """What a few steps of the request return as lists; of "all together" also drafts, laws and verified drafts."""
    generator = torch.Generator().manual_seed(5)
    slot, made = request.added(sampler), dict[str, Any]()
    plan, plan_of = sampler.plan([slot]), sampler.plan([slot], num_drafts=[1])

    def there(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.to(sampler.device) for each in tensors)

    for step in range(STEPS):
        logits, where = there(2.0 * torch.randn(1, V, generator=generator), torch.tensor([request.position + step]))
        given = tree_map_only(Tensor, lambda each: each.to(sampler.device), of_edits(edit, 1))
        if edit not in custom_edits.EDITS:
            made[f"logits {step}"] = sampler.edited_logits(plan, logits, where, **given).tolist()
        if edit == TOGETHER:
            made[f"law {step}"] = sampler.probs(plan, logits, positions=where).tolist()
            made[f"draft {step}"] = sampler.draft(plan, logits, where).token_ids.tolist()
        made[f"sample {step}"] = [
            each.tolist() for each in sampler.sample(plan, logits, where, **given) if each is not None
        ]
    for rule in ("match", "block") if edit == TOGETHER else ():
        logits, drafts = there(2.0 * torch.randn(2, V, generator=generator), torch.tensor([[10]]))
        verified = sampler.verify(plan_of, logits, drafts, *there(torch.tensor([request.position + STEPS])), rule)
        made[rule] = [each.tolist() for each in verified if each is not None]
    sampler.remove_request(slot)
    return made


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("edit", tiers(["Stepped", "token_bitmask"], CASES))
def test_an_edit_of_one_row_compiled_is_that_of_eager_torch(edit, device):
    """The control: without the edit, eager torch returns something else."""
    request = Request({**LAW, **CASES[edit]}, PROMPT_OF_ONE, OUTPUT_OF_ONE)
    wanted = outcomes_of_one(sampler_of_one("cpu", "eager"), request, edit)
    assert outcomes_of_one(sampler_of_one(device, "compiled"), request, edit) == wanted
    assert outcomes_of_one(sampler_of_one("cpu", "eager"), request._replace(given=LAW), "") != wanted
