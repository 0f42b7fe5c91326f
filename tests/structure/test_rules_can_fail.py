"""The checks that prove axis rules can fail: one deliberately wrong rule after another, each caught."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from apoptosis.structure import rules
from apoptosis.structure.axes import Expr, times
from apoptosis.structure.facts import Facts
from apoptosis.structure.flows import AnyOf, Everywhere, Flow, Through, aligned, through
from apoptosis.structure.letters import product, product_flow
from apoptosis.structure.program import values_in
from apoptosis.structure.rules import RULES, Rule, Step
from oracles.axis_rules import (
    Trial,
    assert_costs_are_counted,
    assert_cuts_are_right,
    assert_free_axes_are_expected,
    assert_rule_holds,
    assert_sums_are_declared,
    assert_zeros_are_zero,
)

Apply = Callable[[Step], None]
Wrong = Callable[[Apply], Apply]

CHECKS: dict[str, tuple[Callable[[Trial], None], str]] = {
    "free": (assert_free_axes_are_expected, "free axes"),
    "cut": (assert_cuts_are_right, "not close|does not run|other shapes"),
    "sums": (assert_sums_are_declared, "not close"),
    "zeros": (assert_zeros_are_zero, "said to be zero"),
    "costs": (assert_costs_are_counted, "multiply-accumulates"),
}


@dataclass(frozen=True)
class Mistake:
    """A wrong rule, and the check that catches it on one of the samples, or on the one numbered."""

    name: str
    what: str
    wrong: Wrong
    caught_by: str
    number: int | None = None


# --- ways to be wrong ------------------------------------------------------------------------------------------------


def silent(method: str) -> Wrong:
    """The rule cannot say that: `pin`, `equal`, `size`, `statistic`, `contract`."""

    def wrong(right: Apply) -> Apply:
        def apply(step: Step) -> None:
            setattr(step, method, lambda *_args, **_named: None)
            right(step)

        return apply

    return wrong


def backwards(method: str) -> Wrong:
    """Products in what the rule equates, or in what it gives out, have their factors the other way round."""

    def wrong(right: Apply) -> Apply:
        def apply(step: Step) -> None:
            said = getattr(step, method)
            if method == "equal":
                step.equal = lambda a, b: said(a, _reversed(b))
            else:
                step.out = lambda axes, flow: said([_reversed(expr) for expr in axes], flow)
            right(step)

        return apply

    return wrong


def _reversed(expr: Expr) -> Expr:
    if len(expr.terms) != 1:
        return expr
    parts = [f if isinstance(f, Expr) else Expr.of(f) for f in reversed(expr.terms[0])]
    return times(*parts)


def changed(change: Callable[[Facts], None]) -> Wrong:
    """Other facts."""

    def wrong(right: Apply) -> Apply:
        def apply(step: Step) -> None:
            right(step)
            change(step.facts)

        return apply

    return wrong


def zero_where(flow: Callable[[Step], Flow]) -> Wrong:
    """Other zeros."""

    def wrong(right: Apply) -> Apply:
        def apply(step: Step) -> None:
            right(step)
            step.facts.flows = [flow(step) for _ in step.facts.flows]

        return apply

    return wrong


def instead(other: Apply) -> Wrong:
    """Another rule altogether."""
    return lambda _right: other


NO_PIN, NO_EQUATION, NO_SIZE = map(silent, ("pin", "equal", "size"))
NO_STATISTIC, NO_SUM = map(silent, ("statistic", "contract"))
ZERO_WHERE_X_IS = zero_where(lambda step: through(next(values_in(step.call.arguments))))
ZERO_WHERE_ANY_IS = zero_where(
    lambda step: AnyOf(
        tuple(aligned(v, step.call.outputs[0].ndim) for v in values_in(step.call.arguments))
    )
)
ZEROS = zero_where(lambda _step: Everywhere())


def everything_pinned(right: Apply) -> Apply:
    def apply(step: Step) -> None:
        right(step)
        for axes in step.facts.axes:
            for expr in axes:
                step.pin(expr, "to be on the safe side")

    return apply


def transposed_letters(step: Step) -> None:
    """m k, n k → m n, of a square matrix."""
    operands = [(step.args[0], "mk"), (step.args[1], "nk")]
    step.out(product(step, operands, "mn"), product_flow(operands, "mn"))


def slope_of_the_last_axis(step: Step) -> None:
    x, slope = step.args
    step.equal(step.axes(x)[-1], step.axes(slope)[0])
    step.same(x)


def the_same_axes(step: Step) -> None:
    step.same(step.args[0])


def halves_are_equal(right: Apply) -> Apply:
    """Concatenated parts have the same indices."""

    def apply(step: Step) -> None:
        a, b = step.args[0]
        step.equal(step.axes(a)[1], step.axes(b)[1])
        right(step)

    return apply


def vectors_looked_up(step: Step) -> None:
    """Of an embedding, the width stays whole instead of the vocabulary."""
    weight, indices, *_ = step.args
    step.pin(step.axes(weight)[1], "wrong")
    step.out(
        [*step.axes(indices), step.axes(weight)[1]],
        Through(weight, (*[None] * indices.ndim, 1)),
    )


def numerator_alone(step: Step) -> Flow:
    return aligned(step.args[0], step.call.outputs[0].ndim)


def all_letters_at_once(facts: Facts) -> None:
    facts.costs = [tuple({e: None for cost in facts.costs for e in cost})]


def no_replacement(facts: Facts) -> None:
    facts.replacement = None
    facts.ties.clear()


def half_the_costs(facts: Facts) -> None:
    facts.costs = facts.costs[::2]


MISTAKES = [
    # products
    Mistake("matmul.default", "letters transposed", instead(transposed_letters), "cut", 5),
    Mistake("matmul.default", "no sum declared", NO_SUM, "sums"),
    Mistake("conv2d.default", "no sum declared", NO_SUM, "sums"),
    Mistake("scaled_dot_product_attention.default", "no sum declared", NO_SUM, "sums"),
    Mistake("linear.default", "bias not equated", NO_EQUATION, "cut"),
    Mistake("linear.default", "zero in spite of the bias", ZERO_WHERE_ANY_IS, "zeros"),
    Mistake("linear.default", "free", changed(lambda facts: facts.costs.clear()), "costs"),
    Mistake("conv2d.default", "groups swapped", backwards("equal"), "cut"),
    Mistake("conv2d.default", "number of groups not measured", NO_SIZE, "cut"),
    Mistake("conv_transpose2d.input", "groups swapped", backwards("equal"), "cut"),
    Mistake("einsum.default", "all letters at once", changed(all_letters_at_once), "costs", 3),
    Mistake(
        "scaled_dot_product_attention.default",
        "scale of the new width",
        changed(lambda facts: facts.frozen.clear()),
        "cut",
    ),
    Mistake("scaled_dot_product_attention.default", "keys not pinned", NO_PIN, "cut"),
    Mistake("scaled_dot_product_attention.default", "(r kv) heads", backwards("equal"), "cut", 4),
    Mistake("scaled_dot_product_attention.default", "half", changed(half_the_costs), "costs"),
    # elementwise
    Mistake("sigmoid.default", "said to keep zeros", ZERO_WHERE_X_IS, "zeros"),
    Mistake("add.Tensor", "zero where any term is", ZERO_WHERE_ANY_IS, "zeros"),
    Mistake("add.Scalar", "x + 2 said to keep zeros", ZERO_WHERE_X_IS, "zeros"),
    Mistake("mul.Tensor", "factors not equated", NO_EQUATION, "cut"),
    Mistake("div.Tensor", "0/0 said to be 0", zero_where(numerator_alone), "zeros"),
    Mistake("atan2.default", "zero where y is", zero_where(numerator_alone), "zeros"),
    Mistake("threshold.default", "said to keep zeros", ZERO_WHERE_X_IS, "zeros"),
    Mistake("prelu.default", "slope along space", instead(slope_of_the_last_axis), "cut", 1),
    Mistake("relu.default", "pinned", everything_pinned, "free"),
    # norms
    Mistake("layer_norm.default", "without a statistic", NO_STATISTIC, "cut"),
    Mistake("layer_norm.default", "said to keep zeros", ZERO_WHERE_X_IS, "zeros"),
    Mistake("rms_norm.default", "shape not measured", NO_SIZE, "cut"),
    Mistake("batch_norm.default", "without a statistic in training", NO_STATISTIC, "cut", 4),
    Mistake("batch_norm.default", "running mean forgotten", ZERO_WHERE_X_IS, "zeros"),
    Mistake("batch_norm.default", "statistics not equated", NO_EQUATION, "cut"),
    Mistake("group_norm.default", "(c g)", backwards("equal"), "cut"),
    Mistake("group_norm.default", "without a statistic", NO_STATISTIC, "cut"),
    Mistake("_weight_norm.default", "no sum declared", NO_SUM, "sums"),
    Mistake("_weight_norm.default", "0/0 said to be 0", ZERO_WHERE_X_IS, "zeros"),
    # reductions
    Mistake("mean.dim", "said to be a sum", NO_STATISTIC, "cut"),
    Mistake("var.correction", "without a statistic", NO_STATISTIC, "cut"),
    Mistake("softmax.int", "without a pin", NO_PIN, "cut"),
    Mistake("logsumexp.default", "without a pin", NO_PIN, "cut"),
    Mistake("amax.default", "without a pin", NO_PIN, "free"),
    Mistake("cumsum.default", "without a pin", NO_PIN, "cut"),
    Mistake("sum.dim_IntList", "no sum declared", NO_SUM, "sums"),
    Mistake("linalg_vector_norm.default", "no sum declared", NO_SUM, "sums"),
    Mistake("sum.dim_IntList", "pinned", everything_pinned, "free"),
    Mistake("max_pool2d_with_indices.default", "indices of zeros are zero", ZEROS, "zeros"),
    # shapes
    Mistake("cat.default", "equated instead of summed", halves_are_equal, "free", 1),
    Mistake("view.default", "column-major", backwards("equal"), "cut"),
    Mistake("view.default", "sizes not measured", NO_SIZE, "cut"),
    Mistake("select.int", "without a pin", NO_PIN, "cut"),
    Mistake("glu.default", "halves not equated", NO_EQUATION, "cut"),
    Mistake("transpose.int", "left as it is", instead(the_same_axes), "cut", 1),
    Mistake("channel_shuffle.default", "left as it is", backwards("equal"), "cut"),
    Mistake("pixel_shuffle.default", "(r r c)", backwards("equal"), "cut"),
    Mistake("repeat.default", "n·r", backwards("out"), "cut"),
    Mistake("repeat_interleave.self_int", "r·n", backwards("out"), "cut"),
    Mistake("chunk.default", "left to Python", changed(no_replacement), "cut"),
    Mistake(
        "squeeze.default", "may shrink to 1", changed(lambda facts: facts.floors.clear()), "cut"
    ),
    Mistake("constant_pad_nd.default", "padded with what is not zero", ZEROS, "zeros", 3),
    # indices
    Mistake("index_select.default", "without a pin", NO_PIN, "cut"),
    Mistake("embedding.default", "without a pin", NO_PIN, "cut"),
    Mistake("embedding.default", "the other axis pinned", instead(vectors_looked_up), "free"),
    Mistake("index.Tensor", "without a pin", NO_PIN, "cut"),
    Mistake("index_put.default", "without a pin", NO_PIN, "cut"),
    Mistake("gather.default", "without a pin", NO_PIN, "cut"),
    Mistake("scatter_add.default", "said to keep zeros", ZERO_WHERE_X_IS, "zeros"),
    Mistake("index_add.default", "no sum declared", NO_SUM, "sums"),
    Mistake("zeros.default", "size not measured", NO_SIZE, "cut"),
    Mistake("fill.Scalar", "always zero", ZEROS, "zeros"),
    # recurrent
    Mistake("lstm.input", "(hidden · gates)", backwards("equal"), "cut"),
    Mistake("gru.input", "(hidden · gates)", backwards("equal"), "cut"),
    Mistake("gru.input", "no sum declared", NO_SUM, "sums"),
    Mistake("lstm.input", "nothing equated", NO_EQUATION, "cut"),
    Mistake("rnn_tanh.input", "batch of the states not pinned", NO_PIN, "free"),
    Mistake("lstm.input", "recurrent weights cost nothing", changed(half_the_costs), "costs"),
    Mistake("gru.input", "said to be zero", ZEROS, "zeros"),
]


# --- each is caught --------------------------------------------------------------------------------------------------


def trials(name: str, number: int | None = None) -> list[Trial]:
    samples = RULES[name].samples()
    return [Trial(name, own) for own in (samples if number is None else [samples[number]])]


def on_all(cases: list[Trial], check: Callable[[Trial], None]) -> None:
    for trial in cases:
        check(trial)


def replace_rule(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Wrong) -> None:
    """Another rule in a copy of the table."""
    changed_rule: Rule = replace(RULES[name], apply=wrong(RULES[name].apply))
    monkeypatch.setattr(rules, "RULES", {**RULES, name: changed_rule})


@pytest.mark.parametrize("mistake", [pytest.param(m, id=f"{m.name}: {m.what}") for m in MISTAKES])
def test_a_wrong_rule_is_caught(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_rule(monkeypatch, mistake.name, mistake.wrong)
    check, message = CHECKS[mistake.caught_by]
    with pytest.raises(AssertionError, match=message):
        on_all(trials(mistake.name, mistake.number), check)


@pytest.mark.parametrize("name", sorted({mistake.name for mistake in MISTAKES}))
def test_the_right_rule_in_the_same_wrapping_is_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_rule(monkeypatch, name, changed(lambda _facts: None))
    on_all(trials(name), assert_rule_holds)


def test_every_family_has_wrong_rules_and_every_check_catches_some() -> None:
    families = [RULES[mistake.name].family for mistake in MISTAKES]
    assert all(families.count(family) >= 4 for family in {rule.family for rule in RULES.values()})
    assert {mistake.caught_by for mistake in MISTAKES} == CHECKS.keys()


def test_a_rule_that_is_missing_pins_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[str, Any] = {name: rule for name, rule in RULES.items() if name != "relu.default"}
    monkeypatch.setattr(rules, "RULES", table)
    trial = trials("relu.default")[0]
    assert not trial.free
    assert trial.facts.refused == "there is no rule for this operation"
