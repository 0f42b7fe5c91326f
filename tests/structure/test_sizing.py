"""New values of attributes: every integer made of them becomes the size that is wanted."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import apoptosis as ap
from apoptosis.structure.attributes import Attribute, Derived, evaluate
from apoptosis.structure.sizing import _solve
from oracles.building import Net, built

A, B = Attribute("m", "a"), Attribute("m", "b")
OPERATORS = ["add", "sub", "mul", "floordiv"]
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


@given(
    st.sampled_from(OPERATORS),
    st.booleans(),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_one_step_is_solved_whenever_a_value_exists(
    operator: str, on_the_left: bool, a: int, number: int, new: int
) -> None:
    origin = Derived(operator, A, number) if on_the_left else Derived(operator, number, A)
    possible = [v for v in range(1, 1000) if evaluate(origin, {A: v}) == new]
    values = {A: a}
    _solve(origin, new, values, set())
    assert evaluate(origin, values) == new or not possible


@given(
    st.sampled_from(OPERATORS),
    st.sampled_from(OPERATORS),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(1, 9),
)
def test_two_steps_are_solved_or_left_alone(
    first: str, second: str, value: int, x: int, y: int
) -> None:
    origin = Derived(second, Derived(first, A, x), y)
    new = evaluate(origin, {A: value})
    assume(new > 0)
    values = {A: 99}
    _solve(origin, new, values, set())
    lossy = "floordiv" in (first, second)  # 1 = (3·1) // 2, though 3·a is never 2
    assert evaluate(origin, values) == new or (lossy and values == {A: 99})


def test_settled_attributes_are_left_alone() -> None:
    values = {A: 4, B: 3}
    _solve(Derived("mul", A, B), 8, values, {B})
    assert values == {A: 4, B: 3}, "8 is no multiple of 3"
    _solve(Derived("mul", A, B), 6, values, {B})
    assert values == {A: 2, B: 3}
    _solve(Derived("mul", A, B), 99, values, {A, B})
    assert values == {A: 2, B: 3}


def heads_model(forward) -> nn.Module:
    net = built(lambda: Net(forward, a=nn.Linear(4, 12), b=nn.Linear(12, 3)))
    net.heads, net.width = 3, 12
    return net


def divided(net: Net, x: Tensor) -> Tensor:
    y = net.a(x).view(-1, net.heads, net.width // net.heads)
    return net.b(torch.relu(y).transpose(1, 2).reshape(-1, net.width))


def test_a_width_that_is_divided_shrinks_with_heads_or_with_what_is_in_one() -> None:
    model, x = heads_model(divided), torch.randn(2, 4, dtype=torch.float64)
    structure = ap.trace(model, x)
    by_size = {g.size: g.name for g in structure.groups}
    expected = {3: {"heads": 2, "width": 8}, 4: {"heads": 3, "width": 9}}
    for size, attributes in expected.items():
        plan = structure.plan({by_size[size]: range(size - 1)})
        small = ap.cut(model, plan)
        assert plan.delivery == "module", plan.delivery_because
        assert {name: getattr(small, name) for name in attributes} == attributes
        torch.testing.assert_close(small(x), ap.zero(model, plan)(x), **TOLERANCE)
    both = structure.plan({by_size[3]: [0, 2], by_size[4]: [1, 3]})
    small = ap.cut(model, both)
    assert (small.heads, small.width) == (2, 4)
    torch.testing.assert_close(small(x), ap.zero(model, both)(x), **TOLERANCE)


def test_an_attribute_that_counts_something_else_too_is_not_changed() -> None:
    """Five layers and five units: equal numbers, another meaning."""

    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        for _ in range(net.depth):
            y = torch.tanh(y)
        return net.b(y.view(-1, net.width))

    model = built(lambda: Net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 3)))
    model.depth, model.width = 5, 5
    x = torch.randn(2, 4, dtype=torch.float64)
    small = ap.cut(model, plan := ap.trace(model, x).plan({"a": [0, 2]}))
    assert (small.depth, small.width) == (5, 2)
    torch.testing.assert_close(small(x), ap.zero(model, plan)(x), **TOLERANCE)


def test_an_attribute_that_both_counts_and_measures_makes_a_program() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        for _ in range(net.width):
            y = torch.tanh(y)
        return net.b(y.view(-1, net.width))

    model = built(lambda: Net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 3)))
    model.width = 5
    x = torch.randn(2, 4, dtype=torch.float64)
    plan = ap.trace(model, x).plan({"a": [0, 2]})
    assert plan.delivery == "program"
    assert "operations are called instead of" in plan.delivery_because or "another operation" in (
        plan.delivery_because
    )
    torch.testing.assert_close(ap.cut(model, plan)(x), ap.zero(model, plan)(x), **TOLERANCE)


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_size_within_a_sequence_keeps_its_kind(kind: type) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.b(net.a(x).view(-1, *net.parts).flatten(1))

    model = built(lambda: Net(forward, a=nn.Linear(4, 12), b=nn.Linear(12, 3)))
    model.parts = kind((3, 4))
    x = torch.randn(2, 4, dtype=torch.float64)
    structure = ap.trace(model, x)
    plan = structure.plan({g.name: range(g.size - 1) for g in structure.groups})
    small = ap.cut(model, plan)
    assert small.parts == kind((2, 3))
    assert model.parts == kind((3, 4))
    torch.testing.assert_close(small(x), ap.zero(model, plan)(x), **TOLERANCE)
