"""The table of tangent rules: one entry per operation, found by exact name.

A rule is a function `(kept, func, args, kwargs)` giving the `Dual` (or tuple of them) that the operation makes of its
arguments, in which tensors that depend on θ are `Dual`s. `kept` says which second derivatives may flow back
(`switches`): where a rule's tangent depends on a value whose curvature is frozen, it uses the value detached
(`keep`).

An entry also carries the mathematics in one line and samples: inputs that the tests run it on, against finite
differences, in every kind. A rule without samples cannot be registered. There are no guesses: a name that is not here
takes the generic path of `fallback`, which is exact and slower, and is counted.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from apoptosis.curvature.duals import Dual
from apoptosis.curvature.nesting import replaced
from apoptosis.curvature.switches import Switches

__all__ = ["RULES", "Declined", "Rule", "Sample", "inputs", "keep", "register", "values_of"]

Apply: TypeAlias = Callable[[Switches, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Declined(Exception):  # noqa: N818 - an answer between rule and mode, never an error of the user
    """A rule does not cover these arguments; the generic path does."""


@dataclass(frozen=True)
class Sample:
    """Arguments to prove a rule on. Floating-point tensors among them become parameters."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """One entry of the table."""

    name: str
    family: str
    mathematics: str
    apply: Apply
    samples: Callable[[], list[Sample]]
    signature: inspect.Signature | None = None
    """Of the rule's function, where it spells out the operation's arguments."""


RULES: dict[str, Rule] = {}


def register(rule: Rule) -> None:
    """Add a rule; the same name twice is a mistake."""
    if rule.name in RULES:
        raise ValueError(f"The operation {rule.name!r} has a rule already.")
    if not rule.samples():
        raise ValueError(f"The rule for {rule.name!r} has no samples to prove it on.")
    RULES[rule.name] = rule


def tangent_rule(
    name: str, *, family: str, samples: Callable[[], list[Sample]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function `(kept, *args, **kwargs)` with the operation's own signature."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def apply(
            kept: Switches, _func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            return function(kept, *args, **rename(kwargs))

        mathematics = (function.__doc__ or "").split("\n")[0]
        register(Rule(name, family, mathematics, apply, samples, inspect.signature(function)))
        return function

    return decorate


def rename(kwargs: dict[str, Any]) -> dict[str, Any]:
    """torch calls the first argument `input` in functions and `self` in methods; rules call it `x`."""
    return {("x" if key in ("input", "self") else key): value for key, value in kwargs.items()}


def keep(value: Tensor, kept: bool) -> Tensor:  # noqa: FBT001 - reads as "keep x if ..."
    """`value` for use inside a tangent, detached where the curvature through it is frozen."""
    return value if kept else value.detach()


def values_of(value: Any) -> Any:
    """The same arguments with each `Dual` replaced by its value."""
    return replaced(value, lambda dual: dual.value)


def tangents_of(value: Any) -> Any:
    """The same arguments with each `Dual` replaced by its tangent, or by zeros where it has none."""
    return replaced(value, lambda d: torch.zeros_like(d.value) if d.tangent is None else d.tangent)


def is_continuous(tensor: Tensor) -> bool:
    """Whether a tensor can have a derivative: real or complex, no integers."""
    return tensor.is_floating_point() or tensor.is_complex()


def duals_in(value: Any) -> list[Dual]:
    """Every `Dual` among nested arguments."""
    found: list[Dual] = []

    def note(dual: Dual) -> Tensor:
        found.append(dual)
        return dual.value

    replaced(value, note)
    return found


def inputs(*shapes: tuple[int, ...], positive: bool = False) -> list[Tensor]:
    """Deterministic float64 tensors for samples: distinct, of both signs unless `positive`, away from kinks at 0."""
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)) + len(shapes))
    made: list[Tensor] = []
    for shape in shapes:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        x = x + 0.1 * x.sign()
        made.append(x.abs() + 0.2 if positive else x)
    return made


def sample(*args: Any, **kwargs: Any) -> Sample:
    """A `Sample` as it would be called."""
    return Sample(args, kwargs)
