"""Training of the small models, and what is stored of it."""

import json
from pathlib import Path

import pytest
import torch

from tools.model import corpus, train, transformer
from tools.model.weights import read_bfloat16, write_bfloat16

FOLDER = Path(corpus.__file__).parent


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
