"""Operations whose axes fit letters: broadcasting, and products as einsum writes them."""

from collections.abc import Sequence

from apoptosis.structure import axes as algebra
from apoptosis.structure.axes import ONE, Expr
from apoptosis.structure.facts import ActivationProduct
from apoptosis.structure.flows import AnyOf, Flow, Through
from apoptosis.structure.program import Value
from apoptosis.structure.rules import Step

__all__ = [
    "broadcast",
    "product",
    "product_flow",
]


def broadcast(step: Step, *values: Value) -> list[Expr]:
    """The axes of values broadcast against each other, equated where they meet."""
    ndim = max((value.ndim for value in values), default=0)
    result: list[Expr] = []
    for dim in range(-ndim, 0):
        meeting = [step.axes(v)[dim] for v in values if v.ndim >= -dim and v.shape[dim] != 1]
        for other in meeting[1:]:
            step.equal(meeting[0], other)
        result.append(algebra.resolve(meeting[0]) if meeting else ONE)
    return result


def product(step: Step, operands: Sequence[tuple[Value, str]], result: str) -> list[Expr]:
    """A sum of products in letters, as einsum: equations, cost, contractions, zeros and roles follow from them.

    Returns the axes of the result, without stating them: a bias may come on top. Dimensions of size 1 broadcast.
    """
    places: dict[str, list[tuple[Value, int]]] = {}
    for value, letters in operands:
        for dim, letter in enumerate(letters):
            if value.shape[dim] != 1:
                places.setdefault(letter, []).append((value, dim))
    exprs: dict[str, Expr] = {}
    for letter, found in places.items():
        first, *others = [step.axes(value)[dim] for value, dim in found]
        for other in others:
            step.equal(first, other)
        exprs[letter] = first
    for letter, found in places.items():
        if letter not in result:
            step.contract(exprs[letter], *found)
        for value, dim in found:
            step.role(value, dim, _role_of(letter, found, result))
    step.cost(*exprs.values())
    _note_activation_product(step, operands, exprs, result)
    return [algebra.resolve(exprs.get(letter, ONE)) for letter in result]


def product_flow(operands: Sequence[tuple[Value, str]], result: str) -> Flow:
    """Where a product in letters is zero."""
    return AnyOf(
        tuple(
            Through(value, tuple(letters.find(x) if x in letters else None for x in result))
            for value, letters in operands
        )
    )


def _role_of(letter: str, found: list[tuple[Value, int]], result: str) -> str:
    if letter not in result:
        return "consumer"
    return "producer" if len(found) == 1 else "carrier"


def _note_activation_product(
    step: Step, operands: Sequence[tuple[Value, str]], exprs: dict[str, Expr], result: str
) -> None:
    if len(operands) != 2 or any(value.fixed for value, _ in operands):
        return
    (a, a_letters), (b, b_letters) = operands
    both = [x for x in exprs if x in a_letters and x in b_letters]
    step.facts.product = ActivationProduct(
        (a, b),
        contracted=tuple(exprs[x] for x in both if x not in result),
        shared=tuple(exprs[x] for x in both if x in result),
        own=tuple(exprs[x] for x in exprs if x in b_letters and x not in a_letters and x in result),
    )
