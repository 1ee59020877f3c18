"""Text that every Python ships: the topics of its language reference, which ``help()`` shows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

SHORTEST = 120
"""Characters of a paragraph that a prompt may begin."""


def documents() -> list[str]:
    """The topics of ``pydoc_data.topics``, sorted by name: plain text, each of some kilobytes.

    Raises:
        FileNotFoundError: this Python was packed without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as missing:
        raise FileNotFoundError("this Python has no pydoc_data.topics; name a text with --text FILE") from missing
    return [topics[name] for name in sorted(topics)]


def paragraphs(texts: Sequence[str], shortest: int = SHORTEST) -> list[str]:
    """The paragraphs of texts, without indentation and without those shorter than ``shortest`` characters."""
    found = (paragraph.strip() for text in texts for paragraph in text.split("\n\n"))
    return [paragraph for paragraph in found if len(paragraph) >= shortest]


def digest(texts: Sequence[str]) -> str:
    """The SHA-256 of texts, so that a log says what was learnt from; the topics differ from Python to Python."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
