"""Which operations of a traced edit are exact, or rounded once, by their names."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

_ROUNDED_ONCE = {
    *("add", "sub", "rsub", "mul", "neg", "abs", "where", "masked_fill", "maximum", "minimum", "clamp", "clamp_min"),
    *("clamp_max", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "floor", "ceil", "trunc", "relu", "sign"),
    *("scalar_tensor", "full", "full_like", "zeros", "zeros_like", "ones_like", "clone", "lift_fresh_copy", "alias"),
    *("view", "_unsafe_view", "expand", "unsqueeze", "squeeze", "permute", "t", "slice", "select", "cat", "stack"),
    *("gather", "index", "index_select", "detach", "amax", "amin", "unbind", "split", "arange", "logical_not"),
    *("max", "min", "aminmax", "split_with_sizes"),
}
"""Operations of floats that are exact, or rounded once as IEEE 754 says; where their results go is looked at apart."""
_ORDERING = ("topk", "sort", "kthvalue", "median", "nanmedian", "mode")
_PLACES, _VALUES_AND_PLACES = ("argsort", "argmax", "argmin"), (*_ORDERING, "max", "min")
"""Operations whose result, or whose second part, says where numbers stand."""
_DRAWN = ("rand", "bernoulli", "normal", "uniform", "multinomial", "exponential", "dropout")


def operations(graph: GraphModule) -> list[Node]:
    """The operations of a graph in their order, each followed by those parts of its result that are read."""
    made = [node for node in graph.graph.nodes if node.op == "call_function"]
    return [node for node in made if not _is_part(node) or node.users]


def returned(graph: Graph) -> Any:
    """The node whose result a graph returns; it need not be the last one, as torch keeps what nobody reads."""
    (made,) = tree_leaves([node.args for node in graph.nodes if node.op == "output"])
    return made


def operation_of(node: Node) -> str:
    """The full name of an operation in torch, ``aten.max.dim``; for a part of a result, of what made the result."""
    return str(_source(node).target)


def name_in_torch(node: Node) -> str:
    """``exp`` of ``aten.exp.default``; an operation of higher order has one name."""
    names = operation_of(node).split(".")
    return names[1] if len(names) > 1 else names[0]


def inexact(graph: GraphModule) -> Iterator[tuple[str, str]]:
    """Operations that may differ between paths whatever they are given, and why."""
    for node in operations(graph):
        reason = "" if _is_part(node) else _inexact(node, name_in_torch(node))
        if reason:
            yield operation_of(node), reason


def _inexact(node: Node, name: str) -> str:
    """Why an operation may differ between paths; "" if it does not."""
    of_floats = any(_is_float(each) for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, Node))
    if any(name.startswith(each) for each in _DRAWN):
        return "it draws numbers that no seed of a request keys"
    if name == "_to_copy":
        narrows = of_floats and not _is_float(node)
        return "a float beyond the integers becomes another one on each device" if narrows else ""
    if (of_floats and name in _ORDERING) or _tells_places(node, name):
        return "of equal numbers eager torch, Inductor and CUDA may take other ones"
    if (of_floats or _is_float(node)) and name not in _ROUNDED_ONCE:
        return "it is not rounded once: eager torch, Inductor and CUDA differ"
    if _is_float(node) and node.kwargs.get("alpha", 1) != 1:
        return "its alpha is fused into the sum on some paths; multiply before"
    return ""


def _tells_places(node: Node, name: str) -> bool:
    """Whether somebody reads from it where a number stands, of which several may be equal."""
    parts = [each for each in node.users if _is_part(each) and each.users]
    return name in _PLACES or (name in _VALUES_AND_PLACES and any(each.args[1] == 1 for each in parts))


def _is_part(node: Node) -> bool:
    """Whether a node takes a part of a result that is a tuple, which is no operation of its own."""
    return node.target is operator.getitem


def _source(node: Node) -> Node:
    """The operation that made what a node takes a part of."""
    while _is_part(node):
        (node, _) = node.args  # type: ignore[assignment]
    return node


def _is_float(node: Node) -> bool:
    """Whether a result is of floats, or has a part that is; True where nothing is known."""
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    parts = value if isinstance(value, tuple | list) and not hasattr(value, "dtype") else (value,)
    return any(bool(getattr(each, "dtype", torch.float32).is_floating_point) for each in parts)
