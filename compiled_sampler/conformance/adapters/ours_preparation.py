"""What the questions of a run make this package's sampler compile, in parts that are compiled side by side.

A part calls the sampler as questions do, on empty rows, so that nothing is compiled that none needs. A part that was
done leaves a file in Inductor's cache directory, beside what it compiled, and is not done again.
"""

from __future__ import annotations

import functools
import getpass
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import compiled_sampler
from compiled_sampler import Sampler
from compiled_sampler.conformance.adapter import Drafted, Params
from compiled_sampler.conformance.adapters.ours import BUCKETS, REPLAYED_VOCAB, SLOTS, Compiled

LAW_VOCAB, TAIL_VOCAB = 32, 2**15
"""Vocabularies of the questions on laws, and of those on the tails of laws."""

FEW, MANY = 8, 64
"""Rows of the classes that stages are compiled for, besides a single one."""

MODES = ("full", "min_p", "no_filter", "top_k", "top_k_top_p[64]", "greedy")
"""Modes of a sampler, those of most stages first."""

KINDS = {
    "top_k": Params(top_k=5, top_p=0.9),
    "no filter": Params(),
    "min_p": Params(min_p=0.1),
    "greedy": Params(temperature=0.0),
}
"""Parameters of each mode in which a short row is drawn."""

COVERING = Params(top_p=0.9, min_p=0.05)
"""Parameters of the mode that covers every row."""


@dataclass(frozen=True)
class Part:
    """Calls of one sampler.

    Args:
        questions: names, or beginnings of names, of the questions that need them.
        vocab_size: V.
        params: of all rows.
        rows: of the calls of ``sample``.
        dtype: of the logits.
        columns: of the logits; 0 for V.
        strides: of their rows, one call each; 0 for their columns.
        has_laws: whether ``probs`` and ``logprobs`` are called too.
        rule: of verifications; "" calls none.
        width: drafts of a request.
        mode: that is warmed up instead of any call.
        place: where it draws; "" on the device of the run.
    """

    questions: tuple[str, ...]
    vocab_size: int
    params: Params = KINDS["no filter"]
    rows: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    columns: int = 0
    strides: tuple[int, ...] = (0,)
    has_laws: bool = False
    rule: str = ""
    width: int = 2
    mode: str = ""
    place: str = ""


def parts(device: torch.device, *, compiles: bool) -> list[Part]:
    """The parts for all questions, in the order in which they are begun.

    Parts of one family share stages, and would compile them at once if they began together: so families take turns.

    Args:
        device: of the run.
        compiles: whether the sampler under test does; one in eager torch is compared with others that do.
    """
    kinds, drawn = KINDS.values(), [each for name, each in KINDS.items() if name != "greedy"]
    rules = ("block", "rejection", "match")
    verified = {rule: [Part(("verification",), LAW_VOCAB, each, rule=rule) for each in drawn] for rule in rules}
    modes = [Part(("determinism", "cost"), REPLAYED_VOCAB, mode=mode) for mode in MODES]
    laws = [Part(("law", "random", "robust", "verif"), LAW_VOCAB, each, (MANY, FEW), has_laws=True) for each in kinds]
    halves = [
        Part(("law.16",), LAW_VOCAB, KINDS[kind], (MANY,), dtype)
        for kind in ("min_p", "no filter")
        for dtype in (torch.bfloat16, torch.half)
    ]
    wide = functools.partial(Part, ("verification.paths",), LAW_VOCAB, width=8)
    streams = [
        *(wide(each, rule=rule) for each in drawn for rule in rules[:2]),
        Part(("verification.stream", "verification.paths"), LAW_VOCAB, rule="match", width=8),
    ]
    strides = (REPLAYED_VOCAB + 40, 2 * REPLAYED_VOCAB)
    others = [
        Part(("robustness.single",), 1, KINDS["top_k"], (FEW,)),
        Part(("determinism.strides",), REPLAYED_VOCAB, COVERING, (MANY,), strides=strides),
        Part(("law.tail",), TAIL_VOCAB, rows=(MANY,)),
        Part(("robustness.padded",), LAW_VOCAB, KINDS["top_k"], (MANY,), columns=LAW_VOCAB + 9),
    ]
    own = [
        *_in_turn(modes, verified["block"], laws, others, halves),
        *verified["rejection"],
        *_in_turn(streams, verified["match"]),
    ]
    paths = [
        *(wide(params, rule=rule, place="cpu") for rule in rules for params in kinds),
        *(Part(("determinism.paths",), REPLAYED_VOCAB, mode=mode, place="cpu") for mode in MODES),
    ]
    return own if compiles else paths if device.type == "cpu" else []


def _in_turn(*families: Sequence[Part]) -> Iterator[Part]:
    """The first part of each family, then the second of each, and so on."""
    return (part for row in itertools.zip_longest(*families) for part in row if part is not None)


@dataclass(frozen=True)
class Preparation:
    """Makes the calls of a part, then its mark.

    Args:
        device: of the run.
        part: to do.
        mark: the file that says that it was done.
    """

    device: torch.device
    part: Part
    mark: Path

    def __call__(self) -> None:
        """Compile what the calls need."""
        part = self.part
        place = torch.device(part.place or self.device)
        if part.mode:
            sampler = Sampler(part.vocab_size, SLOTS, place, part.dtype, "compiled", buckets=BUCKETS)
            sampler.warmup(modes=[part.mode])
        else:
            _call(Compiled(part.vocab_size, place), part, place)
        self.mark.parent.mkdir(parents=True, exist_ok=True)
        self.mark.touch()

    def __str__(self) -> str:
        """The part by what differs from others."""
        part = self.part
        params = next((name for name, each in KINDS.items() if each == part.params), "covering")
        calls = part.mode or (
            f"{part.rule}, {part.width} drafts, {params}" if part.rule else f"rows {part.rows}, {params}"
        )
        return f"{part.questions[0]}: V = {part.vocab_size}, {part.dtype}, {calls}"


def missing(device: torch.device, names: Sequence[str], *, compiles: bool) -> list[Callable[[], object]]:
    """The parts that questions of these names need and that were not done before on this machine."""
    needed = [each for each in parts(device, compiles=compiles) if any(n.startswith(each.questions) for n in names)]
    found = [Preparation(device, each, mark_of(each, device)) for each in needed]
    return [each for each in found if not each.mark.exists()]


def _call(adapter: Compiled, part: Part, device: torch.device) -> None:
    columns = part.columns or part.vocab_size
    for rows, stride in itertools.product(part.rows, part.strides):
        logits = torch.zeros(rows, stride or columns, dtype=part.dtype, device=device)[:, :columns]
        adapter.sample(logits, [part.params] * rows, [0] * rows, torch.zeros(rows, dtype=torch.int64))
    if part.has_laws:
        logits = torch.zeros(part.vocab_size, columns, device=device)
        adapter.probs(logits[:1], [part.params])
        adapter.logprobs(logits, [part.params] * len(logits), torch.arange(part.vocab_size))
    if part.rule:
        _verify(adapter, part, device)


def _verify(adapter: Compiled, part: Part, device: torch.device) -> None:
    """Verify drafts of every kind that the rule takes, and draw one of the sampler's own."""
    n, width = MANY, part.width
    params, seeds, places = [part.params] * n, [0] * n, torch.zeros(n, dtype=torch.int64)
    logits = torch.zeros(n * (width + 1), part.vocab_size, device=device)
    laws = torch.full((n * width, part.vocab_size), 1.0 / part.vocab_size, device=device)
    drafts = torch.zeros(n, width, dtype=torch.int64, device=device)
    for given in (None,) if part.rule == "match" else (None, laws):
        adapter.verify(Drafted(logits, params, seeds, places, drafts, [width] * n, given), part.rule)
    adapter.draft(logits[:n], params, seeds, places, 0, part.rule)


def mark_of(part: Part, device: torch.device) -> Path:
    """The file that says that a part was done: of these sources, this torch and this machine."""
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    key = (part, str(device), machine, os.cpu_count(), torch.__version__, _sources())
    default = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", default), "compiled_sampler_conformance")
    return folder / hashlib.sha256(repr(key).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """A hash of this package's sources."""
    files = sorted(Path(compiled_sampler.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()
