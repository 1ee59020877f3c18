"""Byte-level BPE in plain Python, read from a ``tokenizer.json``; the ids are those of the library tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

END_ID = 0
"""The token ``<end>`` before, between and behind documents."""
SPECIAL_TOKENS = ("<end>",)

PATTERN = r" ?[^\W\d_]+| ?\d| ?(?:[^\w\s]|_)+|\n+ *|\s+?"
"""Pieces that no token crosses: words and punctuation with the space before them, digits, line ends with the
indentation behind them. Python's ``re`` and the regular expressions of tokenizers read it alike."""


class Tokenizer:
    """Text to token ids and back.

    Args:
        path: of a ``tokenizer.json`` with a byte-level BPE model and this module's ``PATTERN``.
    """

    def __init__(self, path: Path) -> None:
        """Read vocabulary and merges."""
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        self._ids: dict[str, int] = model["vocab"]
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        self._ranks = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
        self._known: dict[str, list[int]] = {}

    def __len__(self) -> int:
        """The number of tokens, V."""
        return len(self._ids)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, in ``[1, V)``: every byte has a token, so nothing is unknown."""
        return [token_id for piece in re.findall(PATTERN, text) for token_id in self._encoded(piece)]

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ids in ``[0, V)``; ``<end>`` leaves no trace, and bytes that are no UTF-8 become U+FFFD.

        Raises:
            IndexError: an id is outside the vocabulary.
        """
        ids = list(token_ids)
        if ids and not 0 <= min(ids) <= max(ids) < len(self):
            raise IndexError(f"token ids must be in [0, {len(self)}), got {min(ids)} to {max(ids)}")
        return b"".join(self._bytes[token_id] for token_id in ids).decode("utf-8", errors="replace")

    @cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes of each token."""
        values = {character: byte for byte, character in enumerate(_byte_characters())}
        found = [b""] * len(self)
        for token, token_id in self._ids.items():
            if token not in SPECIAL_TOKENS:
                found[token_id] = bytes(values[character] for character in token)
        return found

    def _encoded(self, piece: str) -> list[int]:
        """The ids of one piece, remembered."""
        if piece not in self._known:
            characters = _byte_characters()
            self._known[piece] = [self._ids[part] for part in self._merged([characters[b] for b in piece.encode()])]
        return self._known[piece]

    def _merged(self, parts: Sequence[str]) -> list[str]:
        """Join neighbours, the pair that was learnt first before the others, until no pair is known."""
        merged = list(parts)
        while len(merged) > 1:
            pairs = list(pairwise(merged))
            first = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if first not in self._ranks:
                break
            merged = _joined(merged, first)
        return merged


def _joined(parts: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """Parts with every occurrence of a pair joined, from the left."""
    found: list[str] = []
    place = 0
    while place < len(parts):
        is_pair = tuple(parts[place : place + 2]) == pair
        found.append("".join(pair) if is_pair else parts[place])
        place += 2 if is_pair else 1
    return found


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it is printable (GPT-2)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
