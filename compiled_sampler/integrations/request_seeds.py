"""Seeds of requests that bring none; needs no engine."""

from __future__ import annotations

import functools
from hashlib import blake2b

_MOST_REQUESTS = 65_536  # whose seeds are remembered: an engine may ask at every step


@functools.lru_cache(_MOST_REQUESTS)
def seed_of(request_id: str, salt: int) -> int:
    """The seed of a request without one, in [0, 2**64): of its unique id, the same on every rank and in every batch."""
    return int.from_bytes(blake2b(f"{salt}/{request_id}".encode(), digest_size=8).digest(), "little")
