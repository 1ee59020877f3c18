"""A thread's denormal mode (``torch.set_flush_denormal``) changes no token, no law and no status, on any backend.

What it may still change stands in ``docs/limits.md``: ``min_p`` 1, and races of tokens without noise.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams
from compiled_sampler.modes import RULES
from tests.builders.sampler import V, held, same, shared_sampler
from tests.oracles import oracle
from tests.tiers import tiers
from tests.torch_states import flushing

N, WIDTH = 8, 2
BACKENDS = ["eager", "compiled", "reference"]
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "denormals": lambda bits: bits,
    "few denormals and both zeros": lambda bits: torch.where(bits % 3 > 0, bits & 0x80000003 - 2**32, bits & -(2**31)),
    "neighbours of the least normal": lambda bits: (bits & 0x80000007 - 2**32) + 0x007FFFFC,
    "beside a normal number": lambda bits: torch.where(bits % 31 == 0, (bits & -(2**31)) + 0x00800000, bits),
}
"""Rows from random bits of denormals of either sign."""

BATCHES = {
    "greedy": [SamplingParams(temperature=0.0, seed=1)],
    "greedy beside others": [SamplingParams(temperature=0.0, seed=1), SamplingParams(seed=2)],
    "greedy beside min_p": [SamplingParams(top_k=1, seed=1), SamplingParams(min_p=0.5, seed=2)],
    "min_p": [SamplingParams(min_p=1.0 - 2.0**-53, seed=3), SamplingParams(min_p=0.999, temperature=1e-5, seed=3)],
    "top_k": [SamplingParams(top_k=2, seed=4), SamplingParams(top_k=90, temperature=1e-5, seed=5)],
    "few candidates": [SamplingParams(top_k=2, top_p=0.7, seed=6), SamplingParams(top_k=20, top_p=0.4, seed=7)],
    "top_p": [SamplingParams(top_p=0.02, seed=8), SamplingParams(top_p=0.9, temperature=1e30, seed=9)],
    "full": [SamplingParams(top_k=70, top_p=0.6, min_p=0.9, seed=10), SamplingParams(temperature=0.0, seed=11)],
}
VERIFIED = [
    (batch, rule)
    for batch in ("greedy beside others", "greedy beside min_p", "few candidates", "top_p", "full")
    for rule in RULES
]
FIRST_TIER = [
    *((backend, *pair) for backend in ("eager", "reference") for pair in zip(BATCHES, [*KINDS] * 2, strict=True)),
    ("compiled", "greedy beside others", "few denormals and both zeros"),
]


def rows(count: int, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    bits = torch.randint(1, 0x800000, (count, V), generator=generator, dtype=torch.int32)
    bits |= torch.randint(-1, 1, (count, V), generator=generator, dtype=torch.int32) << 31
    x = KINDS[kind](bits).to(torch.int32)
    if dtype == torch.bfloat16:
        return (x >> 16).to(torch.int16).view(dtype)
    return x.view(torch.float32)


def drawn(sampler: Sampler, params: Sequence[SamplingParams], logits: Tensor) -> list[Any]:
    """What ``sample`` and ``probs`` give for the rows, which the requests share."""
    with held(sampler, params) as slots:
        plan = sampler.plan([slots[n % len(slots)] for n in range(len(logits))])
        return [sampler.sample(plan, logits, torch.arange(len(logits))), sampler.probs(plan, logits)]


def verified(sampler: Sampler, params: Sequence[SamplingParams], rule: str, batch: tuple[Tensor, ...]) -> Any:
    """What ``verify`` gives for the logits and drafts of ``N`` requests, and for logits of the drafts if there are."""
    logits, drafts, *proposed = batch
    with held(sampler, params) as slots:
        plan = sampler.plan([slots[n % len(slots)] for n in range(N)], num_drafts=[WIDTH] * N)
        extra = {"draft_logits": proposed[0]} if proposed else {}
        return sampler.verify(plan, logits, drafts, torch.arange(N), rule=rule, **extra)


def drafted() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of ``N`` requests, drafts that stand early in the order of their rows, and logits of the drafts."""
    logits = rows(N * (WIDTH + 1), "few denormals and both zeros")
    first = torch.tensor([oracle.order(row)[n % 3] for n, row in enumerate(logits.tolist())])
    return logits, first.view(N, WIDTH + 1)[:, :WIDTH], logits[: N * WIDTH].roll(1, 0)


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, list):
        return all(equal(*each) for each in zip(left, right, strict=True))
    return torch.equal(left, right) if isinstance(left, Tensor) else same(left, right)


def assert_in_no_mode_different(wanted: Any, run: Callable[[], Any]) -> None:
    """The results are the wanted ones with denormals flushed and kept, in this thread and in another."""

    def moded(flushes: bool) -> Any:
        with flushing(flushes):
            return run()

    for flushes in (True, False):
        assert equal(moded(flushes), wanted)
        with ThreadPoolExecutor(1) as another:
            assert equal(another.submit(moded, flushes).result(), wanted)


@pytest.mark.parametrize(("backend", "batch", "kind"), tiers(FIRST_TIER, itertools.product(BACKENDS, BATCHES, KINDS)))
def test_draws_and_laws_are_the_same_in_any_mode(backend, batch, kind):
    logits = rows(12, kind)
    wanted = drawn(shared_sampler(V, backend="reference"), BATCHES[batch], logits)
    sampler = shared_sampler(V, backend=backend)
    assert_in_no_mode_different(wanted, lambda: drawn(sampler, BATCHES[batch], logits))


@pytest.mark.parametrize("batch", ["greedy", "greedy beside others", "top_k", "top_p"])
def test_denormals_of_16_bits_are_the_same_in_any_mode(batch):
    logits = rows(12, "denormals", torch.bfloat16)
    wanted = drawn(shared_sampler(V, backend="reference"), BATCHES[batch], logits.float())
    sampler = shared_sampler(V, torch.bfloat16, "eager")
    assert_in_no_mode_different(wanted, lambda: drawn(sampler, BATCHES[batch], logits))


@pytest.mark.parametrize(
    ("backend", "batch", "rule"),
    tiers(
        [(backend, *pair) for backend in ("eager", "reference") for pair in VERIFIED[::4]],
        [
            *((backend, *pair) for backend in ("eager", "reference") for pair in VERIFIED),
            *(("compiled", *pair) for pair in (("greedy beside others", "rejection"), ("top_p", "block"))),
        ],
    ),
)
def test_verified_drafts_are_the_same_in_any_mode(backend, batch, rule):
    sampler = shared_sampler(V, backend=backend)
    for given in (2, 3)[: 1 + (rule != "match")]:
        arguments = (BATCHES[batch], rule, drafted()[:given])
        wanted = verified(shared_sampler(V, backend="reference"), *arguments)
        assert_in_no_mode_different(wanted, lambda arguments=arguments: verified(sampler, *arguments))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_takes_the_first_of_the_order_in_any_mode(backend, kind):
    logits = rows(12, kind)
    wanted = [oracle.order(row)[0] for row in logits.tolist()]
    for batch in ("greedy", "greedy beside others"):
        greedy = slice(None, None, len(BATCHES[batch]))
        with flushing():
            found, _ = drawn(shared_sampler(V, backend=backend), BATCHES[batch], logits)
        assert found.token_ids.tolist()[greedy] == wanted[greedy]


@pytest.mark.usefixtures("kept_threads")
@pytest.mark.parametrize("backend", tiers(["eager"], ["eager", "compiled"]))
def test_threads_of_a_pool_need_no_mode(backend):
    logits = rows(512, "denormals")
    wanted = drawn(shared_sampler(V, backend="reference"), BATCHES["greedy beside others"], logits)
    torch.set_num_threads(2)
    with flushing():  # of the calling thread alone: half of the rows are flushed
        sampler = shared_sampler(V, backend=backend)
        assert equal(drawn(sampler, BATCHES["greedy beside others"], logits), wanted)
