"""The four kinds of curvature, as switches on one set of rules.

A rule turns values x and tangents x̂ into a value y and a tangent ŷ. In its backward the value x receives two parts:
one from the adjoint of y, always; one from the adjoint of ŷ, through the rule's dependence on x. That second part is
curvature, and the kinds differ only in which of it they keep and in how the backward is started:

| kind           | curvature kept                             | adjoint of z starts as | adjoint of ẑ starts as |
|----------------|--------------------------------------------|------------------------|------------------------|
| `hessian`      | all                                        | (∇²loss) ẑ             | ∂loss/∂z               |
| `functional`   | all                                        | 0                      | ∂loss/∂z               |
| `connectivity` | products of two things that depend on θ    | 0                      | ∂loss/∂z               |
| `ggn`          | none                                       | (∇²loss) ẑ             | 0                      |

The paper splits the products: for weight × input, the input's share is the *upper series* term of the layers below, the
weight's share is the layer's own *lower series* term; for a product of two activations both shares are *parallel*.
"""

from dataclasses import dataclass, replace

from apoptosis.errors import ConfigError

__all__ = ["KINDS", "TERMS", "Kind", "Switches", "find_kind"]


@dataclass(frozen=True)
class Switches:
    """Which second-order parts the rules keep."""

    curved: bool = False
    """Everything but products: activations, norms, softmax, divisions, powers."""
    upper: bool = False
    """Weight × input, the part that flows down into the input."""
    lower: bool = False
    """Weight × input, the part that belongs to the weight."""
    parallel: bool = False
    """Activation × activation, both parts."""

    def product(self, *, of_weight: bool, by_weight: bool) -> bool:
        """Whether d(x̂·y)/dy is kept, for x `of_weight` and y `by_weight`."""
        if of_weight and not by_weight:
            return self.upper
        if by_weight and not of_weight:
            return self.lower
        return self.parallel

    def inside_norm(self) -> "Switches":
        """A hand-written norm is one frozen operation, but for the product with its own weight."""
        return replace(self, parallel=self.parallel and self.curved)


@dataclass(frozen=True)
class Kind:
    """A kind of curvature: what the rules keep, and which adjoints start the backward."""

    name: str
    kept: Switches
    starts_value: bool
    starts_tangent: bool


_PRODUCTS = Switches(upper=True, lower=True, parallel=True)
_EVERYTHING = replace(_PRODUCTS, curved=True)

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("connectivity", _PRODUCTS, starts_value=False, starts_tangent=True),
        Kind("functional", _EVERYTHING, starts_value=False, starts_tangent=True),
        Kind("hessian", _EVERYTHING, starts_value=True, starts_tangent=True),
        Kind("ggn", Switches(), starts_value=True, starts_tangent=False),
    )
}

TERMS: dict[str, Kind] = {
    "upper": Kind("upper", Switches(upper=True), starts_value=False, starts_tangent=True),
    "lower": Kind("lower", Switches(lower=True), starts_value=False, starts_tangent=True),
    "parallel": Kind("parallel", Switches(parallel=True), starts_value=False, starts_tangent=True),
}


def find_kind(name: str) -> Kind:
    """The kind called `name`, or an error that lists all."""
    try:
        return KINDS[name]
    except KeyError:
        raise ConfigError(
            f"Curvature of kind {name!r} was asked for; there are {', '.join(KINDS)}."
        ) from None
