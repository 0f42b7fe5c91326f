"""The axis algebra against explicit lists of positions."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from apoptosis.structure import axes
from apoptosis.structure.axes import ONE, ZERO, Axis, Expr, Indices, size_of, sum_of, times
from oracles.axis_strategies import (
    Equate,
    Leaf,
    Pin,
    Position,
    Product,
    Recipe,
    Split,
    Step,
    Sum,
    World,
    kept_places,
    positions,
    programs,
    recipes,
)

SEEDS = st.integers(0, 2**16)


# --- checks: each raises by itself; the deliberately broken algebras below go through the same ones -------------------


def check_recipe(recipe: Recipe) -> None:
    """The algebra indexes the positions of a recipe, in their order, and resolves to the normal form."""
    world = World()
    raw, places = world.expr(recipe), world.positions(recipe)
    resolved = axes.resolve(raw)
    assert positions(raw) == places, "a product or a sum lists other positions"
    assert positions(resolved) == without_singles(places), "resolve changed the positions"
    assert size_of(raw) == size_of(resolved) == recipe.size == len(places), "sizes differ"
    check_normal(resolved)


def check_normal(expr: Expr) -> None:
    """Some free axes of two indices or more, then at most one sum of two terms or more."""
    for term in expr.terms:
        *before, last = term or (None,)
        assert all(isinstance(factor, Axis) for factor in before), f"{expr} is not normal"
        if isinstance(last, Expr):
            assert before, f"{expr} is not normal: a sum alone is no term"
            assert len(last.terms) > 1, f"{expr} is not normal: a sum of one term"
            check_normal(last)
    for axis in expr.axes():
        assert axis.bound is None, f"{expr} is not normal: {axis} is bound"
        assert axis.size > 1, f"{expr} is not normal: {axis} is trivial"


def check_program(program: Iterable[Step], seed: int) -> None:
    """Run the steps; then all of them hold together, whatever is kept of the axes that are left free."""
    world = World()
    cuts: list[tuple[Split, Expr, Expr]] = []
    for step in program:
        match step:
            case Equate(left, right):
                axes.equate(world.expr(left), world.expr(right), "unsolved")
                check_same(world, left, right)
            case Split(whole, at):
                cuts.append((step, *axes.split(world.expr(whole), at)))
            case Pin(whole):
                axes.pin(world.expr(whole), "asked")
                check_pinned(world, whole)

    kept = some_indices(free_axes(world), seed)
    for step in program:
        match step:
            case Equate(left, right):
                check_same(world, left, right)
                check_kept(world, left, kept)
                check_kept(world, right, kept)
                assert_same_indices(
                    kept_of(world.expr(left), kept), kept_of(world.expr(right), kept)
                )
            case Pin(whole):
                check_pinned(world, whole)
                assert_same_indices(kept_of(world.expr(whole), kept), np.arange(whole.size))
            case Split(whole, _):
                check_kept(world, whole, kept)
    for step, first, rest in cuts:
        check_parts(world.expr(step.whole), step.at, first, rest)


def check_same(world: World, left: Recipe, right: Recipe) -> None:
    """Position by position, both sides have the same free coordinates; they differ only where something is pinned."""
    a, b = (axes.resolve(world.expr(side)) for side in (left, right))
    for expr, side in ((a, left), (b, right)):
        check_normal(expr)
        assert positions(expr) == world.meaning(side), "bindings and expression disagree"
        assert size_of(expr) == side.size, "a size changed"
    assert free_coordinates(a) == free_coordinates(b), "equated sides have other free coordinates"
    pins = [axis for axis in (*a.axes(), *b.axes()) if axis.pin is not None]
    assert a == b or pins, "not solved, and not pinned"
    for axis in world.axes.values():
        assert size_of(axes.resolve(Expr.of(axis))) == axis.size, "a size changed"


def check_kept(world: World, recipe: Recipe, kept: dict[Axis, Indices]) -> None:
    """What stays of a recipe is the same by its expression, by what its axes are bound to, and by what they keep."""
    own = kept_of(world.expr(recipe), kept)
    assert_same_indices(own, kept_places(world.meaning(recipe), kept))
    of_axes = {(axis := world.axis(leaf)): kept_of(Expr.of(axis), kept) for leaf in recipe.leaves()}
    assert_same_indices(own, kept_places(world.positions(recipe), of_axes))


def check_pinned(world: World, recipe: Recipe) -> None:
    for axis in axes.resolve(world.expr(recipe)).axes():
        assert axis.pin is not None, f"{axis} is part of something pinned, but free"


def check_parts(whole: Expr, at: int, first: Expr, rest: Expr) -> None:
    """The parts have their sizes, and laid end to end they are the whole."""
    assert [size_of(first), size_of(rest)] == [at, size_of(whole) - at], "parts of other sizes"
    parts = positions(axes.resolve(first)) + positions(axes.resolve(rest))
    assert parts == positions(axes.resolve(whole)), "the parts are not the whole"
    assert axes.resolve(sum_of([first, rest])) == axes.resolve(whole)


def check_coordinates(recipe: Recipe, seed: int) -> None:
    """The index of every axis at every position, at full size and after a cut."""
    world = World()
    expr = axes.resolve(world.expr(recipe))
    shrunken = {axis: len(own) for axis, own in some_indices(set(expr.axes()), seed).items()}
    for sizes in ({}, shrunken):
        places = positions(expr, sizes)
        for axis in (*expr.axes(), Axis(3)):
            columns = axes.coordinates(expr, axis, sizes)
            depth = max((len(own_indices(each, axis)) for each in positions(expr)), default=0)
            assert len(columns) == depth, f"{len(columns)} coordinates instead of {depth}"
            assert size_of(expr, sizes) == len(places)
            for num, column in enumerate(columns):
                rows = [own_indices(place, axis) for place in places]
                assert_same_indices(column, [row[num] if num < len(row) else -1 for row in rows])


def check_two_cuts(recipe: Recipe, seed: int) -> None:
    """Cutting twice is cutting once by the composed indices."""
    expr = axes.resolve(World().expr(recipe))
    first = some_indices(set(expr.axes()), seed)
    shrunken = {axis: len(own) for axis, own in first.items()}
    second = some_indices(set(expr.axes()), seed + 1, sizes=shrunken)
    for axis in [*second][::3]:
        del second[axis]  # some are not touched again
    composed = {axis: own[second[axis]] if axis in second else own for axis, own in first.items()}
    once = axes.kept_indices(expr, composed, {})
    before = axes.kept_indices(expr, first, {})
    again = axes.kept_indices(expr, second, shrunken)
    assert_same_indices(before[again], once)
    assert_same_indices(once, kept_places(positions(expr), composed))


def assert_same_indices(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(found, np.asarray(expected, dtype=np.int64))


# --- what the checks are made of --------------------------------------------------------------------------------------


def kept_of(expr: Expr, kept: dict[Axis, Indices]) -> Indices:
    return axes.kept_indices(axes.resolve(expr), kept, {})


def without_singles(places: list[Position]) -> list[Position]:
    return [tuple((axis, index) for axis, index in place if axis.size != 1) for place in places]


def own_indices(position: Position, axis: Axis) -> list[int]:
    return [index for other, index in position if other is axis]


def free_coordinates(expr: Expr) -> list[Position]:
    return [
        tuple((axis, index) for axis, index in place if axis.pin is None)
        for place in positions(expr)
    ]


def free_axes(world: World) -> set[Axis]:
    every = (axis for leaf in world.axes.values() for axis in axes.resolve(Expr.of(leaf)).axes())
    return {axis for axis in every if axis.pin is None}


def some_indices(
    which: set[Axis], seed: int, *, sizes: dict[Axis, int] | None = None
) -> dict[Axis, Indices]:
    """A random set of indices per axis, in order; now and then none."""
    rng = np.random.default_rng(seed)
    return {
        axis: np.flatnonzero(rng.random((sizes or {}).get(axis, axis.size)) < 0.6)
        for axis in sorted(which, key=lambda axis: axis.serial)
    }


def new(*sizes: int) -> list[Expr]:
    return [Expr.of(Axis(size)) for size in sizes]


def kept(expr: Expr, *choices: tuple[Expr, list[int]]) -> list[int]:
    """What is kept of `expr` when some axes keep these indices only."""
    chosen = {}
    for each, indices in choices:
        axis = axes.resolve(each).axis
        assert axis is not None
        assert axis.pin is None
        chosen[axis] = np.array(indices)
    return axes.kept_indices(axes.resolve(expr), chosen, {}).tolist()


def term_sizes(expr: Expr) -> list[int]:
    return [size_of(Expr((term,))) for term in axes.resolve(expr).terms]


# --- the normal form --------------------------------------------------------------------------------------------------


@given(recipes())
def test_the_normal_form_lists_the_same_positions(recipe: Recipe) -> None:
    check_recipe(recipe)


@given(recipes(), recipes(), recipes())
def test_products_and_sums_are_associative_and_products_distribute_from_the_right(
    a: Recipe, b: Recipe, c: Recipe
) -> None:
    world = World()
    x, y, z = (world.expr(each) for each in (a, b, c))
    assert times(times(x, y), z) == times(x, times(y, z)) == times(x, y, z)
    assert sum_of([sum_of([x, y]), z]) == sum_of([x, sum_of([y, z])])
    assert times(sum_of([x, y]), z) == sum_of([times(x, z), times(y, z)])


@given(recipes())
def test_one_and_zero_are_neutral(recipe: Recipe) -> None:
    expr = World().expr(recipe)
    assert times(expr, ONE) == times(ONE, expr) == expr
    assert sum_of([expr, ZERO]) == sum_of([ZERO, expr]) == expr
    assert times(expr, ZERO) == times(ZERO, expr) == ZERO
    assert times() == ONE
    assert sum_of([]) == ZERO


def test_axes_of_size_one_vanish_and_of_size_zero_are_the_empty_sum() -> None:
    x, one, none = new(3, 1, 0)
    assert axes.resolve(times(one, x, one)) == x
    assert axes.resolve(one) == ONE
    assert axes.resolve(none) == axes.resolve(times(x, none)) == ZERO
    assert axes.resolve(times(x, sum_of([one, none, x]))) == times(x, sum_of([ONE, x]))


# --- equations --------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(programs(), SEEDS)
def test_whatever_is_kept_is_kept_on_both_sides_of_every_equation(
    program: list[Step], seed: int
) -> None:
    check_program(program, seed)


@settings(max_examples=10)
@given(programs(least=30, most=60), SEEDS)
def test_many_equations_on_shared_axes_end_and_hold(program: list[Step], seed: int) -> None:
    check_program(program, seed)


@given(recipes(), recipes())
def test_expressions_of_different_sizes_are_refused(a: Recipe, b: Recipe) -> None:
    world = World()
    if a.size == b.size:
        b = Sum((b, Leaf(2, "longer")))
    with pytest.raises(ValueError, match=rf"are {a.size} and {b.size} long: never equal"):
        axes.equate(world.expr(a), world.expr(b), "unsolved")


@given(recipes())
def test_an_equation_with_itself_changes_nothing(recipe: Recipe) -> None:
    world = World()
    axes.equate(world.expr(recipe), world.expr(recipe), "unsolved")
    assert all(axis.bound is None and axis.pin is None for axis in world.axes.values())


@given(recipes())
def test_a_new_axis_takes_any_expression_without_pins(recipe: Recipe) -> None:
    world = World()
    axis = Expr.of(Axis(recipe.size))
    axes.equate(axis, world.expr(recipe), "unsolved")
    assert axes.resolve(axis) == axes.resolve(world.expr(recipe))
    assert all(each.pin is None for each in world.axes.values())


def test_products_without_a_common_factor_are_pinned_for_the_reason() -> None:
    a, b, c, d = new(2, 9, 3, 6)
    axes.equate(times(a, b), times(c, d), "view of 2·9 as 3·6")
    # from the right: 9 and 6 do not divide either
    assert {each.axis.pin for each in (a, b, c, d) if each.axis} == {"view of 2·9 as 3·6"}


def test_a_common_factor_stays_free_though_the_rest_is_pinned() -> None:
    h, a, b, c, d = new(4, 2, 9, 3, 6)
    axes.equate(times(h, a, b), times(h, c, d), "unsolved")
    left, right = (kept(side, (h, [0, 3])) for side in (times(h, a, b), times(h, c, d)))
    assert left == right == [*range(18), *range(54, 72)]


def test_an_axis_keeps_the_first_reason_it_was_pinned_for() -> None:
    a, b = new(4, 4)
    axes.pin(b, "first")
    axes.equate(a, b, "unsolved")
    axes.pin(a, "second")
    resolved = axes.resolve(a).axis
    assert resolved is not None
    assert resolved.pin == "first"


# --- deep and adversarial cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backwards", [False, True])
def test_a_long_chain_of_equal_axes_is_one_axis(backwards: bool) -> None:
    chain = new(*[4] * 1000)
    pairs = list(zip(chain, chain[1:], strict=False))
    for a, b in reversed(pairs) if backwards else pairs:
        axes.equate(a, b, "unsolved")
    assert {axes.resolve(each).axis for each in reversed(chain)} == {chain[0].axis}


def test_an_axis_can_be_cut_one_by_one() -> None:
    whole = rest = new(400)[0]
    for _ in range(399):
        first, rest = axes.split(rest, 1)
        assert size_of(first) == 1
    assert axes.resolve(whole) == sum_of([ONE] * 400)


@pytest.mark.parametrize(("a", "b"), [(3, 5), (34, 55), (40, 60), (1, 64)])
def test_a_sum_that_commutes_is_periodic(a: int, b: int) -> None:
    """x + y = y + x leaves one axis of the greatest common divisor, repeated."""
    x, y = new(a, b)
    axes.equate(sum_of([x, y]), sum_of([y, x]), "unsolved")
    assert axes.resolve(sum_of([x, y])) == axes.resolve(sum_of([y, x]))
    period = np.gcd(a, b)
    assert term_sizes(sum_of([x, y])) == [period] * ((a + b) // period)


def test_nested_doubling_ends() -> None:
    """x6 = x5 + x5, x5 = x4 + x4, …: many occurrences of one axis."""
    halves = new(*(3 * 2**power for power in range(7)))
    for half, whole in zip(halves, halves[1:], strict=False):
        axes.equate(whole, sum_of([half, half]), "unsolved")
    assert axes.resolve(halves[-1]) == sum_of([halves[0]] * 64)


# --- splits -----------------------------------------------------------------------------------------------------------


@given(recipes(), st.data())
def test_the_parts_of_a_split_are_the_whole(recipe: Recipe, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, recipe.size))
    world = World()
    first, rest = axes.split(world.expr(recipe), at)
    check_parts(world.expr(recipe), at, first, rest)
    assert positions(axes.resolve(world.expr(recipe))) == world.meaning(recipe)
    assert not any(axis.pin for part in (first, rest) for axis in axes.resolve(part).axes())


@given(recipes(), st.data())
def test_the_parts_of_something_pinned_are_pinned(recipe: Recipe, data: st.DataObject) -> None:
    world = World()
    axes.pin(world.expr(recipe), "asked")
    for part in axes.split(world.expr(recipe), data.draw(st.integers(0, recipe.size))):
        assert {axis.pin for axis in axes.resolve(part).axes()} <= {"asked"}


def test_a_split_off_the_boundary_of_a_factor_splits_the_factor_in_three() -> None:
    c, four = new(29, 4)
    first, rest = axes.split(times(c, four), 58)
    assert term_sizes(c) == [14, 1, 14]
    assert term_sizes(four) == [2, 2]
    assert term_sizes(first) == [56, 2]
    assert term_sizes(rest) == [2, 56]


# --- coordinates and cuts ---------------------------------------------------------------------------------------------

REPEATED = [
    Sum((Leaf(3), Leaf(3))),
    Product((Leaf(3), Leaf(3))),
    Product((Leaf(2, "b"), Leaf(3), Leaf(3))),
    Product((Leaf(3), Sum((Leaf(2, "b"), Leaf(3), Product((Leaf(3), Leaf(3))))))),
    Sum((Leaf(2, "b"), Product((Leaf(3), Leaf(2, "b"), Leaf(3))), Leaf(3))),
]


@given(recipes(), SEEDS)
def test_coordinates_are_those_of_the_listed_positions(recipe: Recipe, seed: int) -> None:
    check_coordinates(recipe, seed)


@pytest.mark.parametrize("recipe", REPEATED, ids=lambda recipe: repr(World().expr(recipe)))
@pytest.mark.parametrize("seed", range(3))
def test_coordinates_of_axes_that_occur_more_than_once(recipe: Recipe, seed: int) -> None:
    check_coordinates(recipe, seed)
    check_two_cuts(recipe, seed)


def test_coordinates_of_a_flattened_gram_matrix() -> None:
    (v,) = new(2)
    assert v.axis is not None
    columns = axes.coordinates(sum_of([times(v, v), v]), v.axis, {})
    assert [column.tolist() for column in columns] == [[0, 0, 1, 1, 0, 1], [0, 1, 0, 1, -1, -1]]


@given(recipes(), SEEDS)
def test_cutting_twice_is_cutting_once_by_the_composed_indices(recipe: Recipe, seed: int) -> None:
    check_two_cuts(recipe, seed)


# --- worked examples --------------------------------------------------------------------------------------------------


def test_residual_additions_share_one_stream() -> None:
    stem, *blocks = new(8, 8, 8)
    for block in blocks:
        axes.equate(stem, block, "add")
    assert [axes.resolve(block) for block in blocks] == [stem, stem]
    assert kept(blocks[1], (stem, [0, 5])) == [0, 5]


@pytest.mark.parametrize("viewed_first", [False, True])
def test_a_fused_qkv_is_three_times_the_same_heads(viewed_first: bool) -> None:
    qkv, three, h, d = new(24, 3, 4, 2)
    if viewed_first:
        axes.equate(qkv, times(three, h, d), "view")
    q, kv = axes.split(qkv, 8)
    k, v = axes.split(kv, 8)
    if not viewed_first:
        for part in (q, k, v):
            axes.equate(part, times(h, d), "view")
    assert axes.resolve(qkv) == sum_of([times(h, d)] * 3)
    assert kept(qkv, (h, [1, 3]), (d, [1])) == [3, 7, 11, 15, 19, 23]


def test_a_neox_qkv_is_per_head_the_sum_of_q_and_k_and_v() -> None:
    qkv, h, each = new(18, 3, 6)
    axes.equate(qkv, times(h, each), "view")
    q, kv = axes.split(each, 2)
    k, v = axes.split(kv, 2)
    axes.equate(q, k, "attention")
    assert axes.resolve(qkv) == times(h, sum_of([axes.resolve(part) for part in (q, q, v)]))
    assert kept(qkv, (h, [0, 2]), (q, [1])) == [1, 3, 4, 5, 13, 15, 16, 17]
    assert kept(qkv, (h, [1]), (v, [0])) == [6, 7, 8, 9, 10]


def test_both_halves_of_a_gated_projection_keep_the_same() -> None:
    (n,) = new(8)
    a, b = axes.split(n, 4)
    axes.equate(a, b, "mul")
    assert axes.resolve(n) == sum_of([axes.resolve(a)] * 2)
    assert kept(n, (a, [0, 2])) == [0, 2, 4, 6]


def test_grouped_queries_are_key_heads_times_repeats() -> None:
    heads, kv, r, d = new(6, 2, 3, 2)
    axes.equate(times(heads, d), times(kv, r, d), "attention")
    assert axes.resolve(heads) == times(kv, r)
    assert kept(heads, (kv, [1]), (r, [0, 2])) == [3, 5]
    assert kept(times(heads, d), (kv, [0]), (r, [1])) == [2, 3]


def test_a_concatenation_flattened_channels_last_keeps_channels_at_every_place() -> None:
    y, x, a, b = new(2, 2, 2, 3)
    (flat,) = new(20)
    axes.equate(flat, times(y, x, sum_of([a, b])), "flatten")
    assert axes.resolve(flat) == times(y, x, sum_of([a, b]))
    assert kept(flat, (a, [1]), (b, [0, 2])) == [
        place + own for place in (0, 5, 10, 15) for own in (1, 2, 4)
    ]


def test_a_concatenation_flattened_channels_first_is_a_sum() -> None:
    a, b, y = new(2, 3, 4)
    flat = times(sum_of([a, b]), y)
    assert flat == sum_of([times(a, y), times(b, y)])
    assert kept(flat, (a, [1]), (b, [0])) == [4, 5, 6, 7, 8, 9, 10, 11]


def test_channel_shuffle_splits_29_channels_off_their_boundary() -> None:
    """Concatenate two halves, view them as (2, 58), transpose, flatten, take the halves; and again."""
    first, second, third = new(58, 58, 58)
    whole = sum_of([first, second])
    for branch in (second, third):
        groups, channels = new(2, 58)
        axes.equate(sum_of([first, branch]), times(groups, channels), "view")
        assert axes.resolve(first) == axes.resolve(branch)
        first, rest = axes.split(times(channels, groups), 58)
        check_parts(times(channels, groups), 58, first, rest)
    assert size_of(whole) == 116
    assert sorted({axis.size for axis in axes.resolve(whole).axes()}) == [14, 29]
    opening = axes.resolve(whole).terms[0]
    assert term_sizes(Expr((opening,))) == [14]
    assert not any(axis.pin for axis in axes.resolve(whole).axes())


# --- the checks can fail ----------------------------------------------------------------------------------------------

ORIGINAL = {name: getattr(axes, name) for name in ("_times", "split", "coordinates")}


def kept_column_major(expr: Expr, chosen: dict[Axis, Indices], sizes: dict[Axis, int]) -> Indices:
    """Wrong: the first factor runs fastest."""
    offset, parts = 0, [np.zeros(0, dtype=np.int64)]
    for term in expr.terms:
        place, length = np.zeros(1, dtype=np.int64), 1
        for factor in term:
            if isinstance(factor, Axis):
                size = sizes.get(factor, factor.size)
                own = chosen.get(factor, np.arange(size))
            else:
                size = size_of(factor, sizes)
                own = kept_column_major(factor, chosen, sizes)
            place = np.sort((own[:, None] * length + place[None, :]).ravel())
            length *= size
        parts.append(place + offset)
        offset += length
    return np.concatenate(parts)


def bind_without_pinning(axis: Axis, expr: Expr) -> None:
    """Wrong: a pinned axis is free again in what it is bound to."""
    axis.bound = expr


def distribute_from_the_left(a: Expr, b: Expr) -> Expr:
    """Wrong: c·(a + b) is not c·a + c·b."""
    return sum_of(ORIGINAL["_times"](a, Expr((term,))) for term in b.terms)


def split_back_to_front(expr: Expr, at: int) -> tuple[Expr, Expr]:
    """Wrong: the last `at` positions."""
    first, rest = ORIGINAL["split"](expr, size_of(expr) - at)
    return rest, first


def coordinates_at_full_size(expr: Expr, axis: Axis, _: dict[Axis, int]) -> list[Indices]:
    """Wrong: as if nothing had been cut."""
    return ORIGINAL["coordinates"](expr, axis, {})


def unsolved_without_pinning(*_: Any) -> list[tuple[Expr, Expr]]:
    """Wrong: what is not solved is left free."""
    return []


@dataclass(frozen=True)
class Broken:
    """A wrong piece of the algebra, and what the check says that must catch it."""

    name: str
    wrong: Callable[..., Any]
    check: Callable[..., None]
    arguments: tuple[st.SearchStrategy[Any], ...]
    says: str

    @property
    def id(self) -> str:
        return f"{self.wrong.__name__}-{self.check.__name__}"


EQUATIONS = (programs(), SEEDS)
CUTS = (recipes(), SEEDS)
BROKEN = [
    Broken("kept_indices", kept_column_major, check_program, EQUATIONS, "not equal"),
    Broken("kept_indices", kept_column_major, check_two_cuts, CUTS, "not equal"),
    Broken("_bind", bind_without_pinning, check_program, EQUATIONS, "pinned, but free"),
    Broken("_times", distribute_from_the_left, check_recipe, (recipes(),), "other positions"),
    Broken("split", split_back_to_front, check_program, EQUATIONS, "parts are not the whole"),
    Broken("coordinates", coordinates_at_full_size, check_coordinates, CUTS, "not equal"),
    Broken(
        "_equate_products", unsolved_without_pinning, check_program, EQUATIONS, "free coordinates"
    ),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.id)
def test_a_broken_algebra_is_caught(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axes, broken.name, broken.wrong)

    @settings(max_examples=300, phases=[Phase.generate], report_multiple_bugs=False)
    @given(st.tuples(*broken.arguments))
    def run(arguments: tuple[Any, ...]) -> None:
        broken.check(*arguments)

    with pytest.raises(AssertionError, match=broken.says):
        run()
