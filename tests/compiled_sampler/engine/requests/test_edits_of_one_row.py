"""Each edit compiled for a single request, where torch takes the number of rows for a constant: as in eager torch."""

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_sampler import Sampler
from tests.builders import custom_edits
from tests.builders.custom_edits import custom_sampler, random_inputs
from tests.builders.edits import OF_EDIT, Request, V, random_mask
from tests.tiers import tiers

PROMPT, OUTPUT = [3, 10, 4, 4, 12, 3, 10], [4, 4, 12, 8, 3, 10, 4]
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
def sampler_of(device: str, backend: str) -> Sampler:
    """With one slot."""
    return custom_sampler(backend, 1, device=device)


def outcomes(sampler: Sampler, request: Request, edit: str) -> dict[str, Any]:
    """What a few steps of the request return as lists; of "all together" also drafts, laws and verified drafts."""
    generator = torch.Generator().manual_seed(5)
    slot, made = request.added(sampler), dict[str, Any]()
    plan, plan_of = sampler.plan([slot]), sampler.plan([slot], num_drafts=[1])

    def there(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.to(sampler.device) for each in tensors)

    for step in range(STEPS):
        logits, where = there(2.0 * torch.randn(1, V, generator=generator), torch.tensor([request.position + step]))
        read = {name: each.to(sampler.device) for name, each in row_of_call(edit).items()}
        given = {"edit_inputs": read} if edit in custom_edits.EDITS else read
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


def row_of_call(edit: str) -> dict[str, Tensor]:
    """What the edit reads of a call, of one row."""
    if edit == "token_bitmask":
        return {edit: random_mask(random.Random(1), 1, V)}
    names = custom_edits.EDITS[edit].inputs if edit in custom_edits.EDITS else ()
    return {name: each for name, each in random_inputs(1, 2).items() if name in names}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("edit", tiers(["penalties", "Stepped", "token_bitmask"], CASES))
def test_an_edit_of_one_row_compiled_is_that_of_eager_torch(edit, device):
    """The control: without the edit, eager torch returns something else."""
    request = Request({**LAW, **CASES[edit]}, PROMPT, OUTPUT)
    wanted = outcomes(sampler_of("cpu", "eager"), request, edit)
    assert outcomes(sampler_of(device, "compiled"), request, edit) == wanted
    assert outcomes(sampler_of("cpu", "eager"), request._replace(given=LAW), "") != wanted
