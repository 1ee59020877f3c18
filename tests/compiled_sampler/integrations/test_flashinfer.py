"""The functions of ``flashinfer.sampling``: what they draw and verify, by which law, and what raises."""

import functools
import inspect
import math

import pytest
import torch

from compiled_sampler.core.noise import philox_4x32_10
from compiled_sampler.core.stage import call
from compiled_sampler.functional import probs as law_of
from compiled_sampler.functional import sample, verify_from_probs
from compiled_sampler.integrations import flashinfer
from compiled_sampler.integrations.flashinfer import noise_of
from compiled_sampler.passes.probability_rows import base_2_logits, seeds_of_rows
from tests.oracles.goodness_of_fit import accept, chi_square, detects, independence

V, ROWS, DRAWS = 12, 4, 16_000
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

CASES = {
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
def eager(monkeypatch):
    """The functions run eager torch."""
    monkeypatch.setattr(flashinfer, "run_of", lambda backend: call)
    for name in ("sample", "probabilities", "verify_from_probs"):
        monkeypatch.setattr(flashinfer, name, functools.partial(getattr(flashinfer, name), backend="eager"))


def drawing(name):
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
    def drawn(seed, offset):
        rows = PROBS[:1].expand(64 if isinstance(seed, int) else len(seed), V).contiguous()
        return flashinfer.sampling_from_probs(rows, seed=seed, offset=offset)

    assert len(set(drawn(3, 0).tolist())) > 3
    seeds, offsets, order = torch.arange(64) * 977, torch.arange(64), torch.arange(64).flip(0)
    by_row = drawn(seeds, offsets)
    assert torch.equal(drawn(seeds[order], offsets[order]), by_row[order])
    assert [drawn(seeds[n : n + 1], offsets[n : n + 1]).item() for n in range(9)] == by_row[:9].tolist()


def test_parameters_by_row_are_those_of_each_row(eager):
    k, p = torch.tensor([1, 2, 5, 12], dtype=torch.int32), torch.tensor([1.0, 0.5, 0.9, 0.3])
    tokens = flashinfer.top_k_top_p_sampling_from_logits(LOGITS, k, p, seed=5, offset=0)
    for n in range(ROWS):
        alike = flashinfer.top_k_top_p_sampling_from_logits(LOGITS, int(k[n]), float(p[n]), seed=5, offset=0)
        assert tokens[n] == alike[n]


def test_the_order_of_filters_is_the_base_of_top_p(eager):
    index = torch.arange(DRAWS) % ROWS
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
    compiled = flashinfer.top_k_top_p_sampling_from_probs(PROBS, 5, 0.8, seed=2, offset=5)
    seeds, positions = flashinfer.noise_of(2, 5, None, ROWS, PROBS.device, call)
    law = {"temperature": math.log2(math.e), "top_k": 5, "top_p": 0.8}
    wanted = sample(base_2_logits(PROBS), **law, seeds=seeds, positions=positions, backend="eager")
    assert torch.equal(compiled, wanted.token_ids.to(torch.int32))


def test_softmax_is_that_of_torch(eager):
    heat = torch.tensor([0.5, 1.0, 2.0, 0.0])
    made = flashinfer.softmax(LOGITS, heat)
    assert torch.allclose(made[:3], torch.softmax(LOGITS[:3] / heat[:3, None], -1), atol=2e-7)
    assert torch.equal(made[3], torch.nn.functional.one_hot(LOGITS[3].argmax(), V).float())
    assert torch.equal(flashinfer.softmax(LOGITS), flashinfer.softmax(LOGITS, 1.0))


NO_SEEDS, ONE_SEED = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
WRONG = [
    ({"seed": 1}, ValueError, "seed and offset must come together, got 1 and None"),
    ({"offset": 1}, ValueError, "seed and offset must come together"),
    ({"seed": 1, "offset": torch.tensor([1])}, ValueError, "seed and offset must both be tensors or both"),
    ({"seed": 1, "offset": -1}, ValueError, r"offset must be below 2\*\*63, got -1"),
    ({"seed": 2**64, "offset": 1}, ValueError, r"seed must be below 2\*\*64, got 18446744073709551616"),
    ({"seed": 1.0, "offset": 1}, TypeError, "seed must be an int, got 1.0"),
    ({"seed": ONE_SEED.repeat(3), "offset": ONE_SEED}, ValueError, r"seed must be \[1\] or \[4\], got \[3\]"),
    ({"seed": NO_SEEDS, "offset": NO_SEEDS}, TypeError, "seed must be torch.int64 or torch.uint64"),
    ({"generator": 3}, TypeError, "generator must be a torch.Generator of the CPU, got 3"),
    ({"generator": torch.Generator(), "seed": 1, "offset": 0}, ValueError, "generator must be None beside a"),
    ({"indices": torch.zeros(2)}, TypeError, "indices must be torch.int64 or torch.int32"),
    ({"indices": torch.tensor([0, 4])}, ValueError, r"indices must be in \[0, 4\), the rows .*, got 4"),
    ({"indices": torch.tensor([-1, 0])}, ValueError, r"indices must be in \[0, 4\), the rows .*, got -1"),
    ({"indices": torch.zeros(2, 1).int()}, ValueError, r"indices must be \[B\].*, got \[2, 1\]"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_what_has_no_meaning_raises_by_its_name_in_every_function(eager, options, error, message):
    for name in CASES:
        with pytest.raises(error, match=message):
            drawing(name)[0](**options)


def test_choices_that_ours_does_not_have_and_drafts_that_are_not_by_request_are_refused(eager):
    for is_enabled in (True, False):
        with pytest.raises(ValueError, match=f"enable_pdl must be None, got {is_enabled}"):
            flashinfer.softmax(LOGITS, enable_pdl=is_enabled)
    for name in ("top_k_top_p_sampling_from_probs", "top_k_top_p_sampling_from_logits"):
        with pytest.raises(ValueError, match="filter_apply_order must be one of"):
            drawing(name)[0](filter_apply_order="top_p_first")
    drafts = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must have a row \[V\] for each request and place, got \[4, 12\]"):
        flashinfer.chain_speculative_sampling(PROBS, drafts, PROBS[None], seed=1, offset=0)


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


def rows(*tokens):
    """Rows that hold one token each, ``[1, n, 1000]``."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), 1000).float()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("wanted", "tokens", "accepted", "emitted"),
    [((100, 200, 777), [100, 200, 777], 2, 2), ((5, 200, 777), [5, -1, -1], 1, 0), ((100, 3, 777), [100, 3, -1], 1, 1)],
    ids=["the bonus token is not emitted there", "a match behind a rejection is accepted there", "rejected"],
)
def test_counts_of_drafts_are_those_of_flashinfer_and_are_added_to_what_is_given(
    eager, wanted, tokens, accepted, emitted, dtype
):
    drafts, target = torch.tensor([[100, 200]], dtype=dtype), rows(*wanted)
    totals = torch.tensor([10], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    for given, before in (((), (0, 0)), (totals, (10, 20))):
        made = flashinfer.chain_speculative_sampling(rows(100, 200), drafts, target, *given, seed=1, offset=0)
        assert (made[0].tolist(), made[0].dtype) == ([tokens], dtype)
        assert [each.item() for each in made[1:]] == [accepted + before[0], emitted + before[1]]
        assert {each.dtype for each in made[1:]} == {torch.int32}
    assert (made[1] is totals[0], made[2] is totals[1]) == (True, True)
    ours = verify_from_probs(target[0], drafts, seeds=1, positions=0, rule="rejection", backend="eager")
    counts = ours.num_emitted, ours.num_accepted, ours.num_matching
    assert [each.item() for each in counts] == [emitted + 1, emitted, accepted]


def test_the_first_token_has_the_law_of_the_target(eager, generator):
    count, width = 10_000, 2
    target, draft = (torch.softmax(torch.randn(width + 1, V, generator=generator), -1) for _ in range(2))
    drafts = torch.multinomial(draft[:width], count, replacement=True, generator=generator).T.contiguous()
    given = draft[:width].expand(count, width, V).contiguous(), drafts, target.expand(count, width + 1, V).contiguous()
    tokens, _, emitted = flashinfer.chain_speculative_sampling(*given, seed=3, offset=8)
    counts = torch.bincount(tokens[:, 0], minlength=V)
    accept(chi_square(counts, target[0]))
    detects(chi_square(counts, draft[0]))
    last = tokens[emitted == width][:, width]
    accept(chi_square(torch.bincount(last, minlength=V), target[width]))
    seeds, positions = noise_of(3, 8, None, count, target.device, call)
    flat = {"draft_probs": given[0].flatten(0, 1), "rule": "rejection", "backend": "eager"}
    ours = verify_from_probs(given[2].flatten(0, 1), drafts, seeds=seeds, positions=positions, **flat)
    assert torch.equal(ours.token_ids, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_top_k_keeps_exactly_so_many_and_of_equals_the_lowest_ids(eager, dtype):
    values = torch.tensor([[0.1, 0.3, 0.3, 0.2, 0.1], [0.2, 0.2, 0.2, 0.2, 0.2], [0.0, 0.0, 1.0, 0.0, 0.0]]).to(dtype)
    kept = [[1, 2, 3], [0, 1, 2], [2]]
    made = flashinfer.top_k_renorm_probs(values, 3)
    assert made.dtype == dtype
    assert [row.nonzero().flatten().tolist() for row in made] == kept
    held = torch.stack([torch.isin(torch.arange(5), torch.tensor(ids)) for ids in kept])
    wanted = torch.where(held, values.float(), 0.0)
    assert torch.allclose(made.float(), wanted / wanted.sum(-1, keepdim=True), atol=torch.finfo(dtype).eps)
    masked = flashinfer.top_k_mask_logits(values, torch.tensor([3, 0, 1]))
    assert masked.dtype == dtype
    assert [(row > -torch.inf).nonzero().flatten().tolist() for row in masked] == [[1, 2, 3], [0, 1, 2, 3, 4], [2]]
    assert torch.equal(masked[masked > -torch.inf], values[masked > -torch.inf])


def test_top_p_keeps_the_shortest_prefix_that_holds_the_share(eager):
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]])
    made = flashinfer.top_p_renorm_probs(probs, torch.tensor([0.69, 0.51, 0.1]))
    wanted = torch.tensor([[0.0, 4 / 7, 3 / 7, 0.0], [1 / 3, 1 / 3, 1 / 3, 0.0], [0.0, 1.0, 0.0, 0.0]])
    assert torch.allclose(made, wanted, atol=1e-7)
    assert torch.allclose(flashinfer.top_p_renorm_probs(probs, 1.0, is_deterministic=True), probs, atol=1e-7)


def test_rows_out_of_range_keep_nothing(eager):
    probs = torch.full((3, 4), 0.25)
    assert flashinfer.top_k_renorm_probs(probs, torch.tensor([-1, 2, 4])).count_nonzero(-1).tolist() == [0, 2, 4]
    assert flashinfer.top_p_renorm_probs(probs, torch.tensor([0.0, 1.5, torch.nan])).count_nonzero().item() == 0
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got"):
            flashinfer.top_p_renorm_probs(probs, wrong)
    with pytest.raises(ValueError, match=r"top_k must be in \[0, 2\*\*63\), got -1"):
        flashinfer.top_k_renorm_probs(probs, -1)


def test_logarithms_are_rounded_once_and_keep_the_order(generator):
    p = torch.rand(1, 100_000, generator=generator).pow(4).sort(-1).values
    logits = base_2_logits(p)
    assert (logits.diff() >= 0).all()
    wanted = [math.log2(x) if x else -math.inf for x in p[0].tolist()]
    assert torch.equal(logits[0], torch.tensor(wanted, dtype=torch.float64).to(torch.float32))
    odd = torch.tensor([[0.0, -0.0, -1.0, -math.inf, math.inf, 1.0, 2.0**-149, 8.0, math.nan, -math.nan]])
    assert base_2_logits(odd)[0, :8].tolist() == [-math.inf] * 4 + [math.inf, 0.0, -149.0, 3.0]
    assert base_2_logits(odd)[0, 8:].isnan().all()


def test_a_renormalised_row_is_a_shortest_prefix_sums_to_one_and_keeps_the_ratios_of_small_ones(eager, generator):
    p, share = torch.softmax(4 * torch.randn(50, 3000, generator=generator), -1), torch.rand(50, generator=generator)
    made, p = flashinfer.top_p_renorm_probs(p, share).double(), p.double()
    keep = made > 0.0
    inside, least = torch.where(keep, p, 0.0), torch.where(keep, p, 2.0).amin(-1)
    assert (inside.sum(-1) >= share * p.sum(-1) - 1e-9).all()
    assert (inside.sum(-1) - least <= share * p.sum(-1) + 1e-9).all()
    assert (torch.where(keep, 0.0, p).amax(-1) <= least).all()
    assert torch.allclose(made.sum(-1), torch.ones(50, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(made, inside / inside.sum(-1, keepdim=True), rtol=1e-6, atol=0.0)


def test_seeds_of_rows_are_words_of_philox_and_differ():
    rows, seed = torch.tensor([0, 1, 2, 2**40]), torch.tensor([-5])
    key = tuple(word.expand(4) for word in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    counter = (rows & 0xFFFFFFFF, rows >> 32, torch.zeros(4, dtype=torch.int64), torch.full((4,), 0x73656564))
    low, high, *_ = philox_4x32_10(counter, key)
    words = [(h * 2**32 + x + 2**63) % 2**64 - 2**63 for h, x in zip(high.tolist(), low.tolist(), strict=True)]
    assert seeds_of_rows(seed, rows).tolist() == words
    many = torch.cat([seeds_of_rows(torch.tensor([s]), torch.arange(2000)) for s in range(50)])
    assert len(set(many.tolist())) == 100_000
