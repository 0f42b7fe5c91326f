"""Random axis expressions as plain values, and what they mean: the explicit list of their positions.

A position is the tuple of its coordinates (axis, index), from the slowest to the fastest. Nothing here follows the
algebra: a sum is the concatenation of lists, a product is `itertools.product`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product
from typing import TypeAlias

import numpy as np
from hypothesis import strategies as st

from apoptosis.structure import axes
from apoptosis.structure.axes import Axis, Expr, Indices

__all__ = [
    "Equate",
    "Leaf",
    "Pin",
    "Position",
    "Product",
    "Recipe",
    "Split",
    "Step",
    "Sum",
    "World",
    "kept_places",
    "positions",
    "programs",
    "recipes",
]

Position: TypeAlias = tuple[tuple[Axis, int], ...]

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 18)


@dataclass(frozen=True)
class Leaf:
    """An axis by size and name: equal leaves are the same axis."""

    size: int
    name: str = "a"

    def leaves(self) -> Iterator["Leaf"]:
        yield self


@dataclass(frozen=True)
class Sum:
    """Parts laid end to end."""

    parts: tuple["Recipe", ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def leaves(self) -> Iterator[Leaf]:
        return chain.from_iterable(part.leaves() for part in self.parts)


@dataclass(frozen=True)
class Product:
    """Factors in row-major order."""

    factors: tuple["Recipe", ...]

    @property
    def size(self) -> int:
        return int(np.prod([factor.size for factor in self.factors], dtype=int))

    def leaves(self) -> Iterator[Leaf]:
        return chain.from_iterable(factor.leaves() for factor in self.factors)


Recipe: TypeAlias = Leaf | Sum | Product


@dataclass(frozen=True)
class Equate:
    """Two recipes of one size are the same from here on."""

    left: Recipe
    right: Recipe


@dataclass(frozen=True)
class Split:
    """A recipe is cut in two after `at` positions."""

    whole: Recipe
    at: int


@dataclass(frozen=True)
class Pin:
    """A recipe keeps all that it has."""

    whole: Recipe


Step: TypeAlias = Equate | Split | Pin


class World:
    """The axes behind the leaves, made on first use, as a trace makes them."""

    def __init__(self) -> None:
        self.axes: dict[Leaf, Axis] = {}

    def axis(self, leaf: Leaf) -> Axis:
        return self.axes.setdefault(leaf, Axis(leaf.size))

    def expr(self, recipe: Recipe) -> Expr:
        """The recipe in the algebra, not resolved."""
        match recipe:
            case Leaf():
                return Expr.of(self.axis(recipe))
            case Sum(parts):
                return axes.sum_of([self.expr(part) for part in parts])
            case Product(factors):
                return axes.times(*map(self.expr, factors))

    def positions(self, recipe: Recipe) -> list[Position]:
        """Every position of the recipe, in terms of its own axes."""
        match recipe:
            case Leaf():
                return [((self.axis(recipe), index),) for index in range(recipe.size)]
            case Sum(parts):
                return [position for part in parts for position in self.positions(part)]
            case Product(factors):
                return [_joined(row) for row in product(*map(self.positions, factors))]

    def meaning(self, recipe: Recipe) -> list[Position]:
        """Every position, each coordinate replaced by what its axis has been bound to since."""
        known = {
            self.axis(leaf): positions(axes.resolve(Expr.of(self.axis(leaf))))
            for leaf in recipe.leaves()
        }
        return [
            _joined(known[axis][index] for axis, index in position)
            for position in self.positions(recipe)
        ]


def positions(expr: Expr, sizes: Mapping[Axis, int] | None = None) -> list[Position]:
    """Every position of an expression of the algebra; with `sizes`, after some axes have shrunk."""
    found: list[Position] = []
    for term in expr.terms:
        columns: list[list[Position]] = []
        for factor in term:
            if isinstance(factor, Axis):
                size = (sizes or {}).get(factor, factor.size)
                columns.append([((factor, index),) for index in range(size)])
            else:
                columns.append(positions(factor, sizes))
        found += map(_joined, product(*columns))
    return found


def _joined(parts: "Iterator[Position] | tuple[Position, ...]") -> Position:
    return tuple(chain.from_iterable(parts))


@st.composite
def recipes(draw: st.DrawFn, size: int | None = None, depth: int = 3) -> Recipe:
    """A recipe of the given size, or of any: few names, so that axes meet again; empty and single parts mixed in."""
    if size is None:
        size = draw(st.sampled_from(SIZES))
    leaf = Leaf(size, draw(st.sampled_from("abc")))
    divisors = [d for d in range(2, size) if size % d == 0]
    kinds = ["leaf", "sum", "sum"] if size > 1 else ["leaf"]
    kind = draw(st.sampled_from(kinds + ["product"] * 3 * bool(divisors))) if depth else "leaf"
    if kind == "leaf":
        return leaf
    if kind == "sum":
        first = draw(st.integers(1, size - 1))
        sizes, make, neutral = [first, size - first], Sum, 0
    else:
        first = draw(st.sampled_from(divisors))
        sizes, make, neutral = [first, size // first], Product, 1
    if draw(st.integers(0, 7)) == 0:
        sizes.insert(draw(st.integers(0, 2)), neutral)
    return make(tuple(draw(recipes(size=each, depth=depth - 1)) for each in sizes))


@st.composite
def programs(draw: st.DrawFn, least: int = 2, most: int = 6) -> list[Step]:
    """Equations over shared axes, some cuts, and pins on axes that the equations use."""
    program = draw(st.lists(_equations_and_cuts(), min_size=least, max_size=most))
    used = {leaf for step in program for leaf in _leaves(step) if leaf.size > 1}
    for _ in range(draw(st.sampled_from((0, 1, 2))) if used else 0):
        leaf = draw(st.sampled_from(sorted(used, key=repr)))
        program.insert(draw(st.integers(0, len(program))), Pin(leaf))
    return program


@st.composite
def _equations_and_cuts(draw: st.DrawFn) -> Step:
    whole = draw(recipes())
    if draw(st.integers(0, 5)) == 0:
        return Split(whole, draw(st.integers(0, whole.size)))
    return Equate(whole, draw(recipes(size=whole.size)))


def _leaves(step: Step) -> Iterator[Leaf]:
    match step:
        case Equate(left, right):
            return chain(left.leaves(), right.leaves())
        case Split(whole, _) | Pin(whole):
            return whole.leaves()


def kept_places(places: list[Position], kept: Mapping[Axis, Indices]) -> list[int]:
    """The positions whose coordinates are all kept."""
    allowed = {axis: set(indices.tolist()) for axis, indices in kept.items()}
    return [
        place
        for place, position in enumerate(places)
        if all(axis not in allowed or index in allowed[axis] for axis, index in position)
    ]
