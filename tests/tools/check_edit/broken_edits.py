"""Edits that break the promise of equal bits, each by one operation, by its name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compiled_sampler import EditInput, EditRows, EditState, LogitEdit

Function = Callable[[Tensor, Tensor, EditRows], Tensor]


@dataclass(frozen=True)
class Written(LogitEdit):
    """An edit by a function."""

    function: Function

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        return self.function(x, ids, rows)


@dataclass(frozen=True)
class Stateful(Written):
    """The same with state: a number of the slot, one of each token, and as many that are of no token."""

    def state(self, vocab_size: int) -> Mapping[str, EditState]:
        return {
            "level": EditState(torch.int32, initial=3),
            "bias": EditState(torch.int32, per_token=True),
            "table": EditState(torch.int32, shape=(vocab_size,)),
        }


@dataclass(frozen=True)
class Softcap(LogitEdit):
    """Promises nothing, and says so."""

    bit_exact = False
    inputs: ClassVar[Mapping[str, EditInput]] = {"cap": EditInput()}

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """The logits in (-30, 30)."""
        return 30.0 * torch.tanh(x / rows.inputs["cap"])


@dataclass(frozen=True)
class Reading(Written):
    """The same that reads the last two tokens."""

    history_tokens = 2


def by_order(x: Tensor) -> Tensor:
    """Adds one to every second column, wherever its token is."""
    return x + (torch.arange(x.shape[1]) % 2)


BROKEN: dict[str, tuple[Function, str, str]] = {
    "normalized": (lambda x, ids, rows: x / x.sum(-1, keepdim=True), "aten.sum.dim_IntList", "not rounded once"),
    "quotient": (lambda x, ids, rows: x / 3.0, "aten.div.Tensor", "not rounded once"),
    "exponential": (lambda x, ids, rows: torch.exp(x), "aten.exp.default", "not rounded once"),
    "alpha": (lambda x, ids, rows: torch.add(x, x, alpha=3), "aten.add.Tensor", "alpha"),
    "noisy": (lambda x, ids, rows: x + torch.rand_like(x), "aten.rand_like.default", "draws numbers"),
    "counted": (lambda x, ids, rows: torch.where(x.to(torch.int32) > 2, x, -1.0), "aten._to_copy.default", "integers"),
    "largest": (
        lambda x, ids, rows: x - x.nan_to_num(0.0).amax(-1, keepdim=True),
        "aten.amax.default",
        "other columns",
    ),
    "by place": (lambda x, ids, rows: by_order(x), "aten.add.Tensor", "the order of the columns"),
    "by column": (
        lambda x, ids, rows: x + torch.arange(x.shape[1])[None].float() * 0.5,
        "aten.unsqueeze.default",
        "the order of the columns",
    ),
    "by batch": (lambda x, ids, rows: x + (rows.positions - rows.positions[:1]), "aten.slice.Tensor", "other rows"),
    "near the largest": (
        lambda x, ids, rows: torch.where(x < x.max(-1, keepdim=True).values - 2.0, float("-inf"), x),
        "aten.max.dim",
        "other columns",
    ),
    "first of an order": (
        lambda x, ids, rows: torch.where(x < x.topk(5).values[:, -1:], float("-inf"), x),
        "aten.topk.default",
        "of equal numbers",
    ),
    "less the mean": (
        lambda x, ids, rows: x - torch.var_mean(x, -1, keepdim=True)[1],
        "aten.var_mean.correction",
        "not rounded once",
    ),
    "other halves": (
        lambda x, ids, rows: torch.cat(x.chunk(2, -1)[::-1], -1),
        "aten.split.Tensor",
        "the order of the columns",
    ),
    "place of the first even token": (
        lambda x, ids, rows: torch.where((ids % 2).sort(1).indices == 0, 0.0, x),
        "aten.sort.default",
        "of equal numbers",
    ),
    "first row": (lambda x, ids, rows: x + x.unbind(0)[0], "aten.unbind.int", "depends on"),
}
"""A function, the operation that the checker must name, and a part of the reason."""


def by_last_tokens(x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
    """Lowers the last two tokens, taken out of the history one by one."""
    assert rows.history is not None
    last, before = rows.history.unbind(1)
    return torch.where((ids == last[:, None]) | (ids == before[:, None]), x - 1.0, x)


def by_ordered_tokens(x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
    """Lowers the smaller of the last two token ids; where in the history each stood is left."""
    assert rows.history is not None
    return torch.where(ids == rows.history.sort(1).values[:, :1], x - 1.0, x)


def larger_of_two(x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
    """The larger of two numbers of each token; the last operation is not the one whose result is returned."""
    made = torch.stack([x, x * 2.0], 1).max(1).values + torch.stack([x, x * 4.0]).amax(0)
    torch.stack([x, x]).unbind(0)
    return made


def by_any_token(x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
    """Lowers the last two tokens, compared with all of them at once, in halves that are joined again."""
    assert rows.history is not None
    found = (ids[:, :, None] == rows.history[:, None, :]).any(-1)
    return torch.where(found, x - 1.0, torch.cat(x.chunk(2, -1), -1))


PARTED: dict[str, LogitEdit] = {
    "last tokens": Reading(by_last_tokens),
    "ordered tokens": Reading(by_ordered_tokens),
    "any token": Reading(by_any_token),
    "larger": Written(larger_of_two),
}
"""Edits that keep their bits and have operations of several results."""


def by_table(x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
    """Adds the number of each token, and one that its level finds in a table, wherever the columns stand."""
    table = (rows.state["table"] * 2).gather(1, rows.state["level"].abs().to(torch.int64))
    return x + (rows.state["bias"] + table).to(torch.float32)


BROKEN_STATE: dict[str, tuple[Function, str, str]] = {
    "by column": (
        lambda x, ids, rows: x + (rows.state["table"] * 2)[:, : x.shape[1]].float(),
        "aten.add.Tensor",
        "the order of the columns",
    ),
    "by batch": (lambda x, ids, rows: x + rows.state["level"][:1].float(), "aten.slice.Tensor", "other rows"),
    "by sum": (
        lambda x, ids, rows: x + rows.state["bias"].sum(-1, keepdim=True).float(),
        "aten.sum.dim_IntList",
        "other columns",
    ),
}
"""The same of edits with state."""
