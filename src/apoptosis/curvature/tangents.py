"""The mode that carries tangents through a forward: value and tangent side by side, one rule per operation."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from apoptosis.curvature import autocast
from apoptosis.curvature.calls import Call
from apoptosis.curvature.duals import Dual, Ledger, lift
from apoptosis.curvature.fallback import apply_any
from apoptosis.curvature.interception import Interceptor
from apoptosis.curvature.rules import RULES, Declined, Rule, rename
from apoptosis.curvature.switches import Switches

__all__ = ["TangentMode"]


class TangentMode(Interceptor):
    """Applies the tangent rules, counts what had none, and notes what enters each layer."""

    def __init__(
        self,
        ledger: Ledger,
        kept: Switches,
        on_layer: Callable[[Tensor, Dual], None] | None = None,
    ) -> None:
        """Carry tangents with the curvature of `kept`; `on_layer(weight, input)` is told of every layer."""
        super().__init__(ledger)
        self._kept = kept
        self._on_layer = on_layer
        self.fallbacks: Counter[str] = Counter()

    @property
    def kept(self) -> Switches:
        """The curvature to keep here and now."""
        return self._kept.inside_norm() if self.norm_depth else self._kept

    def operate(
        self, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Value and tangent by the operation's rule, or by the generic path."""
        rule = RULES.get(call.name)
        if rule is not None and rule.family == "layer" and self._on_layer is not None:
            self._on_layer(lift(args[1]).value, lift(args[0]))
        if autocast.is_on():
            args, kwargs = autocast.cast_arguments(call.name, args, kwargs)
            with autocast.without_autocast():
                return self._apply(call, rule, func, args, kwargs)
        return self._apply(call, rule, func, args, kwargs)

    def _apply(
        self,
        call: Call,
        rule: Rule | None,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if rule is not None:
            try:
                return rule.apply(self.kept, func, args, kwargs)
            except Declined:
                pass
            except TypeError:
                if _accepts(rule, args, kwargs):
                    raise
        result, was_generic = apply_any(self.kept, func, args, kwargs)
        if was_generic:
            self.fallbacks[call.name] += 1
        return result


def _accepts(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the rule takes such arguments: a rare form of a common operation goes the generic way."""
    if rule.signature is None:
        return True
    try:
        rule.signature.bind(None, *args, **rename(kwargs))
    except TypeError:
        return False
    return True
