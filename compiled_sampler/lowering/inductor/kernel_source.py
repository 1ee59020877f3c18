"""Two things that Inductor writes otherwise in a Triton kernel, as functions of the kernel's source.

Both were found by measurement; neither changes what is computed.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_POLICY = re.compile(r", eviction_policy='\w+'")
_WAIT, _LAUNCH = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"


def streamed(source: str, pointers: Collection[str]) -> str:
    """The source, its loads from some pointers marked as the last of what they read.

    A pass over logits larger than the cache then leaves there what the small kernels around it read: 2 to 4 us of 48.

    Args:
        source: of a kernel; the newest Inductor keeps what it loads by parts, which is as wrong here.
        pointers: names of its parameters.
    """
    loads = [match for match in re.finditer(r"\btl\.load\((\w+)", source) if match[1] in pointers]
    for load in reversed(loads):
        end = _end_of_call(source, load.start(1))
        call = _POLICY.sub("", source[load.start() : end])
        source = f"{source[: load.start()]}{call}, eviction_policy='evict_first'{source[end:]}"
    return source


def prompt(source: str) -> str:
    """The source of a kernel that lets the next start as soon as it has waited, instead of after its last load."""
    lines = [line for line in source.splitlines() if line.strip() != _LAUNCH]
    waits = [number for number, line in enumerate(lines) if line.strip() == _WAIT]
    if not waits or _LAUNCH not in source:
        return source
    lines.insert(waits[0] + 1, lines[waits[0]].replace(_WAIT, _LAUNCH))
    return "\n".join(lines) + "\n"


def _end_of_call(source: str, first: int) -> int:
    """Where the parenthesis stands that ends a call, from where its first argument begins."""
    depth, end = 1, first
    while depth:
        depth += {"(": 1, ")": -1}.get(source[end], 0)
        end += 1
    return end - 1
