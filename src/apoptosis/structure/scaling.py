"""Attention that divides by the square root of its own width, and whose width is cut.

`scaled_dot_product_attention` without a scale takes 1/√d of the queries it gets. A program can write the old scale out;
the user's code cannot. There the rows that make the queries are multiplied by √(d'/d) instead, which is the same.
That needs rows that make queries and nothing else: found by sending row numbers through the views between the
projection and the attention.

Other code makes a number of the width itself: `q @ k.T / sqrt(self.width)`. There the cut model is run, and where a
product with a plain number gets another one, a power of a width, the same rows make it good. Whether they do is judged
by outputs, not here.
"""

from collections.abc import Mapping
from math import isclose, log, sqrt
from typing import Any

import numpy as np
import torch

from apoptosis.structure.analysis import Analysis
from apoptosis.structure.axes import Axis, Indices, size_of
from apoptosis.structure.comparison import telling_calls
from apoptosis.structure.plan import Plan, Scaling
from apoptosis.structure.program import Call, Program, Value, map_values, values_in

__all__ = ["find_number_scalings", "find_scalings"]

_VIEWS = {
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "permute", "movedim"),
    *("select", "unbind", "chunk", "split", "split_with_sizes", "slice", "narrow", "contiguous"),
    *("unsqueeze", "squeeze", "clone", "alias", "detach", "t"),
}

_SCALED = {
    "scaled_dot_product_attention": ("query", "scale", 1),
    "mul": ("self", "other", 1),
    "div": ("self", "other", -1),
}
"""By operation: what is multiplied, by which number, to which power."""

_STEPS = {
    *(*_VIEWS, "mul", "div", "add", "sub", "neg", "cat", "stack", "flip", "roll"),
    *("matmul", "bmm", "einsum", "_to_copy", "to", "expand", "type_as"),
}
_PRODUCTS = {"matmul", "bmm", "einsum"}
"""Through these, a factor of the first operand is one of the result, as far as the code of attention goes."""

_MAKERS = {"linear", "convolution", "conv1d", "conv2d"}


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


def _rows(chain: list[Call], wanted: Value, dim: int = -1) -> Indices:
    """Which rows of the projection arrive at `wanted`: numbers sent through the views."""
    *views, projection = chain
    out = projection.outputs[0]
    numbers = torch.arange(out.shape[dim])
    along = numbers.view([-1 if d == dim % len(out.shape) else 1 for d in range(len(out.shape))])
    tensors: dict[Value, torch.Tensor] = {out: along.expand(out.shape)}
    for call in reversed(views):
        result = call.op(**map_values(call.arguments, tensors.__getitem__))
        parts = [result] if isinstance(result, torch.Tensor) else list(result)
        tensors |= dict(zip(call.outputs, parts, strict=True))
    return np.unique(tensors[wanted].numpy())


def find_number_scalings(
    program: Program,
    found: Program,
    sizes: tuple[Mapping[Axis, int], Mapping[Axis, int]],
    whole: Plan,
    *,
    side: int = 0,
) -> tuple[Scaling, ...]:
    """What makes good for numbers that the cut model's code makes of other widths; empty where something cannot be.

    `found` is a run of the cut model, `sizes` those before and after this cut, `whole` the plan from the traced model
    on. `side` is which factor of a product of two activations is scaled: the queries (0) or the keys (1).
    """
    makers = {value: call for call in program.calls for value in call.outputs}
    scalings: dict[tuple[str, ...], Scaling] = {}
    for call, its in zip(telling_calls(program), telling_calls(found), strict=False):
        if call.op is not its.op:
            return ()
        if (change := _changed_number(call, its)) is None:
            continue
        operand, factor = call.arguments.get(change[0]), _power_of_width(change[1], *sizes)
        rows = _projection_rows(operand, makers, side) if isinstance(operand, Value) else None
        if factor is None or rows is None:
            return ()
        for value in rows[0]:
            cuts = (cut.kept.get(0) for cut in whole.tensors if cut.names == value.names)
            left = rows[1] if (kept := next(cuts, None)) is None else rows[1][kept]
            scalings[value.names] = Scaling(value.names, np.flatnonzero(left), factor)
    return tuple(scalings.values())


def _stem(call: Call) -> str:
    return call.name.split(".")[0]


def _changed_number(call: Call, its: Call) -> tuple[str, float] | None:
    """What a call multiplies, and by how much more; nothing is named where it cannot be told."""
    operand, number, power = _SCALED.get(_stem(call), ("", "", 1))
    for name, old in call.arguments.items():
        new = its.arguments.get(name)
        if type(old) is not float or type(new) is not float or isclose(old, new, rel_tol=1e-12):
            continue
        if name != number or old <= 0 or new <= 0:
            return "", 1.0
        return operand, (new / old) ** power
    return None


def _power_of_width(
    ratio: float, before: Mapping[Axis, int], after: Mapping[Axis, int]
) -> float | None:
    """What takes a ratio back, as far as this cut made it; None if it is no power of a width that shrinks."""
    for axis, then in after.items():
        if then != axis.size:
            exponent = log(ratio) / log(then / axis.size)
            if any(isclose(exponent, power, rel_tol=1e-9) for power in (-1, -0.5, 0.5, 1)):
                return (before.get(axis, axis.size) / then) ** exponent
    return None


def _projection_rows(
    value: Value, makers: dict[Value, Call], side: int
) -> tuple[list[Value], Any] | None:
    """The tensors whose rows make a value, and which rows of the traced ones those are."""
    passed: list[tuple[Call, Value]] = []
    while (call := makers.get(value)) is not None and _stem(call) not in _MAKERS:
        operands = list(values_in(call.arguments))
        if _stem(call) not in _STEPS or not operands:
            return None
        passed.append((call, value))
        value = operands[side if _stem(call) in _PRODUCTS else 0]
    if call is None:
        return None
    out, dim = call.outputs[0], -1 if _stem(call) == "linear" else 1
    views: list[Call] = []
    for own, made in reversed(passed):
        if _stem(own) not in _VIEWS:
            break
        views.insert(0, own)
        value = made
    held = [call.arguments["weight"], call.arguments["bias"]]
    held = [tensor for tensor in held if tensor is not None]
    if any(tensor.source != "tensor" for tensor in held):
        return None
    mask = np.zeros(out.shape[dim], dtype=bool)
    mask[_rows([*views, call], value, dim)] = True
    return held, mask
