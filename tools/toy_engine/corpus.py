"""Text on a machine without a download, cut into tokens: the sources of Python's standard library, or a file.

Every Python carries some 11 MB of code and English, enough to count a word language model.
"""

import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

BOS_ID = 0
EOS_ID = 1
UNK_ID = 2
SPECIAL_TOKENS = ("<bos>", "<eos>", "<unk>")

# Tables of code points and of build settings are no prose, and tests are missing from many installations.
_SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__")
)
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")

_TOKEN = re.compile(
    r"""
    \n+[ ]*                                      # line ends together with the indentation that follows
    | [ ]?\w+                                    # a word, a name or a number, with the space before it
    | [ ]?(?:\#{4,}|={4,}|-{4,}|[^\w\s]{1,4})    # a drawn line, or a short run of punctuation
    | [ ]+(?=[ ])                                # alignment; its last space belongs to the next token
    | \s                                         # any other white space
    """,
    re.VERBOSE,
)


def tokenize(text: str) -> list[str]:
    """Cut a text into tokens that join back to exactly that text.

    Args:
        text: any string.

    Returns:
        Words, numbers and punctuation, each with the one space before it, and line ends, each with the
        indentation after it.
    """
    return _TOKEN.findall(text)


def detokenize(tokens: Iterable[str]) -> str:
    """Join tokens to text, the inverse of :func:`tokenize`.

    Args:
        tokens: as :func:`tokenize` returns them.

    Returns:
        The text.
    """
    return "".join(tokens)


def stdlib_documents(max_bytes: int = 16_000_000) -> Iterator[str]:
    """Yield the sources of the running Python's standard library, sorted by path.

    Args:
        max_bytes: stop before the file that would take the total beyond this size.

    Yields:
        One file's text; bytes that are not UTF-8 are left out.

    Raises:
        FileNotFoundError: this Python has no standard library sources as files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if _is_wanted(path.relative_to(root)))
    if not paths:
        raise FileNotFoundError(f"no standard library sources under {root}; name a text with --text FILE")
    total_bytes = 0
    for path in paths:
        content = path.read_bytes()
        total_bytes += len(content)
        if total_bytes > max_bytes:
            return
        yield content.decode("utf-8", errors="ignore").replace("\r\n", "\n")


def _is_wanted(path: Path) -> bool:
    """Tell whether a path inside the standard library is text to learn from."""
    return not any(part in _SKIPPED_FOLDERS or part.startswith(_SKIPPED_PREFIXES) for part in path.parts)


def documents(text: Path | None = None) -> Iterator[str]:
    """Yield the documents to learn from: one file, or the standard library.

    Args:
        text: a UTF-8 text file, which becomes the only document; None takes the standard library.

    Yields:
        One document's text.

    Raises:
        FileNotFoundError: the file, or the standard library's sources, are not there.
    """
    if text is None:
        yield from stdlib_documents()
    else:
        yield text.read_text(encoding="utf-8", errors="ignore")


@dataclass(frozen=True)
class Vocabulary:
    """Token strings and their ids; the id of a token is its place.

    Attributes:
        tokens: the special tokens, then the words from the most frequent on.
    """

    tokens: tuple[str, ...]

    @classmethod
    def from_tokens(cls, documents: Iterable[Sequence[str]], size: int) -> "Vocabulary":
        """Keep the most frequent tokens; of equally frequent ones, the smaller strings.

        Args:
            documents: the tokens of each document.
            size: the most entries to have, special tokens included.

        Returns:
            The vocabulary, smaller than ``size`` where the documents hold fewer different tokens.

        Raises:
            ValueError: ``size`` leaves no room for a word.
        """
        if size <= len(SPECIAL_TOKENS):
            raise ValueError(f"size must be above {len(SPECIAL_TOKENS)}, the special tokens' number, got {size}")
        counts: Counter[str] = Counter()
        for tokens in documents:
            counts.update(tokens)
        ranked = sorted(counts, key=lambda token: (-counts[token], token))
        return cls(SPECIAL_TOKENS + tuple(ranked[: size - len(SPECIAL_TOKENS)]))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def __len__(self) -> int:
        """Return the number of tokens, the special ones included."""
        return len(self.tokens)

    def encode(self, tokens: Iterable[str]) -> list[int]:
        """Name each token by its id.

        Args:
            tokens: as :func:`tokenize` returns them.

        Returns:
            One id a token, in ``[0, len(self))``; ``UNK_ID`` for a token outside the vocabulary.
        """
        return [self._ids.get(token, UNK_ID) for token in tokens]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Write ids as text; ``<bos>`` and ``<eos>`` leave no trace.

        Args:
            token_ids: ids in ``[0, len(self))``.

        Returns:
            The text, with ``<unk>`` where a token was outside the vocabulary.

        Raises:
            IndexError: an id is outside the vocabulary.
        """
        ids = list(token_ids)
        if ids and not 0 <= min(ids) <= max(ids) < len(self):
            raise IndexError(f"token ids must be in [0, {len(self)}), got {min(ids)} to {max(ids)}")
        return detokenize(self.tokens[token_id] for token_id in ids if token_id not in (BOS_ID, EOS_ID))
