"""Whether tensors are laid out alike: by guards of a torch that is known, and by public functions on any other."""

import pytest
import torch

from compiled_sampler.lowering.inductor import layout_guards
from compiled_sampler.lowering.inductor.layout_guards import alike

X = torch.arange(8.0)
OTHERS = {
    "shorter": X[:4],
    "strided": torch.arange(16.0)[::2],
    "in two dimensions": X.view(2, 4),
    "transposed": torch.arange(8.0).view(4, 2).t(),
    "another dtype": X.view(torch.int32),
    "wider numbers": X.to(torch.float64),
    "the negative bit": torch._neg_view(X),
    "another device": X.to("meta"),
}


@pytest.fixture(params=[True, False], ids=["guards", "public functions"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(layout_guards, "was_checked", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("other", OTHERS)
def test_a_tensor_that_is_read_differently_is_not_alike(checked, other):
    first, second = torch.zeros(3, 5), OTHERS[other]
    assert not alike([first, X])(first, second)
    assert not alike([first, second])(first, X)
    assert alike([first, second])(first, second)


def test_other_memory_of_the_same_layout_is_alike(checked):
    rows = torch.randn(6, 7)[::2, :5]
    assert alike([X, rows])(X.clone(), torch.zeros(9, 7)[:6:2, 2:])
    assert alike([rows[:1]])(rows[:1])


def test_a_tensor_may_stand_twice(checked):
    assert alike([X, X])(X, X)


def test_within_inference_mode_and_without_gradients(checked):
    with torch.inference_mode():
        made = torch.arange(8.0)
        assert alike([made, X])(made, X)
    with torch.no_grad():
        assert alike([X])(X)


def test_a_tensor_that_torch_lets_be_written_elsewhere_is_not_alike(checked):
    learnt = X.clone().requires_grad_()
    with torch.inference_mode():
        made = X.clone()
    assert not alike([X])(made)
    assert not alike([X])(learnt)
    assert not alike([learnt])(X)
    assert alike([learnt])(learnt)


def test_no_tensor_is_held(checked):
    tensor = torch.zeros(3)
    place = tensor.untyped_storage()._weak_ref()
    is_alike = alike([tensor])
    del tensor
    assert torch.UntypedStorage._expired(place)
    torch.UntypedStorage._free_weak_ref(place)
    assert is_alike(torch.zeros(3))
