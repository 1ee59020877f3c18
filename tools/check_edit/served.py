"""An edit as a sampler serves it: eager, compiled, and replayed from a CUDA graph, on hard rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_sampler import LogitEdit, Sampler, SamplingParams
from compiled_sampler.logit_edit import name_of
from compiled_sampler.lowering.comparison import difference
from tools.check_edit.calls import hard_call, hard_rows, request_of

HISTORY_LEN = 512


def served_differences(edit: LogitEdit, params: Mapping[str, Any], vocab_size: int, device: str) -> Iterator[str]:
    """How the edited logits of a path differ from those of eager torch on the CPU."""
    wanted = _path(edit, params, vocab_size, "cpu", "eager")()
    paths = {("cpu", "compiled"): _path(edit, params, vocab_size, "cpu", "compiled")}
    if device != "cpu":
        for backend in ("eager", "compiled"):
            paths[device, backend] = _path(edit, params, vocab_size, device, backend)
        paths[device, "replayed"] = _replayed(paths[device, "compiled"])
    for path, step in paths.items():
        found = difference(step().cpu(), wanted)
        if found:
            yield f"{found} on the path {' '.join(path)}"


def _path(
    edit: LogitEdit, params: Mapping[str, Any], vocab_size: int, device: str, backend: str
) -> Callable[[], Tensor]:
    """A step of a sampler with the edit, which three of four requests have."""
    logits = hard_rows(vocab_size).to(device)
    count, call = len(logits), hard_call(edit, params, vocab_size).to(device)
    sampler = Sampler(vocab_size, count, device, backend=backend, history_len=HISTORY_LEN, edits=[edit])
    args: Any = {name_of(edit): request_of(edit, params)}
    prompt = [(7 * n) % vocab_size for n in range(edit.history_tokens)]
    slots = [
        sampler.add_request(SamplingParams(seed=n, extra_args=args if n % 4 else ()), prompt) for n in range(count)
    ]
    for key, each in call.rows.state.items():
        sampler.edit_state(key).copy_(each.view_as(sampler.edit_state(key)))  # slot n is row n
    plan, positions = sampler.plan(slots), torch.full((count,), len(prompt), device=device)
    inputs = {
        key: each if edit.inputs[key].per_token else each[:, 0].contiguous() for key, each in call.rows.inputs.items()
    }
    return lambda: sampler.edited_logits(plan, logits, positions, edit_inputs=inputs)


def _replayed(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step, captured in a CUDA graph and replayed."""

    def replay() -> Tensor:
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = step()
        made.zero_()
        graph.replay()
        return made

    return replay
