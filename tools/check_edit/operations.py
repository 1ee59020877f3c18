"""Which operations of a traced edit are exact, or rounded once, by their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

_ROUNDED_ONCE = {
    *("add", "sub", "rsub", "mul", "neg", "abs", "where", "masked_fill", "maximum", "minimum", "clamp", "clamp_min"),
    *("clamp_max", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "floor", "ceil", "trunc", "relu", "sign"),
    *("scalar_tensor", "full", "full_like", "zeros", "zeros_like", "ones_like", "clone", "lift_fresh_copy", "alias"),
    *("view", "_unsafe_view", "expand", "unsqueeze", "squeeze", "permute", "t", "slice", "select", "cat", "stack"),
    *("gather", "index", "index_select", "detach", "amax", "amin", "unbind", "split", "arange", "logical_not"),
}
"""Operations of floats that are exact, or rounded once as IEEE 754 says; where their results go is looked at apart."""
_DRAWN = ("rand", "bernoulli", "normal", "uniform", "multinomial", "exponential", "dropout")


def operations(graph: GraphModule) -> list[Node]:
    """The operations of a graph in their order."""
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def name_in_torch(node: Node) -> str:
    """``exp`` of ``aten.exp.default``."""
    return str(node.target).split(".")[1]


def inexact(graph: GraphModule) -> Iterator[tuple[str, str]]:
    """Operations that may differ between paths whatever they are given, and why."""
    for node in operations(graph):
        name, reads = name_in_torch(node), [each for each in tree_leaves((node.args, node.kwargs)) if _is_node(each)]
        of_floats = any(_is_float(each) for each in reads)
        if any(name.startswith(each) for each in _DRAWN):
            yield str(node.target), "it draws numbers that no seed of a request keys"
        elif name == "_to_copy":
            if of_floats and not _is_float(node):
                yield str(node.target), "a float beyond the integers becomes another one on each device"
        elif (of_floats or _is_float(node)) and name not in _ROUNDED_ONCE:
            yield str(node.target), "it is not rounded once: eager torch, Inductor and CUDA differ"
        elif _is_float(node) and node.kwargs.get("alpha", 1) != 1:
            yield str(node.target), "its alpha is fused into the sum on some paths; multiply before"


def _is_node(value: Any) -> bool:
    return isinstance(value, Node)


def _is_float(node: Node) -> bool:
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    dtype = value.dtype if isinstance(value, Tensor) else getattr(value, "dtype", torch.float32)
    return bool(dtype.is_floating_point)
