"""Token ids of the small models: any text comes back, and tokens stay inside pieces of text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.model import corpus
from tools.model.tokenizer import END_ID, Tokenizer

TOKENIZER = Tokenizer(Path(corpus.__file__).parent / "tokenizer.json")


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    token_ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(token_ids) == text
    assert all(END_ID < token_id < len(TOKENIZER) for token_id in token_ids)


def test_common_words_are_single_tokens_and_the_vocabulary_is_full() -> None:
    assert [len(TOKENIZER.encode(word)) for word in (" the", " object", " statement", " is")] == [1, 1, 1, 1]
    assert len(TOKENIZER) == 2048


def test_the_end_of_a_document_leaves_no_trace_and_half_a_character_is_marked() -> None:
    assert TOKENIZER.decode([END_ID, *TOKENIZER.encode("a b"), END_ID]) == "a b"
    assert TOKENIZER.decode(TOKENIZER.encode("é")[:1]) == "\ufffd"


@pytest.mark.parametrize("token_ids", [[-1], [3, 2048]])
def test_ids_outside_the_vocabulary_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(IndexError, match=r"must be in \[0, 2048\)"):
        TOKENIZER.decode(token_ids)


def test_paragraphs_are_long_and_without_indentation() -> None:
    found = corpus.paragraphs(["short\n\n   " + "long " * 30, "x" * 120])
    assert found == [("long " * 30).strip(), "x" * 120]
    assert len(corpus.paragraphs(corpus.documents())) > 300
    assert len(corpus.digest(["a", "b"])) == 64
    assert corpus.digest(["a", "b"]) != corpus.digest(["ab"])
