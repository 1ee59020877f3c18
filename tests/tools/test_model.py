"""The small models: token ids that come back as text, texts, and weights as training stores them."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tools.model import corpus, train, transformer
from tools.model.tokenizer import END_ID, Tokenizer
from tools.model.weights import read_bfloat16, write_bfloat16

TOKENIZER = Tokenizer(Path(corpus.__file__).parent / "tokenizer.json")


@given(st.text())
def test_any_text_comes_back(text):
    token_ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(token_ids) == text
    assert all(END_ID < token_id < len(TOKENIZER) for token_id in token_ids)


def test_common_words_are_single_tokens_and_the_end_of_a_document_leaves_no_trace():
    assert [len(TOKENIZER.encode(word)) for word in (" the", " object", " statement", " is")] == [1, 1, 1, 1]
    assert len(TOKENIZER) == 2048
    assert TOKENIZER.decode([END_ID, *TOKENIZER.encode("a b"), END_ID]) == "a b"
    assert TOKENIZER.decode(TOKENIZER.encode("é")[:1]) == "\ufffd"  # half a character is marked


@pytest.mark.parametrize("token_ids", [[-1], [3, 2048]])
def test_ids_outside_the_vocabulary_are_refused(token_ids):
    with pytest.raises(IndexError, match=r"must be in \[0, 2048\)"):
        TOKENIZER.decode(token_ids)


def test_paragraphs_are_long_and_without_indentation():
    found = corpus.paragraphs(["short\n\n   " + "long " * 30, "x" * 120])
    assert found == [("long " * 30).strip(), "x" * 120]
    assert len(corpus.paragraphs(corpus.documents())) > 300
    assert len(corpus.digest(["a", "b"])) == 64
    assert corpus.digest(["a", "b"]) != corpus.digest(["ab"])


FOLDER = Path(corpus.__file__).parent


@pytest.mark.parametrize("name", train.CONFIGS)
def test_what_is_stored_is_what_training_stores(name):
    config = train.CONFIGS[name]
    assert json.loads((FOLDER / name / "config.json").read_text()) == config.to_json()
    model = transformer.Model.load(FOLDER / name)
    assert model.config == config
    assert {key: tuple(weight.shape) for key, weight in model.weights.items()} == transformer.shapes(config)
    assert all(weight.isfinite().all() for weight in model.weights.values())


def test_weights_come_back_rounded_to_bfloat16(tmp_path):
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
