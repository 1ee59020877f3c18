"""Edits that a user could have written, requests that have them, and what they make of logits, computed before."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from compiled_sampler import EditInput, EditRows, LogitEdit, Sampler, SamplingParams
from compiled_sampler.edits.tables import EditInputs, EditTables
from compiled_sampler.engine.requests.custom_edits import CustomEditSet
from examples.green_list import GreenList
from examples.guidance import Guidance
from examples.no_digits import NoDigits

V, HISTORY = 129, 48
WORDS = tuple(f"{n}" if n % 3 else "word" for n in range(V))


@dataclass(frozen=True)
class StepParams:
    """One parameter of each kind."""

    factor: float = 0.5
    token: int = 3
    lowers: bool = False


@dataclass(frozen=True)
class Stepped(LogitEdit):
    """Reads positions, parameters of all kinds, a number of each row, and constants of its own."""

    offset: float = 0.25
    params = StepParams
    inputs: ClassVar[Mapping[str, EditInput]] = {
        "number": EditInput(torch.int32),
        "blocked": EditInput(torch.bool, per_token=True),
    }

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """The logits of tokens around one of the request, changed by the position."""
        params, inputs = rows.params, rows.inputs
        changed = x * params["factor"] + self.offset * (rows.positions & 3).float() + inputs["number"].float()
        changed = torch.where(params["lowers"] != 0, changed - 1.0, changed)
        is_near = (ids - params["token"].to(torch.int32)).abs() < 40
        return torch.where(inputs["blocked"], float("-inf"), torch.where(is_near, changed, x))


EDITS: dict[str, LogitEdit] = {
    "GreenList": GreenList(),
    "NoDigits": NoDigits(WORDS),
    "Guidance": Guidance(),
    "Stepped": Stepped(),
}
OF_EDIT: dict[str, dict[str, Any]] = {
    "GreenList": {"key": 5, "bias": 3.0},
    "NoDigits": {},
    "Guidance": {"scale": 2.5},
    "Stepped": {"factor": 0.75, "token": 60, "lowers": True},
}


class Text(NamedTuple):
    """A row of logits and what its edits read of it."""

    edits: Sequence[str]
    tokens: Sequence[int]
    """Before the row, so that their number is its position."""
    inputs: Mapping[str, Tensor]
    """``[1]`` or ``[1, V]``."""


def edited_before(logits: Tensor, texts: Sequence[Text]) -> Tensor:
    """What the functions make of one row of logits each, float32 ``[R, V]``, called one by one in eager torch."""
    rows = []
    for row, text in zip(logits.float(), texts, strict=True):
        x = row[None]
        for name in [name for name in EDITS if name in text.edits]:
            edit = EDITS[name]
            before = torch.tensor([[text.tokens[-1] if text.tokens else -1]], dtype=torch.int32)
            values = () if edit.params is None else vars(edit.params(**OF_EDIT[name])).items()
            read = EditRows(
                torch.tensor([[len(text.tokens)]]),
                {key: torch.tensor([[float(v) if type(v) is float else int(v)]]) for key, v in values},
                {
                    key: text.inputs[key] if spec.per_token else text.inputs[key][:, None]
                    for key, spec in edit.inputs.items()
                },
                {key: table[None] for key, table in edit.tables(V).items()},
                before if edit.history_tokens else None,
            )
            x = edit.edit(x, torch.arange(V, dtype=torch.int32)[None], read)
        rows.append(x)
    return torch.cat(rows)


def random_inputs(rows: int, seed: int) -> dict[str, Tensor]:
    """Tensors of a call for all of ``EDITS``."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "unprompted": 2.0 * torch.randn(rows, V, generator=generator),
        "number": torch.randint(-2, 3, (rows,), dtype=torch.int32, generator=generator),
        "blocked": torch.rand(rows, V, generator=generator) < 0.1,
    }


def row_of(inputs: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: each[row : row + 1] for name, each in inputs.items()}


def params_with(edits: Sequence[str], **options: Any) -> SamplingParams:
    return SamplingParams(**options, extra_args={name: OF_EDIT[name] for name in edits})


def added_in_turn(
    sampler: Sampler,
    params_with: Callable[..., SamplingParams],
    edits: Sequence[str],
    count: int,
    prompt: Sequence[int] = (),
) -> list[int]:
    """The slots of requests of which every third has no edit; parameters are those of ``params_with(edits)``."""
    given = (params_with(edits if n % 3 else (), top_p=0.9, seed=n) for n in range(count))
    return [sampler.add_request(each, prompt) for each in given]


def custom_sampler(backend: str, rows: int, **options: Any) -> Sampler:
    return Sampler(V, rows, backend=backend, history_len=HISTORY, edits=[*EDITS.values()], **options)


def given_to_all(edits: Sequence[LogitEdit], slots: int, vocab_size: int) -> EditInputs:
    """What a step of the pipeline reads where every request has the edits, which have no parameters, on the CPU."""
    known = CustomEditSet(edits, vocab_size, torch.device("cpu"), slots)
    numbers = torch.from_numpy(known.numbers_of(SamplingParams(extra_args={name: {} for name in known.names})))
    custom = known.tables(known.names, numbers.repeat(slots, 1))
    return EditInputs(EditTables(custom=custom), custom=known.step(known.names))
