"""Integers that remember where they came from, and that are plain again afterwards."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from apoptosis.structure.attributes import (
    Attribute,
    Derived,
    Origin,
    TracedInt,
    evaluate,
    leaves,
    show,
    traced_attributes,
)

A, B = Attribute("m", "a"), Attribute("m", "b", 1)
OPERATORS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
}
small = st.integers(1, 50)


@given(st.sampled_from(sorted(OPERATORS)), small, small)
def test_arithmetic_keeps_the_value_and_remembers_how_it_came(name: str, a: int, b: int) -> None:
    act = OPERATORS[name]
    for left, right in (
        (TracedInt(a, A), b),
        (a, TracedInt(b, B)),
        (TracedInt(a, A), TracedInt(b, B)),
    ):
        found = act(left, right)
        assert found == act(a, b)
        assert isinstance(found, TracedInt)
        assert evaluate(found.origin, {A: a, B: b}) == act(a, b)


@given(st.lists(st.tuples(st.sampled_from(sorted(OPERATORS)), small), max_size=5), small, small)
def test_what_came_by_many_steps_follows_a_new_value(steps, a: int, new: int) -> None:
    def walk(number: int) -> int:
        for name, other in steps:
            number = OPERATORS[name](number, other)
        return number

    found = walk(TracedInt(a, A))
    assert isinstance(found, TracedInt)
    assert evaluate(found.origin, {A: new}) == walk(new)
    assert set(leaves(found.origin)) == {A}


def test_what_is_no_whole_number_any_more_is_forgotten() -> None:
    six = TracedInt(6, A)
    for found in (six / 4, six * 1.5, six**0.5, six % 4, float(six), six == 6, six < 7, six * True):
        assert not isinstance(found, TracedInt)
    assert (six / 4, six**0.5, six % 4) == (1.5, 6**0.5, 2)
    assert (-six).origin == Derived("sub", 0, A)
    assert -six == -6


def test_a_traced_integer_is_an_integer_wherever_one_is_wanted() -> None:
    six = TracedInt(6, A)
    assert [*range(six)] == [*range(6)]
    assert "abcdefgh"[six] == "g"
    assert {6: "x"}[six] == "x"
    assert f"{six} {six:03d} {six!r}" == "6 006 6"
    assert [0] * six == [0] * 6
    assert torch.zeros(six, 2).shape == (6, 2)
    assert type(copy.deepcopy(six)) is int
    assert type(pickle.loads(pickle.dumps(six))) is int  # noqa: S301


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size, self.shape, self.sizes, self.flag = 4, (2, 3), [5, 6], True
        self.name, self.ratio, self.mixed, self.none = "n", 0.5, (1, "a"), ()
        self.inner = nn.Conv2d(2, 4, 3)


def values(module: nn.Module) -> list[tuple[str, str, type, object, list[type]]]:
    return [
        (path, name, type(v), v, [type(i) for i in v] if isinstance(v, (tuple, list)) else [])
        for path, part in module.named_modules()
        for name, v in vars(part).items()
        if isinstance(v, (bool, int, float, str, tuple, list))
    ]


def test_integers_are_traced_inside_and_plain_outside() -> None:
    model = Holder()
    before, sizes = values(model), model.sizes
    with traced_attributes(model):
        assert model.size.origin == Attribute("", "size")
        assert [i.origin for i in model.shape] == [
            Attribute("", "shape", 0),
            Attribute("", "shape", 1),
        ]
        assert model.sizes[1].origin == Attribute("", "sizes", 1)
        assert model.inner.out_channels.origin == Attribute("inner", "out_channels")
        assert model.flag is True
        assert model.mixed == (1, "a")
    assert values(model) == before
    assert model.sizes is sizes


def test_integers_are_plain_again_after_an_error() -> None:
    model = Holder()
    before = values(model)
    with pytest.raises(RuntimeError, match="on the way"), traced_attributes(model):
        raise RuntimeError("on the way")
    assert values(model) == before


def test_what_forward_sets_meanwhile_stays() -> None:
    model = Holder()
    with traced_attributes(model):
        model.size = 9
        model.new = model.shape[0] * 5
    assert (model.size, model.new) == (9, 10)


def test_a_traced_integer_in_a_tensor_call_is_what_a_plain_one_is() -> None:
    x: Tensor = torch.arange(24.0)
    four = TracedInt(4, A)
    assert torch.equal(x.view(four, -1), x.view(4, -1))
    assert torch.equal(x.unflatten(0, (four, 6)), x.unflatten(0, (4, 6)))
    assert torch.equal(x[: four * 2], x[:8])


@pytest.mark.parametrize(
    ("origin", "text"),
    [
        (Attribute("encoder.attn", "heads"), "encoder.attn.heads"),
        (Attribute("", "config.width"), "config.width"),
        (Attribute("norm", "normalized_shape", 0), "norm.normalized_shape[0]"),
        (Derived("mul", 3, Derived("sub", Attribute("a", "n"), 1)), "(3 * (a.n - 1))"),
    ],
    ids=["attribute", "of the model itself", "in a tuple", "derived"],
)
def test_an_origin_is_shown_as_one_would_write_it(origin: Origin, text: str) -> None:
    assert show(origin) == text
