"""The algebra of axes: every dimension of every tensor is a sum of products of axis variables.

A *sum* lays its terms end to end (`cat`), a *product* is row-major (a view of h·d). So a fused qkv projection of NeoX
has the rows h·(q + k + v), DenseNet features are a + b + c, and flattened they are a·y·x + b·y·x.

Normal form: (a + b)·c becomes a·c + b·c, because both index the same positions in the same order; c·(a + b) cannot be
split that way and stays. A term is therefore some axes followed by at most one sum of two terms or more. Axes of
size 1 vanish from products, an axis of size 0 is the empty sum.

Operations equate expressions; `equate` solves the equations by binding axes to expressions. Any binding it chooses
makes the two sides the same expression, so whatever is kept of one is kept of the other at the same places: it can be
incomplete, never wrong. What it cannot solve it pins. A *pinned* axis keeps all of its indices for ever.

This file knows nothing of tensors.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ONE",
    "ZERO",
    "Axis",
    "Expr",
    "Indices",
    "coordinates",
    "equate",
    "kept_indices",
    "pin",
    "resolve",
    "size_of",
    "split",
    "sum_of",
    "times",
]

Indices: TypeAlias = NDArray[np.int64]

_serial = count()


class Axis:
    """A variable: `size` indices, which are free, pinned (`pin` says why), or bound to an expression of other axes."""

    __slots__ = ("bound", "origin", "pin", "serial", "size")

    def __init__(self, size: int, *, pin: Any = None, origin: str = "") -> None:
        """`origin` marks axes that did not come with a tensor: "repeat" for those that `expand` makes."""
        self.size = size
        self.pin = pin
        self.origin = origin
        self.bound: Expr | None = None
        self.serial = next(_serial)

    def __repr__(self) -> str:
        return f"{'!' if self.pin is not None else ''}x{self.serial}[{self.size}]"


@dataclass(frozen=True)
class Expr:
    """A sum of terms; a term is a product of axes, the last factor of which may be a sum."""

    terms: tuple["Term", ...]

    @staticmethod
    def of(axis: Axis) -> "Expr":
        """An axis alone."""
        return Expr(((axis,),))

    @property
    def axis(self) -> Axis | None:
        """The axis, where the expression is nothing but one."""
        if len(self.terms) == 1 and len(self.terms[0]) == 1 and isinstance(self.terms[0][0], Axis):
            return self.terms[0][0]
        return None

    def axes(self) -> Iterator[Axis]:
        """Every axis, as often as it occurs, from left to right."""
        for term in self.terms:
            for factor in term:
                if isinstance(factor, Axis):
                    yield factor
                else:
                    yield from factor.axes()

    def __repr__(self) -> str:
        return " + ".join(_show(term) for term in self.terms) or "0"


Term: TypeAlias = tuple[Axis | Expr, ...]

ONE = Expr(((),))
ZERO = Expr(())


def size_of(expr: Expr, sizes: Mapping[Axis, int] | None = None) -> int:
    """How many positions; with `sizes`, after some axes have shrunk."""
    if sizes is None:
        return sum(prod(_factor_size(f, None) for f in term) for term in expr.terms)
    return sum(prod(_factor_size(f, sizes) for f in term) for term in expr.terms)


def times(*factors: Expr) -> Expr:
    """The product in row-major order, in normal form."""
    result = ONE
    for factor in factors:
        result = _times(result, factor)
    return result


def sum_of(parts: Iterable[Expr]) -> Expr:
    """The parts laid end to end."""
    return Expr(tuple(term for part in parts for term in part.terms))


def resolve(expr: Expr) -> Expr:
    """The same expression with every bound axis replaced by what it is bound to."""
    if all(axis.bound is None and axis.size > 1 for axis in expr.axes()):
        return expr
    waiting = _chained(expr)  # innermost first: a long chain of bindings is no deep recursion
    while waiting:
        axis, bound = waiting[-1]
        if deeper := _chained(bound):
            waiting += deeper
        else:
            axis.bound = resolve(bound)
            waiting.pop()
    return sum_of(_resolve_term(term) for term in expr.terms)


def pin(expr: Expr, reason: Any) -> None:
    """Keep every index of `expr` for ever; an axis keeps the first reason it was given."""
    for axis in resolve(expr).axes():
        if axis.pin is None:
            axis.pin = reason


def equate(a: Expr, b: Expr, reason: Any) -> None:
    """Make two expressions of one size the same. What cannot be solved is pinned for `reason`."""
    pending = [(a, b)]
    while pending:
        a, b = (resolve(side) for side in pending.pop())
        if a == b:
            continue
        if size_of(a) != size_of(b):
            raise ValueError(f"{a} and {b} are {size_of(a)} and {size_of(b)} long: never equal.")
        if (axis := a.axis) is not None:
            _bind(axis, b)
        elif (axis := b.axis) is not None:
            _bind(axis, a)
        elif len(a.terms) == len(b.terms) == 1:
            pending += _equate_products(a.terms[0], b.terms[0], reason)
        else:
            first = min(size_of(Expr(side.terms[:1])) for side in (a, b))
            halves = zip(split(a, first), split(b, first), strict=True)
            pending += reversed(list(halves))


def split(expr: Expr, at: int) -> tuple[Expr, Expr]:
    """The first `at` positions and the rest; axes across the cut are split for good."""
    while True:
        expr = resolve(expr)
        position = 0
        for num, term in enumerate(expr.terms):
            if position >= at:
                return Expr(expr.terms[:num]), Expr(expr.terms[num:])
            length = size_of(Expr((term,)))
            if position + length > at:
                _split_term(term, at - position)
                break
            position += length
        else:
            return expr, ZERO


def kept_indices(expr: Expr, kept: Mapping[Axis, Indices], sizes: Mapping[Axis, int]) -> Indices:
    """Which positions of `expr` stay when the axes in `kept` keep only those indices.

    A sum concatenates, a product takes the outer combination; `sizes` are the axes' sizes before.
    """
    offset, parts = 0, [np.zeros(0, dtype=np.int64)]
    for term in expr.terms:
        place, length = np.zeros(1, dtype=np.int64), 1
        for factor in reversed(term):
            size = _factor_size(factor, sizes)
            if not isinstance(factor, Axis):
                own = kept_indices(factor, kept, sizes)
            elif factor in kept:
                own = kept[factor]
            else:
                own = np.arange(size)
            place = (own[:, None] * length + place[None, :]).ravel()
            length *= size
        parts.append(place + offset)
        offset += length
    return np.concatenate(parts)


def coordinates(expr: Expr, axis: Axis, sizes: Mapping[Axis, int]) -> list[Indices]:
    """For each occurrence of `axis` in a product, its index at every position of `expr`; -1 where it does not occur.

    More than one array only where an axis is multiplied by itself (a flattened Gram matrix).
    """
    depth = max((_occurrences(term, axis) for term in expr.terms), default=0)
    columns = [[np.zeros(0, dtype=np.int64)] for _ in range(depth)]
    for term in expr.terms:
        found: list[Indices] = []
        before, total = 1, size_of(Expr((term,)), sizes)
        for factor in term:
            size = _factor_size(factor, sizes)
            after = total // (before * size) if before * size else 0
            inner = (
                ([np.arange(size)] if factor is axis else [])
                if isinstance(factor, Axis)
                else coordinates(factor, axis, sizes)
            )
            found += [np.tile(np.repeat(own, after), before) for own in inner]
            before *= size
        found += [np.full(total, -1, dtype=np.int64)] * (depth - len(found))
        for column, own in zip(columns, found, strict=True):
            column.append(own)
    return [np.concatenate(column) for column in columns]


def _occurrences(term: Term, axis: Axis) -> int:
    return sum(
        (factor is axis)
        if isinstance(factor, Axis)
        else max(_occurrences(inner, axis) for inner in factor.terms)
        for factor in term
    )


def _factor_size(factor: Axis | Expr, sizes: Mapping[Axis, int] | None) -> int:
    if isinstance(factor, Axis):
        return factor.size if sizes is None else sizes.get(factor, factor.size)
    return size_of(factor, sizes)


def _times(a: Expr, b: Expr) -> Expr:
    if a == ONE or not b.terms:
        return b
    if b == ONE:
        return a
    return sum_of(_term_times(term, b) for term in a.terms)


def _term_times(term: Term, b: Expr) -> Expr:
    if not term:
        return b
    if isinstance(last := term[-1], Expr):
        return Expr(((*term[:-1], _times(last, b)),))
    if len(b.terms) == 1:
        return Expr(((*term, *b.terms[0]),))
    return Expr(((*term, b),))


def _chained(expr: Expr) -> list[tuple[Axis, Expr]]:
    """The axes bound to something that holds bound axes itself, with what they are bound to."""
    return [
        (axis, bound)
        for axis in expr.axes()
        if (bound := axis.bound) is not None and any(inner.bound for inner in bound.axes())
    ]


def _resolve_term(term: Term) -> Expr:
    return times(*(_resolve_factor(factor) for factor in term))


def _resolve_factor(factor: Axis | Expr) -> Expr:
    if isinstance(factor, Expr):
        return resolve(factor)
    if factor.bound is not None:
        factor.bound = resolve(factor.bound)
        return factor.bound
    return {0: ZERO, 1: ONE}.get(factor.size, Expr.of(factor))


def _bind(axis: Axis, expr: Expr) -> None:
    other = expr.axis
    if other is not None and other.serial > axis.serial:
        axis, expr, other = (
            other,
            Expr.of(axis),
            axis,
        )  # the older one stays, so that names are stable
    if axis.pin is not None:
        pin(expr, axis.pin)
    if other is not None and axis.origin and not other.origin:
        other.origin = axis.origin
    axis.bound = expr


def _split_term(term: Term, at: int) -> None:
    """Split the axes of a product so that a boundary between terms comes to lie at `at`."""
    axis, rest = term[0], _resolve_term(term[1:])
    assert isinstance(axis, Axis), (
        "a term opens with an axis unless it is a sum, which has boundaries of its own"
    )
    length = size_of(rest)
    whole, remainder = divmod(at, length)
    sizes = [whole, axis.size - whole] if not remainder else [whole, 1, axis.size - whole - 1]
    _bind(axis, sum_of(Expr.of(Axis(size, origin=axis.origin)) for size in sizes if size))
    if remainder:
        split(rest, remainder)


def _equate_products(a: Term, b: Term, reason: Any) -> list[tuple[Expr, Expr]]:
    """One step on a product against a product: peel from the left, then from the right, else pin."""
    for left in (True, False):
        first, second = (side[0 if left else -1] for side in (a, b))
        rests = [_resolve_term(side[1:] if left else side[:-1]) for side in (a, b)]
        if first == second:
            return [(rests[0], rests[1])]
        if not isinstance(first, Axis) or not isinstance(second, Axis):
            continue
        if first.size == second.size:
            return [(rests[0], rests[1]), (Expr.of(first), Expr.of(second))]
        large, small = (first, second) if first.size > second.size else (second, first)
        if large.size % small.size == 0:
            other = Expr.of(Axis(large.size // small.size, origin=large.origin))
            factors = (Expr.of(small), other) if left else (other, Expr.of(small))
            _bind(large, times(*factors))
            return [(Expr((a,)), Expr((b,)))]
    pin(Expr((a,)), reason)
    pin(Expr((b,)), reason)
    return []


def _show(term: Term) -> str:
    return "·".join(repr(f) if isinstance(f, Axis) else f"({f})" for f in term) or "1"
