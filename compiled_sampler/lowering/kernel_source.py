"""Two things that Inductor writes otherwise in a Triton kernel. Imported where one is asked for: it takes a second.

Both were found by measurement; neither changes what is computed. These kernels may have tiles of one reduction, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch._inductor.codegen.triton import TritonKernel, TritonScheduling
from torch._inductor.virtualized import V

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


class _Rewritten(TritonKernel):
    """Inductor's kernel, its source rewritten."""

    streams, prompts = False, False

    def want_no_x_dim(self) -> bool:
        """Whether a tile of one reduction has one axis; with the code for it, torch 2.11 fails."""
        return False

    def codegen_kernel(self, name: str | None = None) -> str:
        source: str = super().codegen_kernel(name)
        if self.streams:
            inputs = self.args.input_buffers.items()
            source = streamed(source, {pointer for buffer, pointer in inputs if _is_matrix(buffer)})
        return prompt(source) if self.prompts else source


def _is_matrix(name: str) -> bool:
    """Whether a buffer is an input of the stage with a float for each row and token."""
    found: Any = V.graph.graph_inputs.get(name)
    return found is not None and found.get_dtype().is_floating_point and len(found.get_size()) == 2


@contextmanager
def rewritten(*, streams: bool, prompts: bool) -> Iterator[None]:
    """Within, Inductor's kernels are ``streamed``, with respect to logits and the like, or ``prompt``, or as usual."""
    usual = TritonScheduling.kernel_type
    TritonScheduling.kernel_type = type("Rewritten", (_Rewritten,), {"streams": streams, "prompts": prompts})
    try:
        yield
    finally:
        TritonScheduling.kernel_type = usual
