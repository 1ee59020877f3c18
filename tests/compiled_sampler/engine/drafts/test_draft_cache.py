"""The draft cache: handles that hold no logits verify with the same bits, as long as the cache holds their drafts."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import Draft, Plan, Sampler, SamplingParams, Verification, VerifyOutputs
from compiled_sampler.engine.drafts import DraftCache
from tests.builders.sampler import REQUESTS, SHARED_SLOTS, V, planned, replay_recordings, same, sampler_with
from tests.tiers import tiers
from tests.torch_states import Operations

K, S = 3, 6
LAWFUL = ("rejection", "block")
MODES = ("no_filter", "min_p", "top_k_top_p[64]", "top_k", "full")
COUNTS = [[3, 2, 0, 1, 3], [3] * 5, [1, 0, 0, 0, 0], [0] * 5]
SLOTS = [4, -1, 0, 2, 1]


def sampler_of(mode: str, cached: bool, backend: str = "eager", dtype: torch.dtype = torch.float32) -> Sampler:
    """Holds five requests that the mode is the cheapest for, one of them greedy."""
    slots = SHARED_SLOTS if backend == "compiled" else S
    params = [replace(REQUESTS["greedy" if seed == 2 else mode], seed=seed) for seed in range(5)]
    return sampler_with(params, V, slots, backend=backend, logits_dtype=dtype, draft_cache_len=K if cached else 0)


def rows_of(counts: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits of drafts ``[K, N, V]``, and near ones of the target ``[R, V]``, so that some drafts are accepted."""
    source = torch.Generator().manual_seed(seed)
    drafts = 3.0 * torch.randn(K, len(counts), V, generator=source)
    rows = [torch.cat([drafts[:count, n], torch.randn(1, V, generator=source)]) for n, count in enumerate(counts)]
    target = torch.cat(rows)
    return drafts.to(dtype), (target + 0.5 * torch.randn(target.shape, generator=source)).to(dtype)


def drafted(sampler: Sampler, plan: Plan, drafts: Tensor, order: Sequence[int] = range(K)) -> list[Draft]:
    """The handles of a block, drawn in the given order of offsets."""
    where = torch.arange(len(plan.slots))
    found = {j: sampler.draft(plan, drafts[j], where + j, coupled=False, offset=j) for j in order}
    return [found[j] for j in range(K)]


def verified(
    sampler: Sampler, rule: str, counts: Sequence[int], seed: int = 0, slots: Sequence[int] = SLOTS, **given: str
) -> VerifyOutputs:
    plan = sampler.plan(slots, num_drafts=counts, **given)
    drafts, target = rows_of(counts, seed, sampler.logits_dtype)
    handles = drafted(sampler, plan, drafts, order=(1, 0, 2))
    return sampler.verify(plan, target, handles, torch.arange(len(slots)), rule)


@pytest.mark.parametrize(
    ("mode", "backend", "dtype"),
    tiers(
        [*((mode, "eager", torch.float32) for mode in MODES), ("min_p", "reference", torch.bfloat16)],
        [
            *itertools.product(MODES, ("eager", "reference"), (torch.float32, torch.bfloat16)),
            *((mode, "compiled", torch.float32) for mode in ("min_p", "top_k_top_p[64]")),
        ],
    ),
    ids=str,
)
def test_cached_handles_have_the_bits_of_handles_that_hold_their_logits(mode, backend, dtype):
    held, cached = sampler_of(mode, False, "eager", dtype), sampler_of(mode, True, backend, dtype)
    accepted = 0
    for rule in LAWFUL:
        for seed, counts in enumerate(COUNTS[:1] if backend == "reference" else COUNTS):
            wanted = verified(held, rule, counts, seed)
            assert same(verified(cached, rule, counts, seed), wanted)
            accepted += int(wanted.accepted.sum())
    assert accepted


def test_a_cached_handle_holds_no_logits():
    drafts, _ = rows_of([K] * 5, 0)
    for cached in (True, False):
        sampler = sampler_of("no_filter", cached)
        for handle in drafted(sampler, sampler.plan(SLOTS), drafts):
            assert ((handle.logits is None), handle.is_coupled) == (cached, False)
        assert sampler.statistics().draft_cache_bytes == cached * (S + 1) * K * V * 4
    assert sampler_of("no_filter", True, dtype=torch.bfloat16).statistics().draft_cache_bytes == (S + 1) * K * V * 2


def test_no_logits_are_cloned_stacked_or_brought_into_order():
    counts, names = [3, 2, 0, 1, 3], list[str]()
    drafts, target = rows_of(counts, 0)

    def see(function: Any, given: Any, made: Any) -> None:
        if function._schema.name in ("aten::clone", "aten::stack", "aten::cat") and made.numel() >= V:
            names.append(function._schema.name)

    for cached, wanted in ((True, []), (False, [*["aten::clone"] * K, "aten::stack"])):
        sampler = sampler_of("no_filter", cached)
        plan = sampler.plan(SLOTS, num_drafts=counts)
        names.clear()
        with Operations(see):
            handles = drafted(sampler, plan, drafts)
            sampler.verify(plan, target, handles, torch.arange(5), "rejection")
        assert [name for name in names if name in wanted or cached] == wanted


@pytest.mark.parametrize(("mode", "rule"), [("no_filter", "rejection"), ("top_k_top_p[64]", "block")])
def test_what_is_read_is_the_cache(mode, rule, monkeypatch):
    wanted = verified(sampler_of(mode, True), rule, [3] * 5)
    write = DraftCache.write

    def other(cache: DraftCache, logits: Tensor, *given: object) -> None:
        write(cache, logits.flip(1), *given)

    monkeypatch.setattr(DraftCache, "write", other)
    assert not same(verified(sampler_of(mode, True), rule, [3] * 5), wanted)


def test_padding_and_other_slots_leave_a_place_as_it_is():
    sampler = sampler_of("no_filter", True)
    drafts, target = rows_of([K, K], 0)
    plan = sampler.plan([0, 1], num_drafts=[K, K])
    handles = drafted(sampler, plan, drafts)
    wanted = sampler.verify(plan, target, handles, torch.arange(2), "block")
    others, _ = rows_of([K] * 4, 1)
    drafted(sampler, sampler.plan([-1, 3, -1, 4]), others)
    assert same(sampler.verify(plan, target, handles, torch.arange(2), "block"), wanted)


def test_a_draft_that_gave_way_to_a_later_one_is_refused():
    sampler = sampler_of("no_filter", True)
    drafts, target = rows_of([2, K], 0)
    plan, where = sampler.plan([0, 1], num_drafts=[2, K]), torch.arange(2)
    handles = drafted(sampler, plan, drafts)
    sampler.draft(sampler.plan([0]), drafts[2, :1], where[:1], coupled=False, offset=2)  # request 0 verifies 2 alone
    sampler.draft(sampler.plan([1]), drafts[2, 1:], where[:1], coupled=True, offset=1)  # coupled: not in the cache
    assert len(sampler.verify(plan, target, handles, where, "block").token_ids) == 2
    sampler.draft(sampler.plan([1]), drafts[2, 1:], where[:1], coupled=False, offset=1)
    with pytest.raises(ValueError, match=r"that of request 1 \(slot 1\) at offset 1 gave way"):
        sampler.verify(plan, target, handles, where, "block")
    assert len(sampler.verify(plan, target, handles, where, "match").token_ids) == 2  # which reads no logits


def test_a_slot_of_another_request_is_refused_and_serves_that_one():
    samplers = [sampler_of("min_p", cached) for cached in (True, False)]
    drafts, target = rows_of([K, K], 0)
    for sampler in samplers:
        old = drafted(sampler, sampler.plan([0, 1], num_drafts=[K, K]), drafts)
        sampler.remove_request(1)
        assert sampler.add_request(SamplingParams(seed=9, top_k=7)) == 1
        with pytest.raises(ValueError, match="requests that are gone"):
            sampler.verify(sampler.plan([0, 1], num_drafts=[K, K]), target, old, torch.arange(2), "block")
    assert same(*(verified(sampler, "block", [K, 1], 3, [1, 0]) for sampler in samplers))


def test_a_warm_up_ends_what_the_cache_holds():
    sampler, plan = planned(SamplingParams(seed=1), num_drafts=[1], draft_cache_len=1)
    handle = sampler.draft(plan, torch.randn(1, V), torch.zeros(1, dtype=torch.int64), coupled=False)
    sampler.warmup()
    with pytest.raises(ValueError, match=r"or to warmup\(\)"):
        sampler.verify(plan, torch.randn(2, V), [handle], torch.zeros(1, dtype=torch.int64), "rejection")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda sampler, draft: draft([0], offset=K), r"offset of an uncoupled draft must be in \[0, draft_cache"),
        (lambda sampler, draft: draft([0, -1, 0]), "slots of an uncoupled draft must differ"),
        (lambda sampler, draft: Sampler(V, 1, draft_cache_len=-1), r"draft_cache_len must be in \[0, 64\], got -1"),
        (lambda sampler, draft: Sampler(V, 1, verifications=[Verification("block", 1, "cache")]), "without a cache"),
    ],
)
def test_what_a_cache_cannot_hold_is_refused(made: Callable[[Sampler, Callable[..., Draft]], object], words):
    sampler = sampler_of("no_filter", True)

    def draft(slots: list[int], offset: int = 0, coupled: bool = False) -> Draft:
        where = torch.zeros(len(slots), dtype=torch.int64)
        return sampler.draft(sampler.plan(slots), torch.zeros(len(slots), V), where, coupled, offset)

    assert draft([0, 0], K, coupled=True).is_coupled  # which the cache has no part in
    assert not draft([0, -1, -1]).is_coupled
    with pytest.raises(ValueError, match=words):
        made(sampler, draft)


@pytest.mark.parametrize(("mode", "rule"), [("min_p", "rejection"), ("full", "block")])
def test_captured_steps_write_and_read_the_slots_of_each_batch(mode, rule):
    ways = [Verification(rule, K, "cache")]
    params = [replace(REQUESTS[mode], seed=seed) for seed in range(5)]
    sampler, held = (
        sampler_with(params, V, S, buckets=[2, 8], verifications=ways, draft_cache_len=K),
        sampler_with(params),
    )
    backend = replay_recordings(sampler)
    sampler.warmup(modes=[mode])
    captures = backend.num_captures
    for seed, slots in enumerate(([4, -1, 0, 2, 1], [0, 1, 2, 3, 4], [3, 1], [2])):
        counts = [(seed + n) % (K + 1) for n in range(len(slots))]
        before = backend.num_replays
        found = verified(sampler, rule, counts, seed, slots, mode=mode)
        assert backend.num_replays - before == K + 1
        assert same(found, verified(held, rule, counts, seed, slots, mode=mode))
    assert backend.num_captures == captures


def test_where_a_buffer_names_the_slots_any_later_draft_ends_what_the_cache_holds():
    sampler = sampler_of("no_filter", True)
    drafts, target = rows_of([K], 0)
    where, buffer = torch.zeros(1, dtype=torch.int64), torch.tensor([1])
    plan = replace(sampler.plan([0], num_drafts=[K]), slot_ids=buffer)
    handles = drafted(sampler, plan, drafts)
    held = sampler_of("no_filter", False)
    other = replace(held.plan([0], num_drafts=[K]), slot_ids=buffer)
    wanted = held.verify(other, target, drafted(held, other, drafts), where, "rejection")
    assert same(sampler.verify(plan, target, handles, where, "rejection"), wanted)
    with pytest.raises(ValueError, match="slot_ids of the plan must be the buffer that the drafts were made with"):
        sampler.verify(sampler.plan([0], num_drafts=[K]), target, handles, where, "rejection")
    sampler.draft(sampler.plan([1]), -5.0 * drafts[0], where, coupled=False)
    with pytest.raises(ValueError, match="at offset 0 gave way to a later draft"):
        sampler.verify(plan, target, handles, where, "rejection")


def test_a_cache_made_in_inference_mode_is_written_outside_of_it():
    with torch.inference_mode():
        sampler = sampler_of("no_filter", True)
    assert same(
        verified(sampler, "rejection", [1, 2, 0, 3, 1]),
        verified(sampler_of("no_filter", False), "rejection", [1, 2, 0, 3, 1]),
    )
