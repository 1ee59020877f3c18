"""The checker of edits names the operation that breaks equal bits, and finds nothing in edits that keep them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from compiled_sampler import EditInput, EditState, LogitEdit
from tests.builders.custom_edits import EDITS
from tests.builders.edit_states import EDITS as STATEFUL
from tests.tiers import tiers
from tools.check_edit import __main__ as command
from tools.check_edit import findings


@dataclass(frozen=True)
class Written(LogitEdit):
    """An edit by a function."""

    function: Callable

    def edit(self, x, ids, rows):
        return self.function(x, ids, rows)


@dataclass(frozen=True)
class Stateful(Written):
    """The same with state: a number of the slot, one of each token, and as many that are of no token."""

    def state(self, vocab_size):
        return {
            "level": EditState(torch.int32, initial=3),
            "bias": EditState(torch.int32, per_token=True),
            "table": EditState(torch.int32, shape=(vocab_size,)),
        }


@dataclass(frozen=True)
class Softcap(LogitEdit):
    """Promises nothing, and says so."""

    bit_exact = False
    inputs: ClassVar = {"cap": EditInput()}

    def edit(self, x, ids, rows):
        """The logits in (-30, 30)."""
        return 30.0 * torch.tanh(x / rows.inputs["cap"])


@dataclass(frozen=True)
class Reading(Written):
    """The same that reads the last two tokens."""

    history_tokens = 2


BROKEN = {
    "not rounded once": {
        "aten.sum.dim_IntList": lambda x, ids, rows: x / x.sum(-1, keepdim=True),
        "aten.div.Tensor": lambda x, ids, rows: x / 3.0,
        "aten.exp.default": lambda x, ids, rows: torch.exp(x),
        "aten.var_mean.correction": lambda x, ids, rows: x - torch.var_mean(x, -1, keepdim=True)[1],
    },
    "alpha": {"aten.add.Tensor": lambda x, ids, rows: torch.add(x, x, alpha=3)},
    "draws numbers": {"aten.rand_like.default": lambda x, ids, rows: x + torch.rand_like(x)},
    "integers": {"aten._to_copy.default": lambda x, ids, rows: torch.where(x.to(torch.int32) > 2, x, -1.0)},
    "other columns": {
        "aten.amax.default": lambda x, ids, rows: x - x.nan_to_num(0.0).amax(-1, keepdim=True),
        "aten.max.dim": lambda x, ids, rows: torch.where(x < x.max(-1, keepdim=True).values - 2.0, -torch.inf, x),
    },
    "the order of the columns": {
        "aten.add.Tensor": lambda x, ids, rows: x + (torch.arange(x.shape[1]) % 2),
        "aten.unsqueeze.default": lambda x, ids, rows: x + torch.arange(x.shape[1])[None].float() * 0.5,
        "aten.split.Tensor": lambda x, ids, rows: torch.cat(x.chunk(2, -1)[::-1], -1),
    },
    "other rows": {"aten.slice.Tensor": lambda x, ids, rows: x + (rows.positions - rows.positions[:1])},
    "of equal numbers": {
        "aten.topk.default": lambda x, ids, rows: torch.where(x < x.topk(5).values[:, -1:], -torch.inf, x),
        "aten.sort.default": lambda x, ids, rows: torch.where((ids % 2).sort(1).indices == 0, 0.0, x),
    },
    "depends on": {"aten.unbind.int": lambda x, ids, rows: x + x.unbind(0)[0]},
}
"""By a part of the reason and the operation that the checker must name: a function."""


def by_each_token(ids, last, before):
    return (ids == last[:, None]) | (ids == before[:, None])


def larger_of_two(x, ids, rows):
    """The larger of two numbers of each token; the last operation is not the one whose result is returned."""
    made = torch.stack([x, x * 2.0], 1).max(1).values + torch.stack([x, x * 4.0]).amax(0)
    torch.stack([x, x]).unbind(0)
    return made


def by_any_token(x, ids, rows):
    """Lowers the last two tokens, compared with all of them at once, in halves that are joined again."""
    found = (ids[:, :, None] == rows.history[:, None, :]).any(-1)
    return torch.where(found, x - 1.0, torch.cat(x.chunk(2, -1), -1))


PARTED = {
    "last tokens": Reading(lambda x, ids, rows: torch.where(by_each_token(ids, *rows.history.unbind(1)), x - 1.0, x)),
    "ordered tokens": Reading(lambda x, ids, rows: torch.where(ids == rows.history.sort(1).values[:, :1], x - 1.0, x)),
    "any token": Reading(by_any_token),
    "larger": Written(larger_of_two),
}
"""Edits that keep their bits and have operations of several results."""


def by_table(x, ids, rows):
    """Adds the number of each token, and one that its level finds in a table, wherever the columns stand."""
    table = (rows.state["table"] * 2).gather(1, rows.state["level"].abs().to(torch.int64))
    return x + (rows.state["bias"] + table).to(torch.float32)


BROKEN_STATE = {
    "the order of the columns": {
        "aten.add.Tensor": lambda x, ids, rows: x + (rows.state["table"] * 2)[:, : x.shape[1]].float()
    },
    "other rows": {"aten.slice.Tensor": lambda x, ids, rows: x + rows.state["level"][:1].float()},
    "other columns": {
        "aten.sum.dim_IntList": lambda x, ids, rows: x + rows.state["bias"].sum(-1, keepdim=True).float()
    },
}
"""The same of edits with state."""


V = 131
EXACT = {**EDITS, **PARTED, **STATEFUL, "by_table": Stateful(by_table)}


@pytest.fixture
def uncompiled(monkeypatch):
    """Nothing is compiled: neither an edit alone, nor as a sampler serves it."""
    for name in ("_compiled", "served_differences"):
        monkeypatch.setattr(findings, name, lambda *args: [])


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", EXACT)
def test_nothing_is_found_in_edits_that_keep_their_bits(name):
    """By reading, at other columns and in other batches.

    A part of a result is no operation of its own, and one that nobody reads is not looked at. State of tokens moves
    with the columns; other state does not, even if it has as many numbers as a row.
    """
    assert findings.check_edit(EXACT[name], vocab_size=129) == []


@pytest.mark.parametrize("name", tiers(["Stepped", "by_table"], EXACT))
def test_nothing_is_found_in_them_when_they_are_compiled(name):
    assert findings.check_edit(EXACT[name], vocab_size=129) == []


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("kind", "reason", "operation", "function"),
    [
        pytest.param(kind, reason, operation, function, id=f"{kind.__name__}, {operation}, {reason}")
        for kind, broken in ((Written, BROKEN), (Stateful, BROKEN_STATE))
        for reason, functions in broken.items()
        for operation, function in functions.items()
    ],
)
def test_the_operation_that_breaks_the_bits_is_named(kind, reason, operation, function):
    found = findings.check_edit(kind(function), vocab_size=V)
    assert any(each.operation == operation and reason in each.reason for each in found), found


def test_a_history_that_is_written_is_refused():
    def writes(x, ids, rows):
        rows.history.add_(5)
        return x

    with pytest.raises(TypeError, match="edit of Reading must write into nothing that it is given, got a call in pl"):
        findings.check_edit(Reading(writes), vocab_size=V)


def test_runs_alone_name_what_depends_on_other_columns():
    """Without reading names: a sum of the row is seen by what it gives with fewer columns."""
    edit = Written(BROKEN["not rounded once"]["aten.sum.dim_IntList"])
    call = findings.hard_call(edit, {}, V)
    values = findings.values_of(findings.traced(edit, call), call)
    found = [*findings._moved(edit, values, call)]
    assert ("aten.sum.dim_IntList", "its result depends on the other columns of the row") in found


@pytest.mark.parametrize("edit", [EDITS["Guidance"], PARTED["larger"]], ids=["Guidance", "larger"])
def test_what_inductor_makes_otherwise_is_named(edit, monkeypatch):
    """A compiler that is wrong in one operation: the first whose result differs is that one.

    Also where an operation that nobody reads, without it, stands behind the result.
    """
    call = findings.hard_call(edit, {}, V)
    graph = findings.traced(edit, call)
    values = findings.values_of(graph, call)

    def wrong(part, **options):
        has_product = any("mul" in str(node.target) for node in part.graph.nodes)
        return lambda *tensors: part(*tensors) + (1.0 if has_product else 0.0)

    monkeypatch.setattr(torch, "compile", wrong)
    assert [each for each, _ in findings._compiled(graph, values, call)] == ["aten.mul.Tensor"]


@pytest.mark.usefixtures("uncompiled")
def test_the_command_says_what_it_found(capsys):
    command.main(["examples.no_digits:NoDigits", "--vocab", "64", "--device", "cpu"])
    assert "the same bits" in capsys.readouterr().out
    command.main([f"{__name__}:Softcap", "--vocab", "64", "--device", "cpu"])
    assert "aten.tanh.default" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="LogitEdit"):
        command.main([f"{__name__}:BROKEN", "--vocab", "64"])
    with pytest.raises(SystemExit, match=r"No module named 'edits'; .* PYTHONPATH"):
        command.main(["edits:Mine"])
    with pytest.raises(SystemExit, match=r"LogitEdit must define edit\(self, x, ids, rows\)"):
        command.main(["compiled_sampler:LogitEdit"])
    with pytest.raises(SystemExit, match="got 'scal'; it has scale"):
        command.main(["examples.guidance:Guidance", "--params", '{"scal": 3}'])


@pytest.mark.usefixtures("uncompiled")
def test_an_edit_that_promises_bits_and_breaks_them_fails_the_command(monkeypatch):
    monkeypatch.setattr(Softcap, "bit_exact", True)
    with pytest.raises(SystemExit) as ended:
        command.main([f"{__name__}:Softcap", "--vocab", "64", "--device", "cpu"])
    assert ended.value.code == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
def test_nothing_is_found_on_a_gpu_either(name):
    """Eager, compiled and replayed there, compared with the CPU."""
    assert findings.check_edit(EXACT[name], vocab_size=129, device="cuda") == []
