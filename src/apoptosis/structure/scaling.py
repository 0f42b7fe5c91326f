"""Attention that divides by the square root of its own width, and whose width is cut.

`scaled_dot_product_attention` without a scale takes 1/√d of the queries it gets. A program can write the old scale out;
the user's code cannot. There the rows that make the queries are multiplied by √(d'/d) instead, which is the same.
That needs rows that make queries and nothing else: found by sending row numbers through the views between the
projection and the attention.
"""

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np
import torch

from apoptosis.structure.analysis import Analysis
from apoptosis.structure.axes import Axis, Indices, size_of
from apoptosis.structure.plan import Plan, Scaling
from apoptosis.structure.program import Call, Value, map_values, values_in

__all__ = ["find_scalings"]

_VIEWS = {
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "permute", "movedim"),
    *("select", "unbind", "chunk", "split", "split_with_sizes", "slice", "narrow", "contiguous"),
    *("unsqueeze", "squeeze", "clone", "alias", "detach", "t"),
}


def find_scalings(
    analysis: Analysis, before: Mapping[Axis, int], after: Mapping[Axis, int], whole: Plan
) -> tuple[Scaling, ...] | None:
    """What makes good for cut widths; None where the rows cannot be told.

    `whole` is the plan from the traced model on.
    """
    makers = {value: call for call in analysis.program.calls for value in call.outputs}
    users: dict[Value, list[Call]] = {}
    for call in analysis.program.calls:
        for value in values_in(call.arguments):
            users.setdefault(value, []).append(call)
    found: list[Scaling] = []
    for call in analysis.program.calls:
        if "scale" not in analysis.facts[call].frozen:
            continue
        width = analysis.axes[call.arguments["query"]][-1]
        old, new = size_of(width, before), size_of(width, after)
        if old == new:
            continue
        rows = _query_rows(call, makers, users)
        if rows is None:
            return None
        tensors, mask = rows
        for value in tensors:
            kept = next(
                (cut.kept.get(0) for cut in whole.tensors if cut.names == value.names), None
            )
            left = mask if kept is None else mask[kept]
            found.append(Scaling(value.names, np.flatnonzero(left), sqrt(new / old)))
    return tuple(found)


def _query_rows(
    attention: Call, makers: dict[Value, Call], users: dict[Value, list[Call]]
) -> tuple[list[Value], Any] | None:
    """The tensors whose rows make the queries, and which rows of the traced ones those are."""
    chains = [_chain(attention.arguments[name], makers) for name in ("query", "key", "value")]
    if any(chain is None for chain in chains):
        return None
    query, *others = [chain for chain in chains if chain is not None]
    known = {id(call) for chain in (query, *others) for call in chain} | {id(attention)}
    for call in query:
        readers = [user for value in call.outputs for user in users.get(value, [])]
        if any(id(user) not in known for user in readers):
            return None
    projection = query[-1]
    rows = _rows(query, attention.arguments["query"])
    for name, chain in zip(("key", "value"), others, strict=True):
        if chain[-1] is projection and np.isin(_rows(chain, attention.arguments[name]), rows).any():
            return None
    tensors = [projection.arguments["weight"], projection.arguments["bias"]]
    held = [value for value in tensors if value is not None]
    if any(value.source != "tensor" or len(users[value]) != 1 for value in held):
        return None
    mask = np.zeros(held[0].shape[0], dtype=bool)
    mask[rows] = True
    return held, mask


def _chain(value: Value, makers: dict[Value, Call]) -> list[Call] | None:
    """Views from a value back to the linear layer that made it, the layer last."""
    chain: list[Call] = []
    while (call := makers.get(value)) is not None:
        chain.append(call)
        name = call.name.split(".")[0]
        if name == "linear":
            return chain
        if name not in _VIEWS:
            return None
        value = next(values_in(call.arguments))
    return None


def _rows(chain: list[Call], wanted: Value) -> Indices:
    """Which rows of the projection arrive at `wanted`: numbers sent through the views."""
    *views, projection = chain
    out = projection.outputs[0]
    tensors: dict[Value, torch.Tensor] = {out: torch.arange(out.shape[-1]).expand(out.shape)}
    for call in reversed(views):
        result = call.op(**map_values(call.arguments, tensors.__getitem__))
        parts = [result] if isinstance(result, torch.Tensor) else list(result)
        tensors |= dict(zip(call.outputs, parts, strict=True))
    return np.unique(tensors[wanted].numpy())
