"""Seeds of requests that bring none; needs no engine."""

from __future__ import annotations

import functools
from hashlib import blake2b

_MOST_REQUESTS = 65_536  # whose seeds are remembered: an engine may ask at every step


@functools.lru_cache(_MOST_REQUESTS)
def seed_of(request_id: str, salt: int) -> int:
    """The seed of a request without one, in [0, 2**64): the same on every rank, whatever the batch.

    Args:
        request_id: which the engine makes unique.
        salt: the seed of the engine.
    """
    return int.from_bytes(blake2b(f"{salt}/{request_id}".encode(), digest_size=8).digest(), "little")
