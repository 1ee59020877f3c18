"""Training of the small models, and what is stored of it."""

import json
from pathlib import Path

import pytest
import torch

from tools.model import corpus, train, transformer
from tools.model.weights import read_bfloat16, write_bfloat16

FOLDER = Path(corpus.__file__).parent
SMALL = transformer.Config(50, 16, 24, 2, 4, 2, head_dim=8)


@pytest.mark.usefixtures("kept_threads")
def test_training_gives_the_same_bits_again_and_learns_a_repeated_text() -> None:
    torch.set_num_threads(1)  # several add up gradients in no fixed order
    stream = torch.arange(4000) * 7 % 50
    lines: list[str] = []
    first, second = (train.train(SMALL, stream, stream[:129][None], 5, "cpu", lines.append) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert lines[0] == f"has {sum(weight.numel() for weight in first.values()):,} parameters"
    longer = train.train(SMALL, stream, stream[:129][None], 120, "cpu", lines.append)
    before, after = (float(train.loss(SMALL, each, stream[:258].view(2, 129))) for each in (first, longer))
    assert before > 3.5  # log(50) is 3.9
    assert after < 2.0


def test_no_token_attends_to_those_behind_it() -> None:
    weights = train.initial_weights(SMALL, torch.Generator().manual_seed(1), "cpu")
    texts = torch.arange(train.LENGTH)[None] * 3 % 50
    rotary = transformer.rotary_table(SMALL, train.LENGTH, torch.float32)[:, :, None]
    changed = texts.clone()
    changed[0, 70] += 1
    first, second = (
        transformer.logits(SMALL, weights, each, rotary, train._attend_within)[0].detach() for each in (texts, changed)
    )
    assert torch.equal(first[:70], second[:70])
    assert not torch.equal(first[70:], second[70:])


def test_held_out_blocks_are_not_trained_on() -> None:
    stream = torch.arange(45 * (train.LENGTH + 1) + 5)
    trained, held_out = train.split(stream)
    assert held_out.shape == (2, train.LENGTH + 1)
    assert len(trained) + held_out.numel() == 45 * (train.LENGTH + 1)
    assert not set(held_out.flatten().tolist()) & set(trained.tolist())


@pytest.mark.parametrize("name", train.CONFIGS)
def test_what_is_stored_is_what_training_stores(name: str) -> None:
    config = train.CONFIGS[name]
    assert json.loads((FOLDER / name / "config.json").read_text()) == config.to_json()
    model = transformer.Model.load(FOLDER / name)
    assert model.config == config
    assert {key: tuple(weight.shape) for key, weight in model.weights.items()} == transformer.shapes(config)
    assert all(weight.isfinite().all() for weight in model.weights.values())


def test_weights_come_back_rounded_to_bfloat16(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3, 5), "b": torch.tensor([1.0, -0.0, 1e-40]), "c": torch.randn(2, 1, 2).double()}
    path = tmp_path / "weights.safetensors"
    write_bfloat16(path, weights)
    found = read_bfloat16(path, torch.float64)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name], weight.to(torch.bfloat16).to(torch.float64))
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"FP16"'))
    with pytest.raises(ValueError, match="must hold bfloat16 tensors, got FP16 for a"):
        read_bfloat16(path, torch.float32)
