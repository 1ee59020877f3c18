"""``top_p_base="all"``: compiled as in eager torch, the same under ``match``, and another law than "top_k".

On a GPU both bases, from few rows to many, which narrow in other ways (``pipeline.schedule``).
"""

import functools

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler, SamplingParams
from tests.builders.sampler import SHARED_SLOTS, V, same

R = 12
PARAMS = {
    "narrow": SamplingParams(temperature=1.1, top_k=20, top_p=0.6, seed=1),
    "wide": SamplingParams(temperature=1.3, top_k=90, top_p=0.7, seed=2),
    "top_p": SamplingParams(temperature=1.5, top_p=0.8, min_p=1e-3, seed=3),
}
MODES = {"narrow": ("top_k_top_p[64]", "full"), "wide": ("full",), "top_p": ("full",)}
ONE_OF_EACH = {
    base: (("eager", base, "cpu"), ("eager", base, "cuda"), ("compiled", base, "cuda")) for base in ("all", "top_k")
}


@functools.cache
def sampler_of(backend: str, base: str = "all", device: str = "cpu", vocab_size: int = V) -> Sampler:
    """Requests in the order of ``PARAMS``, in the first slots."""
    made = Sampler(vocab_size, SHARED_SLOTS, device, backend=backend, top_p_base=base)
    for params in PARAMS.values():
        made.add_request(params)
    return made


def logits_of(rows: int, vocab_size: int = V) -> Tensor:
    return 2.0 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, modes in MODES.items() for mode in modes])
def test_compiled_draws_are_those_of_eager_torch(name, mode):
    slots, positions = [list(PARAMS).index(name)] * R, torch.arange(R)
    eager, compiled = (
        each.sample(each.plan(slots, mode), logits_of(R), positions) for each in map(sampler_of, ("eager", "compiled"))
    )
    assert same(eager, compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("base", ["all", "top_k"])
@pytest.mark.parametrize("vocab_size", [5000, 70_000])
@pytest.mark.parametrize("rows", [1, 16, 40, 300])
def test_on_cuda_few_rows_and_many_are_those_of_the_cpu(rows, vocab_size, base):
    logits, positions = logits_of(rows, vocab_size), torch.arange(rows)
    slots = [row % len(PARAMS) for row in range(rows)]
    cpu, *others = (sampler_of(*kind, vocab_size) for kind in ONE_OF_EACH[base])
    for picked, mode in ((slots, "full"), ([0] * rows, "top_k_top_p[64]")):
        wanted = cpu.sample(cpu.plan(picked, mode), logits, positions)
        for each in others:
            made = each.sample(each.plan(picked, mode), logits.cuda(), positions.cuda())
            assert same(made, wanted)


@pytest.mark.parametrize("name", PARAMS)
def test_match_is_the_plain_stream(name):
    sampler, slot = sampler_of("eager"), list(PARAMS).index(name)
    logits = logits_of(R)
    plain = sampler.sample(sampler.plan([slot] * R), logits, torch.arange(R)).token_ids
    drafts = plain.view(3, 4)[:, :3].clone()
    drafts[1, 1] = (drafts[1, 1] + 1) % V
    plan = sampler.plan([slot] * 3, num_drafts=[3] * 3)
    out = sampler.verify(plan, logits, drafts, torch.tensor([0, 4, 8]))
    assert out.num_emitted.tolist() == [4, 2, 4]
    wanted = plain.view(3, 4).clone()
    wanted[1, 2:] = -1
    assert torch.equal(out.token_ids, wanted)


@pytest.mark.parametrize("name", ["narrow", "wide"])
def test_the_bases_keep_different_tokens(name):
    laws = []
    for base in ("all", "top_k"):
        sampler = sampler_of("eager", base)
        laws.append(sampler.probs(sampler.plan([list(PARAMS).index(name)] * R), logits_of(R)))
    kept = [(law > 0).sum(-1) for law in laws]
    assert (kept[0] >= kept[1]).all()
    assert (kept[0] > kept[1]).any()
