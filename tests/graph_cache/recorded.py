"""A capture backend without a device, and callables that show what they were given."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graph_cache import BufferSpec, GraphCache

T = TypeVar("T")
WIDTH = 5
SPECS = {
    "logits": BufferSpec((WIDTH,), torch.float32, -7.0),
    "scale": BufferSpec((), torch.float32, 1.0),
    "shift": BufferSpec((), torch.int64, 3),
}


class Scores(NamedTuple):
    """Results: best int64 [R], scaled float32 [R, WIDTH]."""

    best: Tensor
    scaled: Tensor


class Spied:
    """``Scores`` of a batch; keeps the tensors of every call, as they were and as they are."""

    def __init__(self) -> None:
        self.tensors: list[dict[str, Tensor]] = []
        self.values: list[dict[str, Tensor]] = []

    def __call__(self, logits: Tensor, scale: Tensor, shift: Tensor) -> Scores:
        given = {"logits": logits, "scale": scale, "shift": shift}
        self.tensors.append(given)
        self.values.append({name: tensor.clone() for name, tensor in given.items()})
        return Scores(logits.argmax(-1) + shift, logits * scale[:, None])


class Unwritten(TorchDispatchMode):
    """Notes the memory that calls write, so that it can be put back."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for written in tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name)):
                storage = written.untyped_storage()
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        return func(*args, **kwargs)

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)


@contextmanager
def unwritten() -> Iterator[None]:
    """Calls that leave every memory as it was, as a capture on a device does, which runs nothing."""
    calls = Unwritten()
    try:
        with calls:
            yield
    finally:
        calls.undo()


class RecordingBackend:
    """Keeps the work of a capture and does it again, on the same static tensors, at each replay."""

    def __init__(self) -> None:
        self.outer = False
        self.failures: list[Exception] = []
        self.num_captures = 0
        self.num_replays = 0
        self.num_resets = 0

    def capturing(self) -> bool:
        return self.outer

    def warm_up(self, work: Callable[[], T]) -> T:
        """Twice, as with a device."""
        work()
        return work()

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Raises the failures that the test lists, one a capture."""
        with unwritten():
            work()
        if self.failures:
            raise self.failures.pop(0)
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            work()

        return replay

    def pool_bytes(self) -> int:
        return 1000 * self.num_captures

    def reset(self) -> None:
        self.num_resets += 1


def batch(rows: int, width: int = WIDTH) -> dict[str, Tensor]:
    return {
        "logits": torch.randn(rows, width),
        "scale": torch.rand(rows) + 0.5,
        "shift": torch.randint(0, 100, (rows,)),
    }


def expected(tensors: dict[str, Tensor], rows: int | None = None) -> Scores:
    return Spied()(**{name: (each[:rows, :WIDTH] if each.dim() > 1 else each[:rows]) for name, each in tensors.items()})


def cache_of(
    fn: Callable[..., Scores], backend: RecordingBackend | None, buckets: tuple[int, ...] = (2, 4, 8)
) -> GraphCache:
    """A cache on the CPU with ``fn`` registered as ``score``."""
    cache = GraphCache("cpu", buckets, backend=backend)
    cache.register("score", fn, SPECS)
    return cache


def same_bits(left: Scores, right: Scores) -> bool:
    return type(left) is type(right) is Scores and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


def score(logits: Tensor, scale: Tensor, shift: Tensor) -> Scores:
    """Several kernels with intermediates in the pool."""
    scaled = (logits * scale[:, None]).exp().log1p() * 3.0 + logits.amax(-1, keepdim=True)
    return Scores(scaled.argmax(-1) + shift, scaled)


def on_device(rows: int, width: int = 5) -> dict[str, Tensor]:
    return {name: tensor.cuda() for name, tensor in batch(rows, width).items()}
