"""The comparisons that prove rules can fail: one deliberately wrong rule after another, each caught."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from apoptosis.curvature import RULES, fallback, tangents
from apoptosis.curvature.duals import Dual, lift
from apoptosis.curvature.rules import Rule, inputs, sample
from apoptosis.curvature.switches import Switches
from oracles.operations import (
    assert_agrees_with_differences,
    assert_agrees_with_reference,
    problem,
)

Wrong = Callable[[Rule], Callable[..., Any]]


def mapped(result: Any, change: Callable[[Dual], Dual]) -> Any:
    """An operation's result with every dual changed."""
    if isinstance(result, Dual):
        return change(result)
    if isinstance(result, (tuple, list)):
        return tuple(mapped(part, change) for part in result)
    return result


def with_tangent(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    """The right value with another tangent."""

    def wrong(rule: Rule) -> Callable[..., Any]:
        def changed(dual: Dual) -> Dual:
            return dual if dual.tangent is None else Dual(dual.value, change(dual.tangent))

        return lambda *args: mapped(rule.apply(*args), changed)

    return wrong


def keeping(change: Callable[[Switches], Switches]) -> Wrong:
    """The right tangent with other second derivatives."""

    def wrong(rule: Rule) -> Callable[..., Any]:
        return lambda kept, *args: rule.apply(change(kept), *args)

    return wrong


def softmax_of_the_tangent(_rule: Rule) -> Callable[..., Any]:
    """What the paper's Algorithm 1 prints."""

    def apply(_kept: Switches, _func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dual:
        x, dim = args[0], kwargs.get("dim", args[1])
        return Dual(torch.softmax(x.value, dim), torch.softmax(x.tangent, dim))

    return apply


def product_of_tangents(_rule: Rule) -> Callable[..., Any]:
    """x'·y' instead of x'·y + x·y'."""

    def apply(_kept: Switches, func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Dual:
        x, y = map(lift, args)
        return Dual(func(x.value, y.value), func(x.tangent, y.tangent))

    return apply


DOUBLED = with_tangent(lambda t: 2 * t)
NEGATED = with_tangent(torch.neg)
SHIFTED = with_tangent(lambda t: t.roll(1, -1))
CONSTANT = with_tangent(torch.Tensor.detach)
FLAT = keeping(lambda _kept: Switches())
CURVED = keeping(lambda kept: replace(kept, curved=True))
NO_LOWER = keeping(lambda kept: replace(kept, lower=False))
NO_UPPER = keeping(lambda kept: replace(kept, upper=False))
NO_PARALLEL = keeping(lambda kept: replace(kept, parallel=False))
ALL_PRODUCTS = keeping(
    lambda kept: replace(kept, upper=True, lower=True, parallel=True, curved=True)
)

MISTAKES = {
    ("linear", "tangent doubled"): DOUBLED,
    ("linear", "x̂ does not reach the weight"): NO_LOWER,
    ("linear", "weight above not passed down"): NO_UPPER,
    ("conv2d", "tangent negated"): NEGATED,
    ("conv2d", "x̂ does not reach the weight"): NO_LOWER,
    ("conv_transpose1d", "weight above not passed down"): NO_UPPER,
    ("matmul", "product of the tangents"): product_of_tangents,
    ("matmul", "second derivative dropped"): NO_PARALLEL,
    ("mul", "second derivative dropped"): NO_PARALLEL,
    ("div", "counted in connectivity"): CURVED,
    ("glu", "second derivative dropped"): FLAT,
    ("add", "tangent doubled"): DOUBLED,
    ("transpose", "tangent in another place"): SHIFTED,
    ("cat", "tangent without its graph"): CONSTANT,
    ("mean", "tangent negated"): NEGATED,
    ("gelu", "second derivative dropped"): FLAT,
    ("gelu", "counted in connectivity"): CURVED,
    ("tanh", "tangent doubled"): DOUBLED,
    ("pow", "counted in connectivity"): CURVED,
    ("layer_norm", "second derivative dropped"): FLAT,
    ("layer_norm", "counted in connectivity"): CURVED,
    ("layer_norm", "x̂ does not reach γ"): NO_LOWER,
    ("batch_norm", "x̂ does not reach γ"): NO_LOWER,
    ("rms_norm", "tangent doubled"): DOUBLED,
    ("softmax", "softmax of the tangent"): softmax_of_the_tangent,
    ("softmax", "second derivative dropped"): FLAT,
    ("scaled_dot_product_attention", "second derivative dropped"): FLAT,
    ("scaled_dot_product_attention", "q·k and S·v not counted"): NO_PARALLEL,
    ("scaled_dot_product_attention", "softmax counted in connectivity"): CURVED,
    ("max_pool2d", "tangent of the neighbour"): SHIFTED,
    ("topk", "tangent negated"): NEGATED,
    ("maximum", "tangent doubled"): DOUBLED,
    ("_weight_norm", "second derivative dropped"): FLAT,
    ("_weight_norm", "counted in connectivity"): ALL_PRODUCTS,
    ("cdist", "tangent doubled"): DOUBLED,
}


def compare(name: str) -> None:
    """What `test_rules` asks of a rule, on its first sample."""
    case = problem(name, RULES[name].samples()[0])
    assert_agrees_with_differences(*case)
    assert_agrees_with_reference(*case)


def replace_rule(monkeypatch: pytest.MonkeyPatch, name: str, apply: Callable[..., Any]) -> None:
    """Another rule in a copy of the table; the reference path keeps its own."""
    monkeypatch.setattr(tangents, "RULES", {**RULES, name: replace(RULES[name], apply=apply)})


@pytest.mark.parametrize(
    ("name", "mistake"), [pytest.param(*key, id=": ".join(key)) for key in MISTAKES]
)
def test_a_wrong_rule_is_caught(name: str, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_rule(monkeypatch, name, MISTAKES[name, mistake](RULES[name]))
    with pytest.raises(AssertionError, match="differs by more than"):
        compare(name)


@pytest.mark.parametrize("name", sorted({name for name, _ in MISTAKES}))
def test_the_right_rule_in_the_same_wrapping_is_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrap in (keeping(lambda kept: kept), with_tangent(lambda t: t)):
        replace_rule(monkeypatch, name, wrap(RULES[name]))
        compare(name)


def test_every_family_has_a_wrong_rule() -> None:
    assert {RULES[name].family for name, _ in MISTAKES} == {rule.family for rule in RULES.values()}


# --- the generic path ------------------------------------------------------------------------------------------------


def compare_generic() -> None:
    """An operation without a rule."""
    assert "atan2" not in RULES
    case = problem("atan2", sample(*inputs((2, 3), (2, 3), positive=True)))
    assert assert_agrees_with_differences(*case) == {"atan2": 1}
    assert_agrees_with_reference(*case)


def test_the_generic_path_is_right() -> None:
    compare_generic()


def _doubled(*args: Any) -> Any:
    values, moved = PUSH(*args)
    return values, [2 * t for t in moved]


PUSH = fallback._push_forward
PULL = fallback._pull_back
GENERIC_MISTAKES: dict[str, tuple[str, Callable[..., Any]]] = {
    "second derivative dropped": ("_add_bend", lambda to_values, *_: to_values),
    "tangent doubled": ("_push_forward", _doubled),
    "adjoints negated": (
        "_pull_back",
        lambda *args, **options: [None if v is None else -v for v in PULL(*args, **options)],
    ),
}


@pytest.mark.parametrize("mistake", GENERIC_MISTAKES)
def test_a_wrong_generic_path_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, *GENERIC_MISTAKES[mistake])
    with pytest.raises(AssertionError, match="differs by more than"):
        compare_generic()
