"""One captured graph with the static tensors around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from graph_cache.buffers import InputBuffer, OutputBuffers, Results, copy_tensors, rows_used
from graph_cache.capture import CaptureBackend, Replay
from graph_cache.errors import CaptureError
from graph_cache.key import VariantKey
from graph_cache.registry import Registration
from graph_cache.statics import StaticTensors
from graph_cache.validation import check_out


@dataclass(frozen=True, slots=True)
class Variant:
    """A graph that reads ``[B, *T]`` inputs and writes the first B rows of its outputs.

    Attributes:
        key: callable, bucket and bindings.
        replay: repeats the captured work on the current stream.
        owned: the inputs that are copied to, by name; all others are bound.
        outputs: where the graph leaves its results.
    """

    key: VariantKey
    replay: Replay
    owned: tuple[tuple[str, InputBuffer], ...]
    outputs: OutputBuffers

    def run(self, tensors: Mapping[str, Tensor], rows: int, out: Results | None) -> Results:
        """Copies a batch in, replays, copies the results out: all on the current stream, without a sync.

        Args:
            tensors: ``[>= rows, >= tail...]`` each; an owned input that is not among them stands at its fill.
            rows: rows of the batch R, at most B.
            out: ``[rows, *T]`` a field, or None for new tensors.

        Returns:
            ``out``, or new tensors ``[rows, *T]``.
        """
        results = self.outputs.rows(rows)
        if out is None:
            out = self.outputs.empty(rows)
        else:
            check_out(out, results)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, buffer in self.owned:
            tensor, spec = tensors.get(name), buffer.spec
            used = 0 if tensor is None else rows_used(tensor, spec, rows)
            buffer.stage(tensor, used, self.key.rows * spec.times, targets, sources)
        copy_tensors(targets, sources)
        self.replay()
        copy_tensors(out, results)
        return out


def capture_variant(
    key: VariantKey, registration: Registration, statics: StaticTensors, backend: CaptureBackend
) -> Variant:
    """Warms a callable up on its static inputs and captures it with the copy of its results to the outputs.

    Args:
        key: callable, bucket and bindings.
        registration: the callable.
        statics: where its inputs and outputs are, or are allocated.
        backend: what captures.

    Raises:
        CaptureError: the callable, or the capture of it, failed.
    """
    owned = statics.owned_by(registration, key)
    tensors = statics.read_by(registration, key, owned)
    try:
        results = backend.warm_up(lambda: registration.fn(**tensors))
        outputs = statics.outputs_of(registration, results, key.rows)
        replay = backend.capture(lambda: outputs.store(registration.fn(**tensors), key.rows))
    except Exception as cause:
        raise CaptureError(key.name, key.rows, cause) from cause
    return Variant(key, replay, tuple(owned.items()), outputs)
