"""The checker of edits names the operation that breaks equal bits, and finds nothing in edits that keep them."""

import pytest
import torch

from tests.builders.custom_edits import EDITS
from tests.builders.edit_states import EDITS as STATEFUL
from tests.tiers import tiers
from tests.tools.check_edit.broken_edits import (
    BROKEN,
    BROKEN_STATE,
    PARTED,
    Reading,
    Softcap,
    Stateful,
    Written,
    by_table,
)
from tools.check_edit import __main__ as command
from tools.check_edit import findings

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
    ("kind", "function", "operation", "reason"),
    [*((Written, *each) for each in BROKEN.values()), *((Stateful, *each) for each in BROKEN_STATE.values())],
    ids=[*BROKEN, *(f"state {name}" for name in BROKEN_STATE)],
)
def test_the_operation_that_breaks_the_bits_is_named(kind, function, operation, reason):
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
    edit = Written(BROKEN["normalized"][0])
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
    command.main(["tests.tools.check_edit.broken_edits:Softcap", "--vocab", "64", "--device", "cpu"])
    assert "aten.tanh.default" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="LogitEdit"):
        command.main(["tests.tools.check_edit.broken_edits:BROKEN", "--vocab", "64"])
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
        command.main(["tests.tools.check_edit.broken_edits:Softcap", "--vocab", "64", "--device", "cpu"])
    assert ended.value.code == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXACT)
def test_nothing_is_found_on_a_gpu_either(name):
    """Eager, compiled and replayed there, compared with the CPU."""
    assert findings.check_edit(EXACT[name], vocab_size=129, device="cuda") == []
