"""What breaks the promise of equal bits in an edit: operations by name, read in its graph and found by runs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from compiled_sampler import LogitEdit
from compiled_sampler.engine.boundary.edits import checked_custom_edits
from compiled_sampler.lowering.comparison import difference
from compiled_sampler.lowering.stage_code import EXACT_OPTIONS
from tools.check_edit.calls import EditCall, at_columns, hard_call, row_alone, traced
from tools.check_edit.operations import inexact, operation_of, operations, returned
from tools.check_edit.served import HISTORY_LEN, served_differences

VOCAB_SIZE = 1003
_GATHERED = 37  # columns of a row

Values = list[tuple[Node, Any]]
"""The operations of an edit, each with its result."""
Expected = Callable[[Node, Tensor], Tensor]
"""What the result of an operation lets expect of another run."""


class Finding(NamedTuple):
    """An operation that breaks the promise."""

    operation: str
    """Its name in torch, such as ``aten.exp.default``."""
    reason: str
    """How it breaks it."""


def check_edit(
    edit: LogitEdit, params: Mapping[str, Any] | None = None, vocab_size: int = VOCAB_SIZE, device: str = "cpu"
) -> list[Finding]:
    """What breaks the promise of equal bits in an edit, each operation once; nothing if all is well.

    Args:
        edit: whose declarations ``Sampler`` accepts.
        params: of a request; those without a default are some number otherwise.
        vocab_size: V, tokens of a row.
        device: "cpu", or "cuda" to look there too.

    Raises:
        TypeError, ValueError: as ``Sampler`` for such an edit.
    """
    given = dict(params or {})
    call = checked_call(edit, given, vocab_size)
    graph = traced(edit, call)
    values = values_of(graph, call)
    found = [*inexact(graph), *_moved(edit, values, call), *_compiled(graph, values, call)]
    if device != "cpu":
        there = call.to(device)
        found += _first_other(
            values, values_of(traced(edit, there), there), lambda node, value: value, f"the device, here {device}"
        )
    if not found:
        found += [("the whole edit", reason) for reason in served_differences(edit, given, vocab_size, device)]
    first = dict[str, str]()
    for operation, reason in found:
        first.setdefault(operation, reason)
    return [Finding(*each) for each in first.items()]


def checked_call(edit: LogitEdit, params: Mapping[str, Any], vocab_size: int) -> EditCall:
    """The ``hard_call`` of an edit that ``Sampler`` accepts.

    Raises:
        TypeError, ValueError: as ``Sampler`` for such an edit, and ``add_request`` for such parameters.
        TypeError: the class has no ``edit`` of its own.
    """
    if getattr(type(edit), "edit", LogitEdit.edit) is LogitEdit.edit:
        raise TypeError(f"{type(edit).__name__} must define edit(self, x, ids, rows), which returns the edited logits")
    checked_custom_edits([edit], vocab_size, HISTORY_LEN)
    return hard_call(edit, params, vocab_size)


def values_of(graph: GraphModule, call: EditCall) -> Values:
    """The result of every operation of a traced edit."""
    kept = dict[Node, Any]()

    class Keeping(Interpreter):
        def run_node(self, node: Node) -> Any:
            kept[node] = super().run_node(node)
            return kept[node]

    Keeping(graph).run(*_leaves(call))
    return [(node, kept[node]) for node in operations(graph)]


def _leaves(call: EditCall) -> list[Any]:
    return tree_leaves(call.arguments)


def _moved(edit: LogitEdit, values: Values, call: EditCall) -> Iterator[tuple[str, str]]:
    """The first operation whose result at a token depends on where its column or its row stands."""
    count, columns = call.x.shape
    generator = torch.Generator().manual_seed(3)
    places = {
        "the order of the columns": torch.randperm(columns, generator=generator)[None].expand(count, -1),
        "the other columns of the row": torch.randint(columns, (count, _GATHERED), generator=generator),
    }
    for what, index in places.items():
        moved = at_columns(edit, call, index)
        taking = _taking(index, columns, _unmoved(values, call, moved))
        yield from _first_other(values, values_of(traced(edit, moved), moved), taking, what)
    for row in range(count):
        alone = row_alone(call, row)
        yield from _first_other(values, values_of(traced(edit, alone), alone), _row(row, count), "other rows")


def _unmoved(values: Values, call: EditCall, moved: EditCall) -> set[Node]:
    """The operations that read nothing but what is the same in both calls, such as the state of a slot."""
    given = [node for node in values[0][0].graph.nodes if node.op == "placeholder"] if values else []
    same = {node for node, a, b in zip(given, _leaves(call), _leaves(moved), strict=False) if a is b}
    for node, _ in values:
        if node.all_input_nodes and same.issuperset(node.all_input_nodes):
            same.add(node)
    return same


def _taking(index: Tensor, columns: int, unmoved: set[Node]) -> Expected:
    """A function of a value that takes columns of each row; of a value without columns it gives the value."""

    def taken(node: Node, value: Tensor) -> Tensor:
        dim = _row_dim(value, len(index), 1)
        if dim is None or value.dim() < 2 or value.shape[-1] != columns or node in unmoved:
            return value
        places = index if dim else index.view(len(index), *[1] * (value.dim() - 2), -1)
        sizes = torch.broadcast_shapes(value.shape[:-1], places.shape[:-1])
        return value.expand(*sizes, columns).gather(-1, places.expand(*sizes, -1))

    return taken


def _row(row: int, count: int) -> Expected:
    """A function of a value that takes one row of it; of a value without rows it gives the value."""

    def taken(node: Node, value: Tensor) -> Tensor:
        dim = _row_dim(value, count)
        return value if dim is None else value.narrow(dim, row, 1)

    return taken


def _row_dim(value: Tensor, *sizes: int) -> int | None:
    """The dimension of a value that has a number of rows: the first, or of stacked logits the one before the last."""
    return next((dim for size in sizes for dim in (0, -2)[: value.dim()] if value.shape[dim] == size), None)


def _first_other(values: Values, others: Values, expected: Expected, what: str) -> Iterator[tuple[str, str]]:
    """The first operation whose result is not what another run of the edit lets expect, if that of the edit is not."""
    if [str(node.target) for node, _ in values] != [str(node.target) for node, _ in others]:
        yield "the whole edit", f"its operations depend on {what}"
        return
    moved = []
    for (node, value), (_, other) in zip(values, others, strict=True):
        if not isinstance(value, Tensor) or (value.dim() == 1 and value.shape != other.shape):
            continue  # one number for each place, which differs only where it meets the numbers of tokens
        if _differ(other.cpu(), expected(node, value)):
            moved.append(node)
    if moved and returned(moved[0].graph) in moved:
        yield operation_of(moved[0]), f"its result depends on {what}"


def _differ(there: Tensor, wanted: Tensor) -> bool:
    """Whether two results differ in a bit, or in a shape of which neither is broadcast to the other."""
    try:
        pair = torch.broadcast_tensors(there, wanted)
    except RuntimeError:  # such as a part of the columns where there are fewer of them
        return True
    return bool(difference(*(each.contiguous() for each in pair)))


def _compiled(graph: GraphModule, values: Values, call: EditCall) -> Iterator[tuple[str, str]]:
    """The first operation whose result differs when all up to it is compiled, if the result of the edit does."""
    results, last = dict(values), returned(graph.graph)
    if last not in results or not _compiled_difference(graph, last, results[last], call):
        return
    for node, value in values:
        if isinstance(value, Tensor) and value.dim() and _compiled_difference(graph, node, value, call):
            yield operation_of(node), "compiled by Inductor it differs from eager torch"
            return


def _compiled_difference(graph: GraphModule, last: Node, wanted: Tensor, call: EditCall) -> str:
    part: Any = GraphModule(graph, _until(graph, last))
    made = torch.compile(part, fullgraph=True, dynamic=False, options=dict(EXACT_OPTIONS))
    return difference(made(*_leaves(call)), wanted)


def _until(graph: GraphModule, last: Node) -> Graph:
    """The operations up to one, whose result is returned."""
    part, known = Graph(), dict[Node, Node]()
    for node in graph.graph.nodes:
        if node.op != "output":
            known[node] = part.node_copy(node, known.__getitem__)
    part.output(known[last])
    part.eliminate_dead_code()
    return part
