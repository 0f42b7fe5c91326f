"""Linear layers and convolutions: a weight times an input, the heart of the cost.

With δ = θ, y = W∗x + b has the tangent

    ŷ = δW∗x + W∗x̂ + δb = y + W∗x̂ = layer(x + x̂) − … + …,

so value and tangent take two products instead of three. Backward, with A, B the adjoints of y, ŷ (B is the ordinary
∂L/∂y):

    Hθ for W   = A∗x + B∗x̂      (the two series terms: from above, from below)
    Hθ for b   = Σ A
    adjoint x̂ = Wᵀ∗B            adjoint x = Wᵀ∗A + Wᵀ∗B

Four products, 2.0 times a training step in all. Where x and x̂ lie side by side in one buffer (`stacking`) each pair
of products is one call on a doubled batch. The gradient B∗x costs one product more and is computed only where it is
asked for: it is the adjoint of δW.

The identity needs δ = θ on all of the layer's parameters. Any other direction, frozen parameters and weights that are
themselves computed take the general rule, δW∗x + W∗x̂ + δb.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from apoptosis.curvature.adjoints import Saved, adjoint, apply_pair, save
from apoptosis.curvature.duals import Dual, add_tangents, lift, same_data
from apoptosis.curvature.rules import Sample, inputs, keep, sample, tangent_rule
from apoptosis.curvature.stacking import halves, stack_of, unviewed
from apoptosis.curvature.switches import Switches

__all__: list[str] = []

aten = torch.ops.aten


@dataclass(frozen=True)
class Convolution:
    """Geometry of a convolution; the products it makes of a layer."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    transposed: bool = False
    output_padding: Sequence[int] = (0,)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """W∗x + b."""
        return aten.convolution(x, weight, bias, *self._geometry())

    def backward(
        self, adjoint: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """(Wᵀ∗a, a∗x), those that are wanted."""
        to_x, to_weight, _ = aten.convolution_backward(
            adjoint, x, weight, None, *self._geometry(), (*wanted, False)
        )
        return to_x, to_weight

    def sum_bias(self, adjoint: Tensor) -> Tensor:
        """Σ over samples and positions."""
        return adjoint.sum((0, *range(2, adjoint.dim())))

    def spread_bias(self, bias: Tensor, like: Tensor) -> Tensor:
        """The bias at every sample and position."""
        return bias.view(-1, *(1,) * (like.dim() - 2)).expand_as(like)

    def _geometry(self) -> tuple[Any, ...]:
        return (
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )


class Matrix:
    """The products of a linear layer."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b."""
        return F.linear(x, weight, bias)

    def backward(
        self, adjoint: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """(a W, aᵀ x), those that are wanted."""
        to_x = adjoint @ weight if wanted[0] else None
        to_weight = None
        if wanted[1]:
            to_weight = adjoint.flatten(0, -2).t() @ x.flatten(0, -2)
        return to_x, to_weight

    def sum_bias(self, adjoint: Tensor) -> Tensor:
        """Σ over rows."""
        return adjoint.flatten(0, -2).sum(0)

    def spread_bias(self, bias: Tensor, like: Tensor) -> Tensor:
        """The bias in every row."""
        return bias.expand_as(like)


@dataclass(frozen=True)
class Plain:
    """A layer as torch calls it, for the forms the other two do not cover: unbatched inputs, named paddings."""

    function: Callable[..., Tensor]
    options: dict[str, Any]
    dims: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """W∗x + b."""
        return self.function(x, weight, bias, **self.options)

    def spread_bias(self, bias: Tensor, like: Tensor) -> Tensor:
        """The bias at every position."""
        return bias.view(-1, *(1,) * self.dims).expand_as(like)


Products = Convolution | Matrix | Plain


Doubling = Convolution | Matrix


class _Layer(torch.autograd.Function):
    """The layer with δ = θ. Inputs δW, δb are the parameters' tangents: their adjoints are the gradient, if wanted."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - each input has an adjoint
        ctx: Any,
        kept: Switches,
        products: Doubling,
        x: Tensor,
        tangent: Tensor | None,
        weight: Tensor,
        weight_tangent: Tensor,  # noqa: ARG004 - an input so that its adjoint can be asked for
        bias: Tensor | None,
        bias_tangent: Tensor | None,  # noqa: ARG004
    ) -> tuple[Tensor, Tensor]:
        ctx.kept, ctx.products = kept, products
        ctx.set_materialize_grads(False)
        save(ctx, x, tangent if kept.lower else None, weight)
        return _forward(products, x, tangent, weight, bias)

    @staticmethod
    @adjoint
    def backward(ctx: Any, saved: Saved, *adjoints: Tensor | None) -> tuple[Tensor | None, ...]:
        x, tangent, weight = saved
        needs: dict[str, bool] = dict(zip(_NAMES, ctx.needs_input_grad[2:], strict=True))
        found = _Adjoints(ctx.products, ctx.kept, x, tangent, weight)
        found.run(*adjoints, needs=needs)
        return None, None, *(found.by_name.get(name) for name in _NAMES)


_NAMES = ("x", "tangent", "weight", "weight_tangent", "bias", "bias_tangent")


def _forward(
    products: Doubling, x: Tensor, tangent: Tensor | None, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    both = None if tangent is None else stack_of(x, tangent)
    if tangent is None or both is None:
        y = unviewed(products.forward(x, weight, bias))
        if tangent is None:
            return y, y.clone()
        return y, unviewed(products.forward(tangent, weight, None)).add_(y)
    out = products.forward(both, weight, None)
    y, y_tangent = halves(out)
    if bias is not None:
        y.add_(products.spread_bias(bias, y))
    y_tangent.add_(y)
    return y, y_tangent


class _Adjoints:
    """The backward of one layer, by parts that are there and wanted."""

    def __init__(
        self,
        products: Doubling,
        kept: Switches,
        x: Tensor,
        tangent: Tensor | None,
        weight: Tensor,
    ) -> None:
        self.products, self.kept = products, kept
        self.x, self.tangent, self.weight = x, tangent, weight
        self.by_name: dict[str, Tensor | None] = {}

    def run(
        self, on_value: Tensor | None, on_tangent: Tensor | None, needs: dict[str, bool]
    ) -> None:
        flows_up = self.kept.upper
        down = needs["x"] or needs["tangent"]
        if not self._run_stacked(on_value, on_tangent, needs):
            wants_tangent = needs["tangent"] or (needs["x"] and flows_up)
            from_value = self._one(on_value, self.x, wanted=(needs["x"], needs["weight"]))
            source, lower = self.x, False
            if needs["weight"] and self.tangent is not None:
                source, lower = self.tangent, True
            from_tangent = self._one(on_tangent, source, wanted=(down and wants_tangent, lower))
            self.by_name["weight"] = _total(from_value[1], from_tangent[1])
            self.by_name["tangent"] = from_tangent[0] if needs["tangent"] else None
            self.by_name["x"] = from_value[0]
            if flows_up and needs["x"]:
                self.by_name["x"] = _total(from_value[0], from_tangent[0])
        if needs["bias"] and on_value is not None:
            self.by_name["bias"] = self.products.sum_bias(on_value)
        if on_tangent is not None and needs["weight_tangent"]:
            self.by_name["weight_tangent"] = self._one(on_tangent, self.x, (False, True))[1]
        if on_tangent is not None and needs["bias_tangent"]:
            self.by_name["bias_tangent"] = self.products.sum_bias(on_tangent)

    def _one(
        self, adjoint: Tensor | None, x: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        if adjoint is None or not any(wanted):
            return None, None
        return self.products.backward(adjoint, x, self.weight, wanted)

    def _run_stacked(
        self, on_value: Tensor | None, on_tangent: Tensor | None, needs: dict[str, bool]
    ) -> bool:
        """Both halves in one call, where everything is there and lies side by side."""
        everything = needs["x"] and needs["tangent"] and needs["weight"] and self.kept.upper
        if not everything or self.tangent is None or on_value is None or on_tangent is None:
            return False
        inputs_, adjoints = stack_of(self.x, self.tangent), stack_of(on_value, on_tangent)
        if inputs_ is None or adjoints is None:
            return False
        down, self.by_name["weight"] = self.products.backward(
            adjoints, inputs_, self.weight, (True, True)
        )
        assert down is not None, "asked for"
        to_x, to_tangent = halves(down)
        self.by_name["x"], self.by_name["tangent"] = to_x.add_(to_tangent), to_tangent
        return True


def _total(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a + b into the memory of a, which is this rule's own."""
    if a is None or b is None:
        return b if a is None else a
    return a.add_(b)


def layer(kept: Switches, products: Doubling, x: Any, weight: Any, bias: Any) -> Dual:
    """(W∗x + b)' = δW∗x + W∗x' + δb."""
    x, weight = lift(x), lift(weight)
    b = Dual(None) if bias is None else lift(bias)  # pyright: ignore[reportArgumentType]
    if x.value is weight.value:  # a tensor times itself is no product of two things
        kept = replace(kept, upper=kept.curved, lower=kept.curved, parallel=kept.curved)
        return _general(kept, products, x, weight, b)
    identical = weight.weight and same_data(weight.value, weight.tangent)
    if identical and (bias is None or same_data(b.value, b.tangent)):
        parameters = (weight.value, weight.tangent, b.value, b.tangent)
        return Dual(*apply_pair(_Layer, kept, products, x.value, x.tangent, *parameters))
    return _general(kept, products, x, weight, b)


def _general(kept: Switches, products: Products, x: Dual, weight: Dual, bias: Dual) -> Dual:
    forward = products.forward
    value = forward(x.value, weight.value, bias.value)
    moved = fed = None
    if weight.tangent is not None:
        flows = kept.product(of_weight=weight.weight, by_weight=x.weight)
        moved = forward(keep(x.value, flows), weight.tangent, bias.tangent)
    elif bias.tangent is not None:
        moved = products.spread_bias(bias.tangent, value)
    if x.tangent is not None:
        flows = kept.product(of_weight=x.weight, by_weight=weight.weight)
        fed = forward(x.tangent, keep(weight.value, flows), None)
    return Dual(value, add_tangents(moved, fed))


def _plain(kept: Switches, products: Products, x: Any, weight: Any, bias: Any) -> Dual:
    b = Dual(None) if bias is None else lift(bias)  # pyright: ignore[reportArgumentType]
    return _general(kept, products, lift(x), lift(weight), b)


_MATRIX = Matrix()


@tangent_rule(
    "linear",
    family="layer",
    samples=lambda: [
        sample(*inputs((2, 3), (4, 3), (4,))),
        sample(*inputs((2, 5, 3), (4, 3))),
        sample(*inputs((3,), (4, 3), (4,))),
    ],
)
def linear(kept: Switches, x: Any, weight: Any, bias: Any = None) -> Dual:
    """(x Wᵀ + b)' = x δWᵀ + x' Wᵀ + δb."""
    if lift(x).value.dim() < 2 or lift(weight).value.dim() < 2:
        return _plain(kept, _MATRIX, x, weight, bias)
    return layer(kept, _MATRIX, x, weight, bias)


def _register_convolution(name: str, dims: int, function: Callable[..., Tensor]) -> None:
    def samples() -> list[Sample]:
        x, w, b = inputs((2, 4, *(5,) * dims), (6, 2, *(3,) * dims), (6,))
        return [
            sample(x, w, b, stride=2, padding=1, groups=2),
            sample(x[:, :2].contiguous(), w, None, dilation=2),
            sample(x[:, :2].contiguous(), w, b, padding="same"),
            sample(x[0, :2].contiguous(), w, b),
        ]

    @tangent_rule(name, family="layer", samples=samples)
    def convolution(  # noqa: PLR0913, PLR0917 - torch's signature
        kept: Switches,
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Dual:
        """(W∗x + b)' = δW∗x + W∗x' + δb."""
        if isinstance(padding, str) or lift(x).value.dim() != dims + 2:
            options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
            return _plain(kept, Plain(function, options, dims), x, weight, bias)
        geometry = Convolution(
            _tuple(stride, dims), _tuple(padding, dims), _tuple(dilation, dims), groups
        )
        return layer(kept, geometry, x, weight, bias)


def _register_transposed(name: str, dims: int, function: Callable[..., Tensor]) -> None:
    def samples() -> list[Sample]:
        x, w, b = inputs((2, 4, *(3,) * dims), (4, 3, *(3,) * dims), (6,))
        return [
            sample(x, w, b, stride=2, padding=1, output_padding=1, groups=2),
            sample(x[0], w, None),
        ]

    @tangent_rule(name, family="layer", samples=samples)
    def transposed(  # noqa: PLR0913, PLR0917 - torch's signature
        kept: Switches,
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Dual:
        """(Wᵀ∗x + b)' = δWᵀ∗x + Wᵀ∗x' + δb."""
        if lift(x).value.dim() != dims + 2:
            options = {
                "stride": stride,
                "padding": padding,
                "output_padding": output_padding,
                "groups": groups,
                "dilation": dilation,
            }
            return _plain(kept, Plain(function, options, dims), x, weight, bias)
        geometry = Convolution(
            _tuple(stride, dims),
            _tuple(padding, dims),
            _tuple(dilation, dims),
            groups,
            transposed=True,
            output_padding=_tuple(output_padding, dims),
        )
        return layer(kept, geometry, x, weight, bias)


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    return (
        (int(value),) * dims
        if isinstance(value, int)
        else tuple(value) * (dims if len(value) == 1 else 1)
    )


for _dims in (1, 2, 3):
    _register_convolution(f"conv{_dims}d", _dims, getattr(torch, f"conv{_dims}d"))
    _register_transposed(
        f"conv_transpose{_dims}d", _dims, getattr(torch, f"conv_transpose{_dims}d")
    )
