"""The static tensors that captured graphs read and write: owned inputs, bound inputs, outputs; and copies of them.

Buffers are made outside of inference mode: a tensor made within it could not be written outside of it. Several tensors
are copied in as few launches as possible: the host takes longer to launch one than the copy takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graph_cache.keys import OUT, Binding, OutBinding
from graph_cache.mirror import HostMirror, part_of
from graph_cache.registry import (
    BufferSpec,
    Given,
    Registration,
    Registry,
    Results,
    check_results,
    check_tensor,
    first_rows,
    listed,
)

_WORD = torch.int32  # torch's multi-tensor copy takes one dtype, so tensors of several are copied as such words
_DTYPES = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))  # of whole words, which that copy takes
_MOST_BYTES = 1 << 20  # of a tensor that is copied with others; the driver's own copy is faster for larger ones


class InputBuffer:
    """An owned input ``[M * times, *T]``, whose first rows hold a batch and whose others hold the fill."""

    def __init__(self, spec: BufferSpec, capacity: int, device: torch.device, memory: Tensor | None = None) -> None:
        capacity *= spec.times
        self.spec = spec
        with torch.inference_mode(False):
            if memory is None:
                memory = torch.empty(capacity, *spec.shape, dtype=spec.dtype, device=device)
            self.tensor = memory.fill_(spec.fill)
        self.is_ragged = spec.is_ragged
        self._layout, self._itemsize = (self.tensor.dtype, self.tensor.stride()), spec.dtype.itemsize
        self._is_lent = False  # whether the caller may write any row at any time
        self._num_dirty = 0  # rows from this one on hold the fill

    def lend(self) -> Tensor:
        """The buffer itself, for a caller who may write it: from now on nothing that it held counts as still there."""
        self._is_lent, self._num_dirty = True, self.tensor.shape[0]
        return self.tensor

    def rows(self, rows: int) -> Tensor:
        """The view of the first ``rows`` rows."""
        return self.tensor[:rows]

    def stage(
        self, source: Tensor | None, rows: int, bucket: int, targets: list[Tensor], sources: list[Tensor]
    ) -> None:
        """Fill rows ``[rows:bucket]``, and list the copy of ``source`` that writes the rows before them."""
        # The source is [>= rows, >= tail...]; None stands for the fill in every row, and this buffer itself is not
        # copied. A row is filled at most once for each time that it was copied to, so fills cost no more than copies.
        if source is None:
            rows = 0
        elif source.data_ptr() == self.tensor.data_ptr() and (source.dtype, source.stride()) == self._layout:
            if rows < bucket:
                self.tensor[rows:bucket].fill_(self.spec.fill)
            return
        else:
            if source.data_ptr() == self.tensor.data_ptr():
                source = source.clone()  # another view of this memory cannot be copied onto it
            if source.requires_grad:
                source = source.detach()
            targets.append(self.tensor[:rows])
            sources.append(first_rows(source, rows, self.spec.shape))
        if rows < bucket and rows < self._num_dirty:
            end = bucket if self._is_lent else self._num_dirty  # behind the bucket a lent one is the caller's
            self.tensor[rows:end].fill_(self.spec.fill)
            self._num_dirty = self._num_dirty if self._is_lent else rows
        elif rows > self._num_dirty:
            self._num_dirty = rows

    def forget(self) -> Tensor | None:
        """Fill every row of a buffer of one number a row, and return what the caller had written if it is lent."""
        # such numbers say what the callable may write besides its results
        if self.spec.shape:
            return None
        written = self.tensor.clone() if self._is_lent else None
        self.tensor.fill_(self.spec.fill)
        self._num_dirty = self.tensor.shape[0] if self._is_lent else 0
        return written


class HostInput(InputBuffer):
    """An owned input of one int64 a row that lies in a mirror: a batch may bring it as bytes of the host."""

    def __init__(self, spec: BufferSpec, capacity: int, device: torch.device, mirror: HostMirror) -> None:
        self._mirror, self._start, end = mirror, mirror.take(2 * capacity), 2 * capacity
        super().__init__(spec, capacity, device, part_of(mirror.there, torch.int64, self._start, (capacity,), (1,)))
        self._here = mirror.here[self._start : self._start + end].data.cast("B")
        self._fills = np.full(capacity, int(spec.fill), np.int64).tobytes()
        self._here[:] = self._fills  # an upload of other words may bring these too
        # What the first rows hold, which saves the upload of the same again; None for what did not come from the host.
        self._held: bytes | None = None
        self._filled = 0  # rows behind them hold the fill up to this one

    def hold(self, numbers: bytes, rows: int, bucket: int) -> None:
        """Write the first rows of numbers on the host, and the fill up to ``bucket``, unless they are there."""
        size, end = rows * self._itemsize, bucket * self._itemsize
        if len(numbers) != size:
            numbers = numbers[:size]
        if numbers == self._held and bucket <= self._filled:
            return
        self._held, self._num_dirty = None, max(self._num_dirty, rows)  # an interrupt may come before all is written
        self._mirror.note(self._start, self._start + 2 * bucket)
        self._here[:size] = numbers
        if size < end:
            self._here[size:end] = self._fills[size:end]
        self._held, self._filled = numbers, bucket
        if self._num_dirty <= bucket:
            self._num_dirty = rows

    def stage(
        self, source: Tensor | None, rows: int, bucket: int, targets: list[Tensor], sources: list[Tensor]
    ) -> None:
        """As for any other input; what the host wrote before must not come back with an upload of other words."""
        if self._held is not None:
            self._here[:], self._held = self._fills, None
        super().stage(source, rows, bucket, targets, sources)

    def forget(self) -> Tensor | None:
        """Fill every row, on the host too: the next upload may bring them."""
        self._here[:], self._held = self._fills, None
        return super().forget()

    def lend(self) -> Tensor:
        """Refuse it: an upload may write any row."""
        raise ValueError("an input of the host must not be lent, as uploads write it; pass a tensor to the run")


class OutputBuffers:
    """Results of one layout, ``[M, *T]`` a field, written at the end of each graph of the callables that return it."""

    # A run copies them out before another can write them, so callables share them.

    def __init__(self, results: Results, capacity: int) -> None:
        self.kind: Any = type(results)
        self.layout = self.layout_of(results)
        with torch.inference_mode(False):
            self.tensors: Results = tuple(
                None if field is None else field.new_empty((capacity, *field.shape[1:])).detach() for field in results
            )
        self._first_rows: dict[int, NewCopies] = {}  # by their number: the views save a step 4 us, NewCopies as it says

    @staticmethod
    def layout_of(results: Results) -> tuple[object, ...]:
        """The type of ``results`` and the tail and dtype of each field; equal for interchangeable callables."""
        fields = (field if field is None else (tuple(field.shape[1:]), field.dtype) for field in results)
        return (type(results), *fields)

    def rows(self, rows: int) -> Results:
        """The NamedTuple of views ``[rows, *T]``."""
        return self._of_first(rows).sources

    def copied(self, rows: int) -> Results:
        """A NamedTuple of new tensors ``[rows, *T]`` with what the first rows hold."""
        results: Results = self.kind(*self._of_first(rows)())
        return results

    def _of_first(self, rows: int) -> NewCopies:
        copies = self._first_rows.get(rows)
        if copies is None:
            with torch.inference_mode(False):
                views = self.kind(*(None if field is None else field[:rows] for field in self.tensors))
            copies = self._first_rows[rows] = NewCopies(views)
        return copies


class StaticTensors:
    """The static tensors of all variants: owned inputs by input name, outputs by layout, and bound tensors."""

    def __init__(
        self,
        registry: Registry,
        capacity: int,
        device: torch.device,
        mirror: HostMirror | None = None,
    ) -> None:
        self._registry, self.mirror = registry, mirror
        self._capacity = capacity
        self._device = device
        self._inputs: dict[str, InputBuffer] = {}
        self._outputs: dict[str, OutputBuffers] = {}
        self.bound: dict[str, Tensor] = {}  # by input name, with the identities below
        self.bindings: dict[str, Binding] = {}
        self.bound_outs: dict[str, Results] = {}  # by callable, with the identities below
        self.outs: dict[str, OutBinding] = {}

    def bind(self, input_name: str, tensor: Tensor) -> None:
        """Bind ``tensor`` (``[rows, >= tail...]``, any strides) to an input; a reference to it is kept."""
        check_tensor(input_name, tensor, self._registry.spec(input_name), self._device)
        self.bound[input_name] = tensor.detach()
        self.bindings[input_name] = Binding.of(input_name, tensor)

    def unbind(self, input_name: str | None) -> None:
        """Drop a reference, or all; raise ValueError if the input is unknown or not bound."""
        if input_name is None:
            for bound in (self.bound, self.bindings, self.bound_outs, self.outs):
                bound.clear()
            return
        self._registry.spec(input_name)
        if input_name not in self.bound:
            raise ValueError(f"input {input_name!r} must be bound to be unbound; bound now: {listed(self.bound)}")
        del self.bound[input_name], self.bindings[input_name]

    def matched(self, tensors: Mapping[str, Given]) -> tuple[str, ...]:
        """The names of the inputs whose tensor matches the bound one."""
        bindings = self.bindings.items()
        return tuple(name for name, binding in bindings if name in tensors and binding.matches(tensors[name]))

    def owned(self, input_name: str) -> InputBuffer:
        """The owned buffer of an input, allocated by the first call; ValueError for an unknown input."""
        if input_name not in self._inputs:
            layout = self._registry.spec(input_name), self._capacity, self._device
            mirror = self.mirror if layout[0].on_host else None
            self._inputs[input_name] = InputBuffer(*layout) if mirror is None else HostInput(*layout, mirror)
        return self._inputs[input_name]

    def bind_out(self, name: str, out: Results) -> None:
        """Bind tensors ``[rows, *tail]`` for the results of a callable; a reference to them is kept."""
        self._registry.named(name)
        self.bound_outs[name] = out
        self.outs[name] = tuple(None if field is None else Binding.of(OUT, field) for field in out)

    def outputs_of(self, registration: Registration, results: Results, rows: int) -> OutputBuffers:
        """The output buffers of a callable, made for the first ``results`` of a layout (``[rows, *T]`` a field)."""
        check_results(results, rows, self._device)
        layout = OutputBuffers.layout_of(results)
        covered = (self._registry.named(name) for name in registration.covers)
        for peer in (registration, *covered, *self._registry.covering(registration.name)):
            outputs = self._outputs.get(peer.name)
            if outputs is not None and outputs.layout != layout:
                raise TypeError(
                    f"{registration.name!r} must return what {peer.name!r} returns, got {layout} against "
                    f"{outputs.layout}; return one NamedTuple type with the same tails and dtypes"
                )
        if registration.name not in self._outputs:
            same = (buffers for buffers in self._outputs.values() if buffers.layout == layout)
            self._outputs[registration.name] = next(same, None) or OutputBuffers(results, self._capacity)
        return self._outputs[registration.name]

    def nbytes(self) -> int:
        """Bytes of all owned inputs and outputs."""
        tensors = [buffer.tensor for buffer in self._inputs.values()]
        fields = (tensor for outputs in {*self._outputs.values()} for tensor in outputs.tensors)
        tensors += [tensor for tensor in fields if tensor is not None]
        return sum(tensor.nbytes for tensor in tensors)


def copy_tensors(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> None:
    """Copy each source into the target of the same index, with one launch for all small ones of 4- and 8-byte numbers.

    Numbers that the copy converts take one launch more for each pair of dtypes.

    Args:
        targets: tensors on one device.
        sources: the same shapes and device; any strides. A source of another dtype than its target is converted. Those
            that are not contiguous, of other dtypes, or large are copied one by one. Where the source or the target is
            None, nothing is copied.
    """
    into: list[Tensor] = []
    values: list[Tensor] = []
    converted: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    is_mixed = False
    for target, source in zip(targets, sources, strict=True):
        if target is None or source is None:
            continue
        dtypes = target.dtype, source.dtype
        is_small = _DTYPES.issuperset(dtypes) and source.nbytes <= _MOST_BYTES
        is_dense = is_small and target.is_contiguous() and source.is_contiguous() and target.dim() > 0
        if not (is_dense and target.stride(-1) == source.stride(-1) == 1):  # of size 1 the stride may be any
            target.copy_(source, non_blocking=True)
        elif dtypes[0] is dtypes[1]:
            is_mixed = is_mixed or (bool(into) and dtypes[0] is not into[0].dtype)
            into.append(target)
            values.append(source)
        else:
            pair = converted.setdefault(dtypes, ([], []))
            pair[0].append(target)
            pair[1].append(source)
    for pair in converted.values():
        torch._foreach_copy_(*pair, non_blocking=True)
    if len(into) == 1:
        into[0].copy_(values[0], non_blocking=True)
    elif into:
        if is_mixed:
            into, values = _words_of(into), _words_of(values)
        torch._foreach_copy_(into, values, non_blocking=True)


class NewCopies:
    """Copies of the same tensors into new ones, as often as it is called; how they are copied is found out once."""

    # Against ``copy_tensors`` into new tensors it saves 5 us of the host for two results and 10 for six (CPU tensors).
    # Sources lie on one device; those that copy_tensors would copy together take one launch.

    def __init__(self, sources: tuple[Tensor | None, ...]) -> None:
        self.sources = sources
        present = [i for i, source in enumerate(sources) if source is not None]
        small = [i for i in present if _is_small(sources[i])]
        self._small = small if len(small) > 1 else []
        self._single = [i for i in present if i not in self._small]
        self._values: list[Any] = [sources[i] for i in self._small]
        self._is_mixed = len({value.dtype for value in self._values}) > 1
        if self._is_mixed:
            self._values = _words_of(self._values)

    def __call__(self) -> list[Any]:
        """New tensors with what the sources hold now, on the current stream; None for None."""
        copies: list[Any] = [None if source is None else torch.empty_like(source) for source in self.sources]
        if self._small:
            into = [copies[i] for i in self._small]
            torch._foreach_copy_(_words_of(into) if self._is_mixed else into, self._values, non_blocking=True)
        for i in self._single:
            copies[i].copy_(self.sources[i], non_blocking=True)
        return copies


def _is_small(tensor: Any) -> bool:
    """Whether a tensor is copied with others, if the target is like it."""
    is_dense = tensor.is_contiguous() and tensor.dim() > 0 and tensor.stride(-1) == 1
    return tensor.dtype in _DTYPES and tensor.nbytes <= _MOST_BYTES and is_dense


def _words_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor if tensor.dtype is _WORD else tensor.view(_WORD) for tensor in tensors]
