"""The signatures of ``flashinfer.sampling``: what they draw, by which law, and what raises."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler.core.stage import call
from compiled_sampler.functional import probs as law_of
from compiled_sampler.functional import sample
from compiled_sampler.integrations import flashinfer
from compiled_sampler.integrations.flashinfer import base_2_logits
from tests.oracles.goodness_of_fit import accept, chi_square, detects, independence

V, ROWS, DRAWS = 12, 4, 40_000
ALWAYS = ("indices", "deterministic", "generator", "check_nan", "seed", "offset")
NAMES = {
    "softmax": ("logits", "temperature", "enable_pdl"),
    "sampling_from_logits": ("logits", *ALWAYS),
    "sampling_from_probs": ("probs", *ALWAYS, "return_valid"),
    "top_p_sampling_from_probs": ("probs", "top_p", *ALWAYS, "return_valid"),
    "top_k_sampling_from_probs": ("probs", "top_k", *ALWAYS, "return_valid"),
    "min_p_sampling_from_probs": ("probs", "min_p", *ALWAYS, "return_valid"),
    "top_k_top_p_sampling_from_logits": ("logits", "top_k", "top_p", "indices", "filter_apply_order", *ALWAYS[1:]),
    "top_k_top_p_sampling_from_probs": (
        *("probs", "top_k", "top_p", "indices", "filter_apply_order", *ALWAYS[1:]),
        "return_valid",
    ),
    "top_p_renorm_probs": ("probs", "top_p", "is_deterministic"),
    "top_k_renorm_probs": ("probs", "top_k"),
    "top_k_mask_logits": ("logits", "top_k"),
    "chain_speculative_sampling": (
        *("draft_probs", "draft_token_ids", "target_probs"),
        *("maybe_output_accepted_token_num", "maybe_output_emitted_draft_token_num"),
        *("deterministic", "generator", "seed", "offset"),
    ),
}
"""Parameters of each function of FlashInfer at commit fb28d7242, in their order."""

CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "sampling_from_logits": ((), {}),
    "sampling_from_probs": ((), {}),
    "top_p_sampling_from_probs": ((0.7,), {"top_p": 0.7}),
    "top_k_sampling_from_probs": ((3,), {"top_k": 3}),
    "min_p_sampling_from_probs": ((0.3,), {"min_p": 0.3}),
    "top_k_top_p_sampling_from_logits": ((5, 0.8), {"top_k": 5, "top_p": 0.8}),
    "top_k_top_p_sampling_from_probs": ((5, 0.8), {"top_k": 5, "top_p": 0.8}),
}
"""Arguments of the functions that draw, and the parameters of the law that they draw from."""

LOGITS = torch.randn(ROWS, V, generator=torch.Generator().manual_seed(5)) * 1.5
PROBS = torch.softmax(LOGITS, -1)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions run eager torch."""
    monkeypatch.setattr(flashinfer, "_run", lambda: call)
    for name in ("sample", "probabilities", "verify_from_probs"):
        monkeypatch.setattr(flashinfer, name, functools.partial(getattr(flashinfer, name), backend="eager"))


def drawing(name: str) -> tuple[Callable[..., Any], Tensor]:
    """A function that draws, with its arguments but for noise, and the rows that it takes."""
    given, _ = CASES[name]
    values = LOGITS if name.endswith("logits") else PROBS
    return functools.partial(getattr(flashinfer, name), values, *given), values


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_flashinfer_in_their_order(name):
    assert tuple(inspect.signature(getattr(flashinfer, name)).parameters) == NAMES[name]


@pytest.mark.parametrize("name", CASES)
def test_one_seed_draws_by_the_law_in_every_row(eager, name):
    draw, _ = drawing(name)
    index = torch.arange(DRAWS, dtype=torch.int32) % ROWS
    drawn = draw(indices=index, seed=11, offset=3)
    assert drawn.dtype == torch.int32
    law = law_of(LOGITS, **CASES[name][1], backend="eager").double()
    for row in range(ROWS):
        counts = torch.bincount(drawn[index == row].long(), minlength=V)
        accept(chi_square(counts, law[row]))
        detects(chi_square(counts, law[row - 1]))  # the law of another row is found out


def test_rows_and_offsets_draw_apart(eager):
    flat = torch.zeros(1, V)
    index = torch.zeros(DRAWS, dtype=torch.int64)
    first, second = (flashinfer.sampling_from_logits(flat, index, seed=1, offset=at) for at in (0, 1))
    accept(independence(first, second, (V, V)), independence(first[:-1], first[1:], (V, V)))
    detects(independence(first, first, (V, V)))


@pytest.mark.parametrize("name", CASES)
def test_a_number_and_tensors_of_one_seed_are_the_same(eager, name):
    draw, _ = drawing(name)
    wanted = draw(seed=-2, offset=7)
    assert torch.equal(draw(seed=2**64 - 2, offset=7), wanted)
    for dtype in (torch.int64, torch.uint64):
        words = torch.tensor([-2]).view(dtype), torch.tensor([7]).view(dtype)
        assert torch.equal(draw(seed=words[0], offset=words[1]), wanted)
    assert wanted.dtype == torch.int32


def test_of_one_seed_the_row_matters_and_of_seeds_by_row_it_does_not(eager):
    same_rows, order = PROBS[:1].expand(64, V).contiguous(), torch.arange(64).flip(0)
    of_one = flashinfer.sampling_from_probs(same_rows, seed=3, offset=0)
    assert len(set(of_one.tolist())) > 3
    seeds, offsets = torch.arange(64) * 977, torch.arange(64)
    by_row = flashinfer.sampling_from_probs(same_rows, seed=seeds, offset=offsets)
    turned = flashinfer.sampling_from_probs(same_rows, seed=seeds[order], offset=offsets[order])
    assert torch.equal(turned, by_row[order])
    alone = [
        flashinfer.sampling_from_probs(same_rows[:1], seed=seeds[n : n + 1], offset=offsets[n : n + 1])
        for n in range(9)
    ]
    assert torch.equal(torch.cat(alone), by_row[:9])


def test_parameters_by_row_are_those_of_each_row(eager):
    k, p = torch.tensor([1, 2, 5, 12], dtype=torch.int32), torch.tensor([1.0, 0.5, 0.9, 0.3])
    tokens = flashinfer.top_k_top_p_sampling_from_logits(LOGITS, k, p, seed=5, offset=0)
    for n in range(ROWS):
        alike = flashinfer.top_k_top_p_sampling_from_logits(LOGITS, int(k[n]), float(p[n]), seed=5, offset=0)
        assert tokens[n] == alike[n]


def test_the_order_of_filters_is_the_base_of_top_p(eager):
    index = torch.arange(20_000) % ROWS
    for order, base in (("top_k_first", "top_k"), ("joint", "all")):
        law = law_of(LOGITS, top_k=4, top_p=0.8, top_p_base=base, backend="eager")
        for draw, values in (
            (flashinfer.top_k_top_p_sampling_from_logits, LOGITS),
            (flashinfer.top_k_top_p_sampling_from_probs, PROBS),
        ):
            drawn = draw(values, 4, 0.8, index, order, seed=1, offset=0)
            seen = torch.zeros(ROWS, V).index_put_((index, drawn), torch.tensor(1.0))
            assert torch.equal(seen > 0, law > 0.001)
    laws = [law_of(LOGITS, top_k=4, top_p=0.8, top_p_base=base, backend="eager") for base in ("top_k", "all")]
    assert not torch.equal(*laws)


def test_rows_without_a_distribution_are_not_valid(eager):
    rows = torch.cat([PROBS[:1], torch.zeros(1, V), torch.full((1, V), math.nan)])
    for name, (given, _) in CASES.items():
        if name.endswith("probs"):
            tokens, valid = getattr(flashinfer, name)(rows, *given, seed=1, offset=0, return_valid=True)
            assert valid.tolist() == [True, False, False]
            assert (tokens >= 0).tolist() == [True, False, False]


def test_a_generator_gives_the_seed_where_there_is_none(eager):
    draws = [flashinfer.sampling_from_probs(PROBS, generator=torch.Generator().manual_seed(4)) for _ in range(2)]
    assert torch.equal(*draws)
    torch.manual_seed(4)
    first, second = (flashinfer.sampling_from_probs(PROBS.repeat(9, 1)) for _ in range(2))
    assert torch.equal(first[:ROWS], draws[0])
    assert not torch.equal(first, second)


@pytest.mark.full
def test_compiled_tokens_are_those_of_eager_torch():
    options = {"seed": 2, "offset": 5}
    compiled = flashinfer.top_k_top_p_sampling_from_probs(PROBS, 5, 0.8, **options)
    seeds, positions = flashinfer.noise_of(2, 5, None, ROWS, PROBS.device, call)
    wanted = sample(
        base_2_logits(PROBS),
        temperature=math.log2(math.e),
        top_k=5,
        top_p=0.8,
        seeds=seeds,
        positions=positions,
        backend="eager",
    )
    assert torch.equal(compiled, wanted.token_ids.to(torch.int32))


def test_softmax_is_that_of_torch(eager):
    heat = torch.tensor([0.5, 1.0, 2.0, 0.0])
    made = flashinfer.softmax(LOGITS, heat)
    assert torch.allclose(made[:3], torch.softmax(LOGITS[:3] / heat[:3, None], -1), atol=2e-7)
    assert torch.equal(made[3], torch.nn.functional.one_hot(LOGITS[3].argmax(), V).float())
    assert torch.equal(flashinfer.softmax(LOGITS), flashinfer.softmax(LOGITS, 1.0))


WRONG: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("softmax", {"enable_pdl": True}, ValueError, "enable_pdl must be None, got True"),
    ("softmax", {"enable_pdl": False}, ValueError, "enable_pdl must be None, got False"),
    (
        "top_k_top_p_sampling_from_probs",
        {"filter_apply_order": "top_p_first"},
        ValueError,
        "filter_apply_order must be",
    ),
    ("top_k_top_p_sampling_from_logits", {"filter_apply_order": "x"}, ValueError, "filter_apply_order must be one of"),
]
for _name in CASES:
    WRONG += [
        (_name, {"seed": 1}, ValueError, "seed and offset must come together, got 1 and None"),
        (_name, {"offset": 1}, ValueError, "seed and offset must come together"),
        (_name, {"seed": 1, "offset": torch.tensor([1])}, ValueError, "seed and offset must both be tensors or both"),
        (_name, {"seed": 1, "offset": -1}, ValueError, r"offset must be below 2\*\*63, got -1"),
        (_name, {"seed": 2**64, "offset": 1}, ValueError, r"seed must be below 2\*\*64, got 18446744073709551616"),
        (_name, {"seed": 1.0, "offset": 1}, TypeError, "seed must be an int, got 1.0"),
        (
            _name,
            {"seed": torch.zeros(3, dtype=torch.int64), "offset": torch.zeros(1, dtype=torch.int64)},
            ValueError,
            r"seed must be \[1\] or \[4\], got \[3\]",
        ),
        (
            _name,
            {"seed": torch.zeros(1), "offset": torch.zeros(1)},
            TypeError,
            "seed must be torch.int64 or torch.uint64",
        ),
        (_name, {"generator": 3}, TypeError, "generator must be a torch.Generator of the CPU, got 3"),
        (
            _name,
            {"generator": torch.Generator(), "seed": 1, "offset": 0},
            ValueError,
            "generator must be None beside a",
        ),
        (_name, {"indices": torch.zeros(2)}, TypeError, "indices must be torch.int64 or torch.int32"),
        (_name, {"indices": torch.tensor([0, 4])}, ValueError, r"indices must be in \[0, 4\), the rows .*, got 4"),
        (_name, {"indices": torch.tensor([-1, 0])}, ValueError, r"indices must be in \[0, 4\), the rows .*, got -1"),
        (_name, {"indices": torch.zeros(2, 1).int()}, ValueError, r"indices must be \[B\].*, got \[2, 1\]"),
    ]


@pytest.mark.parametrize(("name", "options", "error", "message"), WRONG)
def test_what_has_no_meaning_raises_by_its_name(eager, name, options, error, message):
    function = functools.partial(flashinfer.softmax, LOGITS) if name == "softmax" else drawing(name)[0]
    with pytest.raises(error, match=message):
        function(**options)


@pytest.mark.parametrize("name", CASES)
def test_a_nan_raises_where_the_caller_asks(eager, name):
    values = (LOGITS if name.endswith("logits") else PROBS).clone()
    function = functools.partial(getattr(flashinfer, name), values, *CASES[name][0], seed=1, offset=0)
    wanted = function()
    assert torch.equal(function(check_nan=True), wanted)
    values[1, 2] = math.nan
    assert (function() >= 0).all()
    with pytest.raises(ValueError, match="must hold no NaN where check_nan is True"):
        function(check_nan=True)
