"""Any operation at all: value, tangent and second derivative by torch's own means.

Forward: the value, and the tangent by forward-mode differentiation of this one operation, else by differentiating its
backward (a double vjp). Only x and x̂ are remembered. Backward, with A, B the adjoints of y, ŷ: the operation is run
again with a graph,

    v = Jᵀ B,    adjoint of x̂ = v,    adjoint of x = Jᵀ A + ∇ₓ⟨v, x̂⟩,

the last term being curvature. This is right even where recorded forward-mode differentiation is not (norms in train
mode), because nothing is differentiated twice that torch has not a formula for. It costs a second run of the
operation, so whatever is met often has a rule of its own; what comes here is counted and reported.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from apoptosis.curvature.adjoints import Saved, adjoint, save
from apoptosis.curvature.calls import identify
from apoptosis.curvature.duals import Dual
from apoptosis.curvature.nesting import mapped, supplied, tensors_of
from apoptosis.curvature.rules import duals_in, is_continuous, values_of
from apoptosis.curvature.rules_linear import apply_linear
from apoptosis.curvature.switches import Switches
from apoptosis.errors import LostTangentError

__all__ = ["Randomness", "apply_any", "is_view_of"]


class Randomness:
    """The random states that an operation on `device` draws from, as they were."""

    def __init__(self, device: torch.device) -> None:
        """Take note of them."""
        self._cpu = torch.get_rng_state()
        self._device = device if device.type == "cuda" else None
        self._cuda = torch.cuda.get_rng_state(device) if self._device is not None else None

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._cpu)
        if self._device is not None and self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the same random numbers again; outside, as if nothing had been drawn."""
        devices = [] if self._device is None else [self._device]
        with torch.random.fork_rng(devices=devices):
            self.restore()
            yield


def apply_any(
    kept: Switches, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, bool]:
    """The result of an operation without a rule, and whether the generic path was needed for it."""
    duals = duals_in((args, kwargs))
    randomness = Randomness(duals[0].value.device)
    result = func(*values_of(args), **values_of(kwargs))
    produced = [t for t in tensors_of(result) if t.requires_grad]
    if not produced:  # comparisons, shapes, factories: constants
        return result, False
    if any(t.layout != torch.strided or t.is_nested for t in produced):
        return result, False  # without a record: an error as soon as it is used
    if all(is_view_of(t, duals) for t in produced):
        return apply_linear(kept, func, args, kwargs), False
    if all(dual.tangent is None for dual in duals):
        return mapped(result, lambda t: Dual(t) if t.requires_grad else t), False
    randomness.restore()  # the same random numbers again
    try:
        return _apply_generic(kept, func, args, kwargs, duals), True
    except (NotImplementedError, RuntimeError) as error:
        if not _says_no_derivative(error):
            raise
        return result, False  # as above; integers beside it may be used


def _says_no_derivative(error: Exception) -> bool:
    return "derivative for" in str(error) and "not implemented" in str(error)


def is_view_of(tensor: Tensor, duals: list[Dual]) -> bool:
    """Whether an operation only looked at one of its arguments in another way."""
    base = tensor._base
    return base is not None and any(d.value is base or d.value._base is base for d in duals)


def _apply_generic(
    kept: Switches,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    duals: list[Dual],
) -> Any:
    again = _Again(func, args, kwargs, Randomness(duals[0].value.device))
    tangents = [torch.zeros_like(d.value) if d.tangent is None else d.tangent for d in duals]
    outputs = _Generic.apply(kept, again, *(d.value for d in duals), *tangents)
    values, moved = outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :]
    made = iter(Dual(v, t) for v, t in zip(values, moved, strict=True))
    return again.rebuild(made)


class _Again:
    """An operation that can be run again on other values, with the same random numbers."""

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        randomness: "Randomness",
    ) -> None:
        # Without the values: in place, the result stands for one of them, and would keep itself alive.
        self.func, self.args, self.kwargs = func, _emptied(args), _emptied(kwargs)
        self.randomness = randomness
        self.template: Any = None

    def __call__(self, values: list[Tensor]) -> list[Tensor]:
        """The floating-point outputs."""
        supply = iter(values)
        args, kwargs = (supplied(part, supply) for part in (self.args, self.kwargs))
        self.template = self.func(*args, **kwargs)
        return [t for t in tensors_of(self.template) if is_continuous(t)]

    def rebuild(self, made: Any) -> Any:
        """The outputs in the operation's own arrangement."""
        return mapped(self.template, lambda t: next(made) if is_continuous(t) else t)


def _emptied(value: Any) -> Any:
    return supplied(value, itertools.repeat(Dual(torch.empty(0))))


class _Generic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: Switches, again: _Again, *flat: Tensor) -> tuple[Tensor, ...]:
        xs, tangents = list(flat[: len(flat) // 2]), list(flat[len(flat) // 2 :])
        ctx.kept, ctx.again = kept, again
        ctx.set_materialize_grads(False)
        save(ctx, *flat)
        values, moved = _push_forward(again, xs, tangents)
        # The arrangement and the integers of the result, not its graph.
        again.template = mapped(again.template, Tensor.detach)
        return (*values, *moved)

    @staticmethod
    @adjoint
    def backward(ctx: Any, saved: Saved, *adjoints: Tensor | None) -> tuple[Tensor | None, ...]:
        xs, tangents = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        half = len(adjoints) // 2
        on_values, on_tangents = adjoints[:half], adjoints[half:]
        with torch.enable_grad(), ctx.again.randomness.replayed():
            leaves = [x.detach().requires_grad_() for x in xs]
            outputs = ctx.again(leaves)
            to_values = _pull_back(outputs, leaves, on_values)
            pulled = _pull_back(outputs, leaves, on_tangents, create_graph=ctx.kept.curved)
            to_tangents = [None if v is None else v.detach() for v in pulled]
            if ctx.kept.curved:
                to_values = _add_bend(to_values, pulled, leaves, tangents, ctx.again)
        return None, None, *to_values, *to_tangents


def _push_forward(
    again: _Again, xs: list[Tensor], tangents: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    if identify(again.func).name in _WRONG_FORWARD:
        return _push_twice_backward(again, xs, tangents)
    try:
        # Forward mode is switched off inside autograd.Function.forward.
        with forward_ad._set_fwd_grad_enabled(True), forward_ad.dual_level():
            made = [
                forward_ad.make_dual(x.detach(), t.detach())
                for x, t in zip(xs, tangents, strict=True)
            ]
            outputs = [forward_ad.unpack_dual(y) for y in again(made)]
        return (
            [y.primal.detach() for y in outputs],
            [torch.zeros_like(y.primal) if y.tangent is None else y.tangent for y in outputs],
        )
    except (NotImplementedError, RuntimeError):
        again.randomness.restore()
        return _push_twice_backward(again, xs, tangents)


_WRONG_FORWARD = frozenset({"scatter_reduce", "triangular_solve"})
"""torch 2.13 differentiates these forwards to something else (`prod` without itself; a tangent of the matrix)."""


def _push_twice_backward(
    again: _Again, xs: list[Tensor], tangents: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """J x̂ as the derivative of u ↦ ⟨Jᵀu, x̂⟩."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in xs]
        outputs = again(leaves)
        probes = [torch.zeros_like(y, requires_grad=True) for y in outputs]
        pulled = _pull_back(outputs, leaves, probes, create_graph=True)
        pairs = [(v, t) for v, t in zip(pulled, tangents, strict=True) if v is not None]
        moved: list[Tensor | None] = list(
            torch.autograd.grad(
                [v for v, _ in pairs], probes, [t for _, t in pairs], allow_unused=True
            )
        )
    return (
        [y.detach() for y in outputs],
        [torch.zeros_like(y) if m is None else m for m, y in zip(moved, outputs, strict=True)],
    )


def _pull_back(
    outputs: list[Tensor],
    leaves: list[Tensor],
    adjoints: Any,
    *,
    create_graph: bool = False,
) -> list[Tensor | None]:
    pairs = [
        (y, a) for y, a in zip(outputs, adjoints, strict=True) if a is not None and y.requires_grad
    ]
    if not pairs:
        return [None] * len(leaves)
    return list(
        torch.autograd.grad(
            [y for y, _ in pairs],
            leaves,
            [a for _, a in pairs],
            create_graph=create_graph,
            retain_graph=True,
            allow_unused=True,
        )
    )


def _add_bend(
    to_values: list[Tensor | None],
    pulled: list[Tensor | None],
    leaves: list[Tensor],
    tangents: Any,
    again: _Again,
) -> list[Tensor | None]:
    pairs = [
        (v, t) for v, t in zip(pulled, tangents, strict=True) if v is not None and v.requires_grad
    ]
    if not pairs:
        return to_values
    try:
        bends: list[Tensor | None] = list(
            torch.autograd.grad(
                [v for v, _ in pairs], leaves, [t for _, t in pairs], allow_unused=True
            )
        )
    except (NotImplementedError, RuntimeError) as error:
        if not _says_no_derivative(error):
            raise
        name = getattr(again.func, "__name__", str(again.func))
        raise LostTangentError(
            f"The model uses {name!r}, and torch has no second derivative for it: {error} Use kind='connectivity' or "
            "'ggn', which need only the first, or write that part with other operations."
        ) from error
    return [
        bend if value is None else value if bend is None else value + bend
        for value, bend in zip(to_values, bends, strict=True)
    ]
