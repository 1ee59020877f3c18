"""Variants: callables captured on static tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graph_cache.buffers import HostInput, InputBuffer, OutputBuffers, StaticTensors, copy_tensors
from graph_cache.capture import CaptureBackend, Replay
from graph_cache.keys import VariantKey
from graph_cache.mirror import HostMirror
from graph_cache.registry import Given, Registration, Results, first_rows, rows_used

Progress = Callable[[int, int, str], object]


class CaptureError(RuntimeError):
    """A variant could not be captured; the cause is chained, and other variants are as they were before.

    Attributes:
        name: the registered callable.
        bucket: the rows P it was to be captured with.
    """

    def __init__(self, name: str, bucket: int, cause: Exception) -> None:
        super().__init__(
            f"{name}[{bucket}] could not be captured: {type(cause).__name__}: {cause}; a captured callable must not "
            "wait for the device (.item(), .cpu(), nonzero, a boolean index) and must return a NamedTuple of tensors. "
            "Other variants stay usable and this one is served without a graph; correct the callable, or free memory, "
            "then warmup again"
        )
        self.name = name
        self.bucket = bucket


@dataclass(frozen=True, slots=True)
class Variant:
    """A captured graph with its static tensors: it reads ``[P, *T]`` inputs and writes P rows of its outputs."""

    key: VariantKey
    replay: Replay
    of_host: tuple[tuple[str, HostInput], ...]  # that a batch may bring as bytes
    owned: tuple[tuple[str, InputBuffer], ...]  # those, and all that a batch is copied to; other inputs are bound
    outputs: OutputBuffers  # written by the graph, unless it writes the caller's ``out``
    mirror: HostMirror | None

    def run(self, tensors: Mapping[str, Given], rows: int, out: Results | None) -> Results:
        """The results of a batch that is copied in, replayed and copied out on the current stream, without a sync."""
        # rows is at most P; a missing owned input is filled with its fill; out is checked already.
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        bucket = self.key.rows
        for name, written in self.of_host:
            if isinstance(numbers := tensors.get(name), bytes):
                written.hold(numbers, rows, bucket)
        if self.mirror is not None:
            self.mirror.upload(is_replayed=True)  # before the copies, whose rows it may bring too
        for name, buffer in self.owned:
            tensor = tensors.get(name)
            if isinstance(tensor, bytes):
                continue
            used, size = rows, bucket
            if buffer.is_ragged:
                used, size = 0 if tensor is None else rows_used(tensor, buffer.spec, rows), bucket * buffer.spec.times
            buffer.stage(tensor, used, size, targets, sources)
        if targets:
            copy_tensors(targets, sources)
        self.replay()
        if out is None:
            return self.outputs.copied(rows)
        if self.key.out is None:
            copy_tensors(out, self.outputs.rows(rows))
        return out


def capture_variant(
    key: VariantKey, registration: Registration, statics: StaticTensors, backend: CaptureBackend
) -> Variant:
    """The variant of a key: the callable is warmed up, then captured with the copy of its results to the outputs."""
    # Owned inputs of one number a row hold their fill: a callable that keeps a state of its own must not find the last
    # batch. So what is bound says nothing of live rows before a replay, and results are written by replays alone.
    inputs, in_place = registration.inputs, {binding.input_name for binding in key.binding or ()}
    try:
        owned = {name: statics.owned(name) for name in inputs if name not in in_place}  # allocates
        of_host = tuple((name, buffer) for name, buffer in owned.items() if isinstance(buffer, HostInput))
        if statics.mirror is not None:
            statics.mirror.upload()
        for buffer in owned.values():
            buffer.forget()
        tensors = dict[str, Tensor]()
        for name, spec in inputs.items():
            if name in owned:
                tensors[name] = owned[name].rows(key.rows * spec.times)
            else:
                bound = statics.bound[name]
                tensors[name] = first_rows(bound, rows_used(bound, spec, key.rows), spec.shape)
        live = {name: torch.full_like(tensors[name], inputs[name].fill) for name in in_place if inputs[name].on_host}
        results = backend.warm_up(lambda: registration.fn(**{**tensors, **live}))
        outputs = statics.outputs_of(registration, results, key.rows)
        targets = outputs.rows(key.rows)
        if key.out is not None:
            bound_out = statics.bound_outs[key.name]
            targets = tuple(field if field is None else field.detach()[: key.rows] for field in bound_out)

        def work() -> None:
            returned = registration.fn(**tensors)
            with torch.no_grad():
                copy_tensors(targets, returned)

        replay = backend.capture(work)
    except Exception as cause:
        raise CaptureError(key.name, key.rows, cause) from cause
    return Variant(key, replay, of_host, tuple(owned.items()), outputs, statics.mirror)
