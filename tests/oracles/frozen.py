"""The definition of `connectivity`, taken at its word.

A network is written as a function `net(p, x, ops)` of its parameters `p` by name. Weight × input
and sums stand there as they are; `ops.frozen(f, *xs)` marks an operation that is no product,
`ops.product(f, u, v)` a product of two activations. The same text then runs three ways:

- `Plain`: as written, the network itself;
- `Linearised`: every frozen f replaced by f(x₀) + J_f(x₀)(x − x₀), where x₀ is recorded in a run at
  θ₀ and J_f is a dense Jacobian built from ordinary backwards. With the loss replaced by ⟨c, z⟩ its
  Hessian *is* the connectivity Hessian;
- `Linearised(series=True)`: products of activations replaced by their linearisation too. Its
  Hessian holds the paper's two series terms, what is missing from the former is the parallel term.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.task import Task
from oracles.brute_force import dense_hessian, flatten, unflatten
from oracles.differences import line_derivative
from oracles.evaluation import SEED, seeded

__all__ = [
    "Linearised",
    "Plain",
    "Terms",
    "connectivity_by_differences",
    "connectivity_matrix",
    "paper_split",
]

Net = Callable[[dict[str, Tensor], Any, "Plain"], Tensor]
Function = Callable[..., Tensor]


class Plain:
    """Operations as they are."""

    def frozen(self, f: Function, *xs: Tensor) -> Tensor:
        """An operation that is no product of two things that depend on θ."""
        return f(*xs)

    def product(self, f: Function, u: Tensor, v: Tensor) -> Tensor:
        """A product of two activations, bilinear in `u` and `v`."""
        return f(u, v)


class Linearised(Plain):
    """Operations replaced by their first-order expansion at what the first run saw."""

    def __init__(self, *, series: bool = False) -> None:
        """Start recording; `replay` ends it."""
        self.series = series
        self.recorded: list[tuple[tuple[Tensor, ...], Tensor, list[Tensor]]] = []
        self.position: int | None = None

    def replay(self) -> "Linearised":
        """From here on the calls repeat those recorded."""
        self.position = 0
        return self

    def frozen(self, f: Function, *xs: Tensor) -> Tensor:
        """f(x₀) + Σ J(x₀)(x − x₀)."""
        if self.position is None:
            base = tuple(x.detach() for x in xs)
            value = f(*base).detach()
            jacobians = torch.autograd.functional.jacobian(f, base)
            self.recorded.append((base, value, [j.reshape(value.numel(), -1) for j in jacobians]))
            return f(*xs)
        base, value, jacobians = self.recorded[self.position]
        self.position += 1
        change = sum(j @ (x - x0).flatten() for j, x, x0 in zip(jacobians, xs, base, strict=True))
        return value + change.view_as(value)

    def product(self, f: Function, u: Tensor, v: Tensor) -> Tensor:
        """As it is, or linearised when only the series terms are wanted."""
        return self.frozen(f, u, v) if self.series else f(u, v)


class Terms:
    """The paper's three terms and their sum, by parameter name."""

    def __init__(
        self, upper: dict[str, Tensor], lower: dict[str, Tensor], parallel: dict[str, Tensor]
    ) -> None:
        """Keep the three."""
        self.upper, self.lower, self.parallel = upper, lower, parallel


def surrogate(
    net: Net, model: nn.Module, batch: Any, task: Task | None = None, *, series: bool = False
) -> Callable[[], Tensor]:
    """The scalar ⟨c, z⟩ of the network with frozen operations, as a function of the model's current parameters."""
    task = task or Task.classification()
    (x,), _ = task.inputs(batch)
    params = dict(model.named_parameters())
    ops = Linearised(series=series)
    with seeded(SEED):
        z = net(params, x, ops).detach().requires_grad_()
    (slope,) = torch.autograd.grad(task.loss(z, batch), z)
    return lambda: (slope * net(params, x, ops.replay())).sum()


def connectivity_matrix(
    net: Net, model: nn.Module, batch: Any, task: Task | None = None, *, series: bool = False
) -> Tensor:
    """The connectivity Hessian (P, P) of the network that `net` spells out, at the model's parameters."""
    return dense_hessian(
        surrogate(net, model, batch, task, series=series), list(model.parameters())
    )


def connectivity_by_differences(
    net: Net, model: nn.Module, batch: Any, task: Task | None, direction: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The same Hessian times a direction, from first derivatives of the surrogate."""
    scalar = surrogate(net, model, batch, task)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def slope(step: float) -> Tensor:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name] + step * direction[name])
        grads = torch.autograd.grad(
            scalar(), list(model.parameters()), materialize_grads=True, allow_unused=True
        )
        return torch.cat([g.flatten() for g in grads])

    vector = line_derivative(slope)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(start[name])
    return unflatten(vector, model)


def paper_split(
    net: Net,
    model: nn.Module,
    batch: Any,
    task: Task | None = None,
    direction: dict[str, Tensor] | None = None,
) -> Terms:
    """Upper, lower and parallel term of a network whose parameters are named in the order of its
    forward.

    The series Hessian couples a weight with weights before it (their tangent comes in from below)
    and after it (they act on its output); a bilinear layer does not couple with itself. So the
    strictly upper triangle, in the order of the forward, is the upper series and the strictly lower
    one the lower series.
    """
    delta = flatten(model, direction)
    whole = connectivity_matrix(net, model, batch, task)
    series = connectivity_matrix(net, model, batch, task, series=True)
    return Terms(
        upper=unflatten(series.triu(1) @ delta, model),
        lower=unflatten(series.tril(-1) @ delta, model),
        parallel=unflatten((whole - series) @ delta, model),
    )
