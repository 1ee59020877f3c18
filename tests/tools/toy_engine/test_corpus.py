"""Tokens join back to the text they were cut from, and documents come from where they are asked for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.toy_engine import corpus

TEXTS = [
    "",
    "The cat's mat, twice: 3.14  and 0x1F.\n",
    "def f(x, *, y=1):\n    '''Doc.'''\n\n    return  x\t+ y\n",
    "=" * 70 + "\n# " + "-" * 30 + " \n\r\n \f   \n\t\x00é \u00a0 \u3000 ü\u2003",
    '("""(((())))""")   ',
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_join_back_to_the_text(text: str) -> None:
    assert corpus.detokenize(corpus.tokenize(text)) == text


def test_words_carry_their_space_and_lines_their_indentation() -> None:
    tokens = corpus.tokenize("if x:\n    return  f(x) == 10\n\n")
    assert tokens == ["if", " x", ":", "\n    ", "return", " ", " f", "(", "x", ")", " ==", " 10", "\n\n"]


def test_equally_frequent_tokens_rank_by_string() -> None:
    vocabulary = corpus.Vocabulary.from_tokens([["c", "b"], ["a", "c"]], size=5)
    assert vocabulary.tokens == (*corpus.SPECIAL_TOKENS, "c", "a")
    assert vocabulary.encode(["a", "b", "c"]) == [4, corpus.UNK_ID, 3]


@pytest.mark.parametrize("token_id", [-1, 4])
def test_an_id_outside_the_vocabulary_is_an_error(token_id: int) -> None:
    vocabulary = corpus.Vocabulary.from_tokens([["a"]], size=10)
    with pytest.raises(IndexError, match=r"token ids must be in \[0, 4\)"):
        vocabulary.decode([3, token_id])


def test_a_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("café \xff\n".encode("latin-1"))
    assert list(corpus.documents(path)) == ["caf \n"]


@pytest.fixture
def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that stands files of the given contents in for the standard library."""
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))

    def write(**contents: str) -> None:
        for name, content in contents.items():
            path = tmp_path / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return write


def test_library_sources_come_sorted_and_without_tests(stdlib: Callable[..., None]) -> None:
    stdlib(b="2", a="1", json__tool="3", test__test_a="no", json__tests__x="no", encodings__ascii="no")
    assert list(corpus.stdlib_documents()) == ["1", "2", "3"]


def test_library_sources_stop_at_the_limit(stdlib: Callable[..., None]) -> None:
    stdlib(a="1234", b="5678", c="9")
    assert list(corpus.stdlib_documents(max_bytes=8)) == ["1234", "5678"]


def test_a_library_without_sources_names_the_way_out(stdlib: Callable[..., None]) -> None:
    with pytest.raises(FileNotFoundError, match="--text FILE"):
        list(corpus.stdlib_documents())


def test_this_library_is_there() -> None:
    first = next(corpus.stdlib_documents())
    assert len(first) > 0
