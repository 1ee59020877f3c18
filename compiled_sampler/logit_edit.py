"""Edits of logits that users write: what one declares, what its function reads, and how a step names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

MOST_EDITS = 16
"""Edits of the user that one sampler may have."""
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
"""The dtypes of ``EditInput``."""


@dataclass(frozen=True)
class EditInput:
    """A tensor that comes with every call, in ``edit_inputs``.

    Args:
        dtype: of the tensor, one of ``INPUT_DTYPES``.
        per_token: True for ``[R, >= V]``, a number for each token of each row; False for ``[R]``, one for each row.
    """

    dtype: torch.dtype = torch.float32
    per_token: bool = False


@dataclass(frozen=True)
class EditState:
    """A tensor by slot, ``Sampler.edit_state(name)``, which an engine reads and writes between steps.

    Args:
        dtype: of the tensor, one of ``INPUT_DTYPES``.
        per_token: True for ``[S, V]``, a number for each token of each slot.
        shape: of a slot without ``per_token``; () for ``[S]``, one number for each slot.
        initial: what every number of a slot is when a request with the edit takes it.
    """

    dtype: torch.dtype = torch.float32
    per_token: bool = False
    shape: tuple[int, ...] = ()
    initial: float | int | bool = 0

    def of_slot(self, vocab_size: int) -> tuple[int, ...]:
        """The shape behind the slot."""
        return (vocab_size,) if self.per_token else self.shape

    def of_row(self, vocab_size: int) -> tuple[int, ...]:
        """The shape behind the row, as ``EditRows`` has it."""
        return self.of_slot(vocab_size) or (1,)


class EditRows(NamedTuple):
    """What an edit may read besides logits and token ids; all but history and states broadcasts with ``[R, n]``."""

    positions: Tensor
    """int64 ``[R, 1]``, of the token to draw."""
    params: dict[str, Tensor]
    """The parameters of each row's request by name, ``[R, 1]``: float32 for floats, int64 for ints and bools."""
    inputs: dict[str, Tensor]
    """The tensors of the call by name: ``[R, 1]``, or ``[R, n]`` at the tokens of the logits if ``per_token``."""
    tables: dict[str, Tensor]
    """The constants of the edit by name, at the tokens of the logits: ``[1, n]`` or ``[R, n]``."""
    history: Tensor | None
    """int32 ``[R, history_tokens]``, the tokens before the row's own, the last one last; -1 where there is none."""
    state: Mapping[str, Tensor] = MappingProxyType({})
    """What each row's slot holds by name, as it is when the step runs: ``[R, 1]`` of one number, ``[R, *shape]``, or
    ``[R, n]`` at the tokens of the logits if ``per_token``."""


class LogitEdit:
    """An edit of logits, ``x' = f(x, token id, row)``: the base of a frozen dataclass that a user writes.

    The fields of the dataclass are constants, which compiled code holds. What differs between requests is declared in
    ``params``, what differs between steps in ``inputs``, what an engine keeps of each request in ``state``. Tokens are
    the same bits on every path if ``edit`` is elementwise and uses only integer operations and float32 operations that
    are rounded once: add, subtract, multiply, compare, choose. ``python -m tools.check_edit`` looks for others.
    """

    name: ClassVar[str] = ""
    """Names the edit in ``extra_args`` and ``captured_edits``; empty for the name of the class."""
    params: ClassVar[type | None] = None
    """A frozen dataclass of floats, ints and bools, the parameters of a request; None for none."""
    inputs: ClassVar[Mapping[str, EditInput]] = MappingProxyType({})
    """Tensors that every call with such a request brings, by name."""
    history_tokens: ClassVar[int] = 0
    """Tokens before a row's own that the edit reads; they need ``Sampler(history_len=...)``."""
    bit_exact: ClassVar[bool] = True
    """Whether the edit promises equal bits on every path; without, ``repr(plan)`` and ``statistics()`` say so."""

    def edit(self, x: Tensor, ids: Tensor, rows: EditRows) -> Tensor:
        """The logits after the edit, float32 of the shape of ``x``; a pure function, traced once and compiled.

        Args:
            x: float32 ``[R, n]``, after all other edits and masks; -inf for masked tokens, denormals are ``+0.0``.
            ids: int32 ``[1, n]`` or ``[R, n]``, the token ids of the columns; arithmetic on them wraps at 32 bits.
            rows: what else it may read.
        """
        raise NotImplementedError(f"{type(self).__name__} must define edit(self, x, ids, rows)")

    def tables(self, vocab_size: int) -> Mapping[str, Tensor]:
        """Constants by token, ``[V]`` each, by name; made once and kept on the device.

        Args:
            vocab_size: V.
        """
        return {}

    def state(self, vocab_size: int) -> Mapping[str, EditState]:
        """Tensors by slot that the edit reads and an engine writes, by name.

        Args:
            vocab_size: V.
        """
        return {}


def name_of(edit: LogitEdit) -> str:
    """The name of an edit."""
    return edit.name or type(edit).__name__


@dataclass(frozen=True, eq=False)
class CustomEdits:
    """The edits of the user that a step makes, in their order.

    One such object equals no other: compiled code holds the constants of its edits, and equal numbers, such as 1 and
    1.0 or 0.0 and -0.0, need not give equal code.
    """

    edits: tuple[LogitEdit, ...]
    starts: tuple[int, ...]
    """The column of ``RequestNumbers`` that says whether a request has the edit; its parameters stand behind it."""
    params: tuple[tuple[tuple[str, bool], ...], ...]
    """The name of each parameter, and whether it is a float, by edit."""
    tables: tuple[tuple[str, ...], ...]
    """The names of the tables, by edit."""
    states: tuple[tuple[str, ...], ...]
    """The names of the tensors by slot, by edit."""

    def __repr__(self) -> str:
        """The names of the edits."""
        return "_".join(map(name_of, self.edits))
