"""The benchmark of edits that users write: both ways draw the same tokens, and wrong ones end the run."""

import pytest
import torch

from compiled_sampler import Sampler
from tools.bench import custom_edits
from tools.bench.batches import WrongAnswer

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", custom_edits.edits_of(1))
def test_each_edit_is_timed_in_the_sampler_and_before_it(name):
    found = custom_edits.custom_us(name, "greedy", 9, CPU, torch.float32, 300)
    assert {*found} == {"plain", "edit", "before"}
    assert min(found.values()) > 0.0


def test_a_wrong_token_ends_the_run(monkeypatch):
    drawn = Sampler.sample

    def shifted(sampler, *args, **options):
        made = drawn(sampler, *args, **options)
        return made._replace(token_ids=made.token_ids + (sampler.backend == "compiled"))

    monkeypatch.setattr(Sampler, "sample", shifted)
    with pytest.raises(WrongAnswer, match="guidance, edit"):
        custom_edits.custom_us("guidance", "greedy", 9, CPU, torch.float32, 300)
