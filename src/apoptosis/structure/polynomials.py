"""A cost as a polynomial in the sizes of some axes, everything else a number: for asking thousands of times.

Costs are sums of products of expressions, which are sums of products of axes; multiplied out they are

    c(n) = Σ_m  a_m · n_{i(m,1)} · n_{i(m,2)} · …        whole numbers throughout.

Evaluated for all terms at once in numpy a network's cost takes tens of microseconds, against milliseconds by walking
its expressions.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apoptosis.structure.axes import Axis, Expr

__all__ = ["Polynomial"]

_Terms = Counter[tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Polynomial:
    """`coefficients` (terms,) and, per term, the numbers of the variables it multiplies, `factors` (terms, degree).

    Terms of lower degree are filled up with a variable that is always 1, the last one.
    """

    coefficients: NDArray[np.int64]
    factors: NDArray[np.int64]
    num_variables: int

    @staticmethod
    def of(
        costs: Iterable[tuple[Expr, ...]], variables: Sequence[Axis], sizes: Mapping[Axis, int]
    ) -> "Polynomial":
        """Multiply out; axes that are no variables have their `sizes`."""
        places = {axis: place for place, axis in enumerate(variables)}
        total: _Terms = Counter()
        for cost in costs:
            product: _Terms = Counter({(): 1})
            for expr in cost:
                product = _times(product, _terms(expr, places, sizes))
            total.update(product)
        degree = max((len(term) for term in total), default=0)
        one = len(variables)
        factors = [[*term, *[one] * (degree - len(term))] for term in total]
        return Polynomial(
            np.array(list(total.values()), dtype=np.int64),
            np.array(factors, dtype=np.int64).reshape(len(total), degree),
            len(variables),
        )

    def __call__(self, counts: NDArray[np.int64]) -> int:
        """The cost at these sizes of the variables."""
        sizes = np.append(counts, 1)
        return int((self.coefficients * sizes[self.factors].prod(axis=1)).sum())

    def part(self, variables: Iterable[int]) -> "Polynomial":
        """The terms that depend on any of these variables: what changes when they do."""
        own = np.isin(self.factors, list(variables)).any(axis=1)
        return Polynomial(self.coefficients[own], self.factors[own], self.num_variables)


def _terms(expr: Expr, places: Mapping[Axis, int], sizes: Mapping[Axis, int]) -> _Terms:
    found: _Terms = Counter()
    for term in expr.terms:
        product: _Terms = Counter({(): 1})
        for factor in term:
            if isinstance(factor, Expr):
                own = _terms(factor, places, sizes)
            elif factor in places:
                own = Counter({(places[factor],): 1})
            else:
                own = Counter({(): sizes.get(factor, factor.size)})
            product = _times(product, own)
        found.update(product)
    return found


def _times(a: _Terms, b: _Terms) -> _Terms:
    found: _Terms = Counter()
    for left, x in a.items():
        for right, y in b.items():
            found[tuple(sorted(left + right))] += x * y
    return found
