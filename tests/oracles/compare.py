"""Comparators of products: they raise, and their message names the parameters that differ most.

The error is ‖a − b‖ / ‖b‖ over all parameters together, and the same per parameter, where a
parameter whose own product is small is measured against `FLOOR` of the whole (its rounding errors
come from sums of the size of the whole). A product that cancels to nothing (`connectivity` of a
linear model, θ along a scale invariance) is measured against `FLOOR` of `scale`, the size of what
it is a sum of: the gradient, or |H||δ|.
"""

import math
from collections.abc import Mapping

from torch import Tensor

__all__ = ["EXACT", "FINITE", "assert_products_close", "relative_error"]

EXACT = 1e-10  # float64, two exact methods: rounding alone
FINITE = 1e-6  # float64, against central differences
FLOOR = 1e-3


def relative_error(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, scale: float = 0.0
) -> float:
    """The largest of the relative errors, over everything and per parameter."""
    return max(_errors(actual, expected, scale).values(), default=0.0)


def assert_products_close(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    tolerance: float,
    scale: float = 0.0,
    what: str = "",
) -> None:
    """Raise unless names and shapes agree and every relative error is within `tolerance`."""
    errors = _errors(actual, expected, scale)
    worst = sorted(errors.items(), key=lambda item: -item[1])
    if not worst or not worst[0][1] <= tolerance:
        lines = "\n".join(f"  {name}: {error:.3g}" for name, error in worst[:6])
        raise AssertionError(
            f"{what} differs by more than {tolerance:g}:\n{lines or '  nothing to compare'}"
        )


def _errors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], scale: float
) -> dict[str, float]:
    if set(actual) != set(expected):
        raise AssertionError(
            f"names differ: only actual {sorted(set(actual) - set(expected))}, "
            f"only expected {sorted(set(expected) - set(actual))}"
        )
    gaps, sizes = {}, {}
    for name, want in expected.items():
        got = actual[name].detach()
        if got.shape != want.shape:
            raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        gaps[name] = (got.double() - want.detach().double()).norm().item()
        sizes[name] = want.detach().double().norm().item()
    whole = math.hypot(*sizes.values())
    floor = FLOOR * max(whole, scale)
    errors = {name: _ratio(gaps[name], max(sizes[name], floor)) for name in gaps}
    errors["(all together)"] = _ratio(math.hypot(*gaps.values()), max(whole, floor))
    return errors


def _ratio(gap: float, size: float) -> float:
    if math.isnan(gap) or math.isnan(size):
        return math.inf
    return 0.0 if gap == 0 else gap / size if size else math.inf
