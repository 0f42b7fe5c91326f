"""Masks from saliencies: the entries that sorting everything would keep, and no other."""

import math
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from apoptosis.criteria import SALIENCIES, Saliency, Scores, saliencies
from apoptosis.errors import (
    BudgetError,
    ConfigError,
    NonFiniteError,
    PlanMismatchError,
)
from apoptosis.masks import MaskPlan, Pattern, identity_masks, mask, maskable
from apoptosis.planning import Sparsity, make_masks, threshold
from oracles.mask_choice import (
    CannotBeMetError,
    assert_kept,
    count_of,
    emptied,
    global_masks,
    kept_of,
    layer_masks,
    nth_largest,
    pattern_masks,
    plan_of,
    random_plan,
    saliency,
    stage_keeps,
    stage_patterns,
)
from oracles.untouched import Snapshot

DIMS = {"linear": 1, "conv": 1, "transposed": 0, "conv1d": 1}
VALUES = ("ties", "equal", "zero", "signed zeros", "denormal", "spread", "neighbours", "random")
DTYPES = (torch.float32, torch.float64)

LayerSpec = tuple[str, int, int, int]


def layer(spec: LayerSpec) -> nn.Module:
    kind, reads, writes, kernel = spec
    if kind == "linear":
        return nn.Linear(reads, writes)
    if kind == "conv":
        return nn.Conv2d(reads, writes, (kernel, 1))
    if kind == "conv1d":
        return nn.Conv1d(reads, writes, kernel, bias=False)
    return nn.ConvTranspose2d(reads, writes, (1, kernel))


def network(*specs: LayerSpec) -> nn.Sequential:
    """Layers that are never run; with norms between them, which are not masked."""
    parts = [part for spec in specs for part in (layer(spec), nn.BatchNorm1d(spec[2]))]
    return nn.Sequential(*parts)


def dims_of(*specs: LayerSpec) -> dict[str, int]:
    return {f"{2 * place}.weight": DIMS[spec[0]] for place, spec in enumerate(specs)}


def values_for(
    model: nn.Module, kind: str, seed: int, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    numbers = np.float64 if dtype == torch.float64 else np.float32
    tiny, largest = np.finfo(numbers).smallest_subnormal, np.finfo(numbers).max

    def of(shape: torch.Size) -> np.ndarray:
        size = math.prod(shape)
        return {
            "ties": lambda: rng.integers(0, 4, size),
            "equal": lambda: np.full(size, 0.7),
            "zero": lambda: np.zeros(size),
            "signed zeros": lambda: rng.choice(
                [0.0, -0.0, tiny, 1.0], size, p=[0.4, 0.4, 0.1, 0.1]
            ),
            "denormal": lambda: rng.integers(0, 6, size) * np.float64(tiny),
            "spread": lambda: rng.choice([largest, largest / 2, 1.0, 2.0**-140, tiny, 0.0], size),
            "neighbours": lambda: 1 + rng.integers(-3, 4, size) * np.finfo(numbers).eps,
            "random": lambda: rng.exponential(size=size),
        }[kind]()

    return {
        name: torch.from_numpy(of(layer.shape).astype(numbers)).view(layer.shape).to(dtype)
        for name, layer in maskable(model).items()
    }


def specs(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[list[LayerSpec]]:
    one = st.tuples(st.sampled_from(sorted(DIMS)), sizes, sizes, st.integers(1, 3))
    return st.lists(one, min_size=1, max_size=4)


any_specs = specs(st.integers(1, 6))
specs_of_fours = specs(st.sampled_from((4, 8)))
seeds = st.integers(0, 10**6)
keeps = st.one_of(
    st.integers(1, 1000).map(lambda n: n / 1000), st.sampled_from((1.0, 0.3, 1e-12, 1 - 1e-12))
)


def made_or_refused(
    model: nn.Module, values: dict[str, Tensor], sparsity: Sparsity, **options: Any
) -> MaskPlan | BudgetError:
    try:
        return make_masks(model, values, sparsity, **options)
    except BudgetError as error:
        return error


def assert_as(found: MaskPlan | BudgetError, expected: dict[str, np.ndarray]) -> None:
    """The masks expected; or the refusal that names every tensor they would empty."""
    gone = emptied(expected)
    if isinstance(found, BudgetError):
        assert gone, f"nothing would be emptied: {found}"
        assert all(name in str(found) for name in gone)
        return
    assert not gone, f"emptied: {gone}"
    assert_kept(found, expected)


# ------------------------------------------------------------------------------------------------ against sorting


@given(any_specs, st.sampled_from(VALUES), seeds, keeps, st.sampled_from(DTYPES))
@settings(max_examples=80)
def test_a_share_of_all_keeps_what_sorting_keeps(
    drawn: list[LayerSpec], kind: str, seed: int, keep: float, dtype: torch.dtype
) -> None:
    model = network(*drawn)
    values = values_for(model, kind, seed, dtype)
    expected = global_masks(values, keep)
    assert_kept(make_masks(model, values, Sparsity(keep=keep, allow_empty=True)), expected)
    assert_as(made_or_refused(model, values, Sparsity(keep=keep)), expected)


@given(any_specs, st.sampled_from(VALUES), seeds, keeps, st.sampled_from(DTYPES))
@settings(max_examples=60)
def test_a_share_of_each_layer_keeps_what_sorting_it_keeps(
    drawn: list[LayerSpec], kind: str, seed: int, keep: float, dtype: torch.dtype
) -> None:
    model = network(*drawn)
    values = values_for(model, kind, seed, dtype)
    keep = max(keep, *(1 / own.numel() for own in values.values()), 0.0)
    found = make_masks(model, values, Sparsity(keep=keep, scope="layer"))
    assert_kept(found, layer_masks(values, keep))


@given(
    any_specs,
    st.sampled_from(VALUES),
    seeds,
    keeps,
    st.sampled_from(("global", "layer")),
    st.integers(0, 10),
)
@settings(max_examples=60)
def test_what_is_gone_stays_gone_and_is_not_ranked(
    drawn: list[LayerSpec], kind: str, seed: int, keep: float, scope: str, share: int
) -> None:
    model = network(*drawn)
    values = values_for(model, kind, seed)
    first = random_plan(model, seed, share / 10)
    before = kept_of(first)
    if scope == "layer":
        keep = max(keep, *(1 / own.numel() for own in values.values()), 0.0)
    oracle = global_masks if scope == "global" else layer_masks
    wanted = Sparsity(keep=keep, scope=scope, allow_empty=True)
    found = make_masks(model, values, wanted, start=first)
    assert_kept(found, oracle(values, keep, start=before))
    assert all(not (own & ~before[name]).any() for name, own in kept_of(found).items())
    assert found.num_kept <= first.num_kept


@given(
    any_specs,
    st.sampled_from(("ties", "random", "zero")),
    seeds,
    keeps,
    st.sampled_from(("global", "layer")),
    st.lists(st.tuples(st.sampled_from(("0.*", "[24].*", "*2.weight")), keeps), max_size=2),
)
@settings(max_examples=60)
def test_shares_of_their_own_and_the_rest_meets_the_whole(
    drawn: list[LayerSpec],
    kind: str,
    seed: int,
    keep: float,
    scope: str,
    own: list[tuple[str, float]],
) -> None:
    model = network(*drawn)
    values = values_for(model, kind, seed)
    least = max(1 / own.numel() for own in values.values())
    shares = {p: max(share, least) for p, share in own if p.startswith("0") or len(drawn) > 1}
    keep = max(keep, least) if scope == "layer" else keep
    oracle = global_masks if scope == "global" else layer_masks
    try:
        expected = oracle(values, keep, shares=shares)
    except CannotBeMetError:
        reject()
    assume(not any(name not in shares and not own.any() for name, own in expected.items()))
    found = make_masks(model, values, Sparsity(keep=keep, scope=scope, shares=shares))
    assert_kept(found, expected)


@given(
    specs_of_fours,
    st.sampled_from(VALUES),
    seeds,
    st.sampled_from(((1, 2), (1, 4), (2, 4), (3, 4))),
    st.booleans(),
    st.sampled_from(DTYPES),
)
@settings(max_examples=40)
def test_of_each_m_along_the_inputs_the_n_largest_stay(
    drawn: list[LayerSpec],
    kind: str,
    seed: int,
    nm: tuple[int, int],
    masked_before: bool,
    dtype: torch.dtype,
) -> None:
    model = network(*drawn)
    values = values_for(model, kind, seed, dtype)
    start = random_plan(model, seed) if masked_before else None
    wanted = Sparsity(pattern=Pattern(*nm), allow_empty=True)
    found = make_masks(model, values, wanted, start=start)
    expected = pattern_masks(
        values, *nm, dims_of(*drawn), start=kept_of(start) if start is not None else None
    )
    assert_kept(found, expected)
    for name, own in found.masks.items():
        assert own.pattern == Pattern(*nm)
        assert own.dim == dims_of(*drawn)[name]


@given(specs_of_fours, seeds)
@settings(max_examples=10)
def test_half_of_each_four_is_exactly_half(drawn: list[LayerSpec], seed: int) -> None:
    model = network(*drawn)
    found = make_masks(model, values_for(model, "ties", seed), Sparsity(pattern="2:4"))
    assert found.num_kept * 2 == found.num_weights
    assert found.density == 0.5


@given(any_specs, st.sampled_from(VALUES), seeds, keeps)
@settings(max_examples=40)
def test_exactly_the_number_asked_for_is_left(
    drawn: list[LayerSpec], kind: str, seed: int, keep: float
) -> None:
    model = network(*drawn)
    found = make_masks(model, values_for(model, kind, seed), Sparsity(keep=keep, allow_empty=True))
    total = sum(math.prod(own.shape) for own in maskable(model).values())
    assert found.num_weights == total
    assert found.num_kept == max(1, math.floor(keep * total + 1e-9))
    assert found.density == found.num_kept / total
    weights = dict(mask(model, found).named_parameters())
    assert sum(int((weights[name] == 0).sum()) for name in found.masks) == total - found.num_kept


@given(any_specs, seeds, st.integers(1, 6), st.sampled_from((0.1, 0.25, 0.5)))
@settings(max_examples=25)
def test_stages_lead_to_the_share_asked_for_and_only_remove(
    drawn: list[LayerSpec], seed: int, stages: int, keep: float
) -> None:
    """Fresh values at every stage: what a stage removed does not come back, however large it would be now."""
    model = network(*drawn)
    start, before = identity_masks(model), None
    for stage, share in enumerate(stage_keeps(keep, stages)):
        values = values_for(model, "ties" if stage % 2 else "random", seed + stage)
        start = make_masks(model, values, Sparsity(keep=share, allow_empty=True), start=start)
        expected = global_masks(values, share, start=before)
        assert_kept(start, expected)
        before = expected
    assert start.num_kept == max(1, count_of(keep, start.num_weights))


@given(specs_of_fours, seeds, st.integers(1, 5))
@settings(max_examples=15)
def test_stages_of_a_pattern_only_remove(drawn: list[LayerSpec], seed: int, stages: int) -> None:
    model = network(*drawn)
    start, before = None, None
    counts = stage_patterns(2, 4, stages)
    for stage, n in enumerate(counts):
        if n == 4:
            continue
        values = values_for(model, "ties", seed + stage)
        start = make_masks(model, values, Sparsity(pattern=Pattern(n, 4)), start=start)
        before = pattern_masks(values, n, 4, dims_of(*drawn), start=before)
        assert_kept(start, before)
    assert start is not None
    assert start.density == 0.5


def test_schedules_of_the_oracle_end_where_they_should() -> None:
    assert stage_keeps(0.1, 49)[-1] == pytest.approx(0.1)
    assert [round(k, 4) for k in stage_keeps(0.25, 2)] == [0.5, 0.25]
    assert stage_patterns(2, 4, 1) == [2]
    assert stage_patterns(2, 4, 2) == [3, 2]
    assert stage_patterns(1, 16, 4) == [8, 4, 2, 1]


# ------------------------------------------------------------------------------------------------ order and numbers


def test_of_equals_the_first_tensor_and_the_first_index_stay() -> None:
    model = network(("linear", 3, 2, 1), ("linear", 2, 2, 1))
    values = {name: torch.ones(own.shape) for name, own in maskable(model).items()}
    found = make_masks(model, values, Sparsity(keep=0.7))
    assert found.kept("0.weight").all()
    assert found.kept("2.weight").tolist() == [[True, False], [False, False]]


def test_keeping_the_last_of_equals_would_be_noticed() -> None:
    model = network(("linear", 3, 2, 1))
    values = {"0.weight": torch.tensor([[0.0, 1.0, 2.0], [1.0, 1.0, 0.0]])}
    wrong = torch.tensor([[False, False, True], [False, True, False]])
    with pytest.raises(AssertionError, match=r"0\.weight differs at \[\[0, 1\], \[1, 1\]\]"):
        assert_kept(plan_of(model, {"0.weight": wrong}), global_masks(values, 1 / 3))


def test_the_order_is_the_models_not_that_of_the_values() -> None:
    model = network(("linear", 3, 2, 1), ("conv", 2, 2, 2), ("linear", 2, 2, 1))
    values = values_for(model, "ties", 3)
    turned = dict(reversed(list(values.items())))
    wanted = Sparsity(keep=0.41, allow_empty=True)
    assert make_masks(model, turned, wanted).same_as(make_masks(model, values, wanted))
    assert_kept(make_masks(model, turned, wanted), global_masks(values, 0.41))


def test_minus_zero_is_zero() -> None:
    model = network(("linear", 4, 2, 1))
    values = {"0.weight": torch.tensor([[-0.0, 0.0, -0.0, 0.0], [1.0, -0.0, 0.0, 0.0]])}
    found = make_masks(model, values, Sparsity(keep=3 / 8))
    assert found.kept("0.weight").int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]


def test_float64_is_not_rounded_to_float32() -> None:
    model = network(("linear", 4, 1, 1))
    values = {"0.weight": 1 + torch.tensor([[0.0, 1e-12, 2e-12, 1e-15]], dtype=torch.float64)}
    found = make_masks(model, values, Sparsity(keep=0.5))
    assert found.kept("0.weight").tolist() == [[False, True, True, False]]


def test_formats_may_be_mixed() -> None:
    """A third in float32 is larger than a third in float64, and smaller in float16."""
    model = network(*[("linear", 2, 2, 1)] * 4)
    formats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    third = torch.tensor([[1 / 3, 1 / 5], [0.0, 2.0]], dtype=torch.float64)
    values = {f"{2 * i}.weight": third.to(dtype) for i, dtype in enumerate(formats)}
    for count in range(4, 17):
        wanted = Sparsity(keep=count / 16, allow_empty=True)
        assert_kept(make_masks(model, values, wanted), global_masks(values, count / 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_values_of_sixteen_bits_are_ranked_exactly(dtype: torch.dtype) -> None:
    model = network(("linear", 6, 5, 1), ("conv", 3, 4, 2))
    for kind in ("ties", "random", "zero"):
        values = {name: own.to(dtype) for name, own in values_for(model, kind, 1).items()}
        for keep in (0.1, 0.33, 0.8):
            wanted = Sparsity(keep=keep, allow_empty=True)
            assert_kept(make_masks(model, values, wanted), global_masks(values, keep))


def test_values_need_not_lie_in_memory_as_they_are_numbered() -> None:
    model = network(("linear", 4, 6, 1))
    values = {"0.weight": torch.randint(0, 3, (4, 6)).double().t()}
    assert not values["0.weight"].is_contiguous()
    assert_kept(make_masks(model, values, Sparsity(keep=0.4)), global_masks(values, 0.4))


def test_values_may_carry_a_graph_and_are_left_alone() -> None:
    model = network(("linear", 4, 6, 1))
    values = {"0.weight": torch.rand(6, 4, requires_grad=True)}
    before, snapshot = values["0.weight"].detach().clone(), Snapshot(model)
    make_masks(model, values, Sparsity(keep=0.4))
    snapshot.assert_unchanged()
    assert torch.equal(values["0.weight"], before)
    assert values["0.weight"].grad is None


def test_keep_everything_keeps_everything() -> None:
    model = network(("linear", 3, 5, 1), ("transposed", 2, 3, 2))
    for kind in VALUES:
        values = values_for(model, kind, 0)
        for scope in ("global", "layer"):
            found = make_masks(model, values, Sparsity(keep=1.0, scope=scope))
            assert found.same_as(identity_masks(model))
        assert make_masks(model, values, Sparsity(keep=1)).density == 1


def test_a_whole_number_that_rounding_missed_is_met() -> None:
    """0.29·100 is 28.999999999999996 in floating point."""
    model = network(("linear", 10, 10, 1))
    assert int(0.29 * 100) == 28
    assert make_masks(model, values_for(model, "random", 0), Sparsity(keep=0.29)).num_kept == 29


def test_names_choose_what_is_masked_and_counted() -> None:
    model = network(("linear", 4, 4, 1), ("linear", 4, 4, 1), ("linear", 4, 4, 1))
    values = values_for(model, "random", 0)
    found = make_masks(model, values, Sparsity(keep=0.5, names=("*", "!2.*")))
    chosen = {name: own for name, own in values.items() if name != "2.weight"}
    assert_kept(found, global_masks(chosen, 0.5))


def test_start_need_not_mask_every_tensor() -> None:
    model = network(("linear", 4, 4, 1), ("linear", 4, 4, 1))
    values = values_for(model, "random", 0)
    start = random_plan(model, 0, names=("2.weight",))
    found = make_masks(model, values, Sparsity(keep=0.3), start=start)
    before = {"0.weight": np.ones((4, 4), dtype=bool)} | kept_of(start)
    assert_kept(found, global_masks(values, 0.3, start=before))


def test_what_start_removed_elsewhere_stays_removed() -> None:
    model = network(("linear", 4, 4, 1), ("linear", 4, 4, 1))
    start = random_plan(model, 0)
    wanted = Sparsity(keep=0.3, names=("0.weight",))
    found = make_masks(model, values_for(model, "random", 0), wanted, start=start)
    for name in start.masks:
        assert name in found.masks
        assert not (found.kept(name) & ~start.kept(name)).any()


def test_start_may_leave_less_than_is_asked_for() -> None:
    model = network(("linear", 4, 4, 1), ("linear", 4, 4, 1))
    start = random_plan(model, 0, 0.2)
    for scope in ("global", "layer"):
        wanted = Sparsity(keep=0.9, scope=scope)
        found = make_masks(model, values_for(model, "random", 0), wanted, start=start)
        assert found.same_as(start)


def test_values_of_what_start_removed_do_not_matter() -> None:
    model = network(("linear", 6, 4, 1), ("linear", 4, 4, 1))
    start, values = random_plan(model, 0), values_for(model, "random", 0)
    wild = {n: v.where(start.kept(n), torch.full_like(v, 1e300)) for n, v in values.items()}
    wanted = Sparsity(keep=0.3)
    tame = make_masks(model, values, wanted, start=start)
    assert make_masks(model, wild, wanted, start=start).same_as(tame)


# ------------------------------------------------------------------------------------------------ threshold


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.sampled_from([kind for kind in VALUES if kind != "signed zeros"]),
    seeds,
    st.floats(0, 1),
    st.sampled_from(DTYPES),
)
@settings(max_examples=100)
def test_the_threshold_is_what_sorting_finds(
    sizes: list[int], kind: str, seed: int, where: float, dtype: torch.dtype
) -> None:
    total = sum(sizes)
    if not total:
        return
    model = nn.Linear(total, 1)
    values = list(values_for(model, kind, seed, dtype)["weight"].view(-1).split(sizes))
    rank = 1 + round(where * (total - 1))
    assert astuple(threshold(values, rank)) == nth_largest(values, rank)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_every_rank_of_a_few_values(zero: float) -> None:
    values = [torch.tensor([3.0, 1.0, 3.0]), torch.tensor([[1.0, 0.0], [zero, 3.0]])]
    for rank in range(1, 8):
        assert astuple(threshold(values, rank)) == nth_largest(values, rank)


def test_the_threshold_of_values_that_can_be_read_once() -> None:
    values = [torch.tensor([3.0, 1.0]), torch.tensor([2.0, 5.0])]
    assert astuple(threshold(iter(values), 3)) == (2.0, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_threshold_of_many_values(dtype: torch.dtype) -> None:
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(0), dtype=dtype).abs()
    ordered = np.sort(values.numpy())[::-1]
    for rank in (1, 7, 1000, 150_000, 299_999, 300_000):
        equal = int((ordered[:rank] == ordered[rank - 1]).sum())
        assert astuple(threshold(values.split(70_000), rank)) == (ordered[rank - 1], equal)


# ------------------------------------------------------------------------------------------------ saliency


@pytest.mark.parametrize("normalise", ["none", "max", "l2", "mean"])
@pytest.mark.parametrize("magnitude", [0.0, 1.0, 0.5])
def test_saliencies_are_normalised_scores_and_magnitudes(normalise: str, magnitude: float) -> None:
    model = network(("linear", 4, 3, 1), ("conv", 3, 2, 2), ("linear", 2, 2, 1)).double()
    weights = dict(model.named_parameters())
    torch.manual_seed(0)
    scores = {name: torch.randn_like(own).detach() for name, own in weights.items()}
    scores["4.weight"] = torch.zeros(2, 2, dtype=torch.float64)
    layers = maskable(model)
    found = saliencies(Scores(scores, "made up"), model, Saliency(normalise, magnitude), layers)
    assert set(found) == set(layers)
    for name, own in found.items():
        expected = saliency(scores[name], weights[name].detach(), normalise, magnitude)
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-300)


def test_saliencies_of_a_name_are_those_it_stands_for() -> None:
    assert SALIENCIES["plain"] == Saliency("none", 0.0)
    assert SALIENCIES["paper"] == Saliency("max", 1.0)
    assert SALIENCIES["normalised"] == Saliency("max", 0.0)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "keep", [0, 0.0, -0.1, 1.0000001, 2, math.nan, math.inf, -math.inf, True, False, "0.5", [0.5]]
)
def test_a_share_outside_zero_and_one_is_refused(keep: Any) -> None:
    with pytest.raises(ConfigError, match="keep"):
        Sparsity(keep=keep)


def test_either_a_share_or_a_pattern_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"keep[\s\S]*pattern|pattern[\s\S]*keep"):
        Sparsity()
    with pytest.raises(ConfigError, match=r"keep[\s\S]*pattern|pattern[\s\S]*keep"):
        Sparsity(keep=0.5, pattern="2:4")


@pytest.mark.parametrize("scope", ["layers", "", None, "GLOBAL", 1])
def test_another_scope_is_refused(scope: Any) -> None:
    with pytest.raises(ConfigError, match=r"scope[\s\S]*global[\s\S]*layer"):
        Sparsity(keep=0.5, scope=scope)


@pytest.mark.parametrize(
    "shares",
    [{"*": 0}, {"*": -0.5}, {"*": 1.5}, {"*": math.nan}, {"*": True}, {"*": "1"}, {3: 0.5}, ["*"]],
)
def test_shares_nobody_can_mean_are_refused(shares: Any) -> None:
    with pytest.raises(ConfigError, match="share"):
        Sparsity(keep=0.5, shares=shares)


@pytest.mark.parametrize(
    "text",
    ["", "2", "2-4", "2:4:8", "0:4", "5:4", "-1:4", "a:b", "2:", ":4", "1.5:4", "2:0", "4:2"],
)
def test_a_pattern_nobody_can_mean_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"2:4|N:M|n:m"):
        Pattern.parse(text)
    with pytest.raises(ConfigError, match=r"2:4|N:M|n:m"):
        Sparsity(pattern=text)


@pytest.mark.parametrize("pattern", [2.4, (2, 4), True, 24])
def test_a_pattern_that_is_no_text_is_refused(pattern: Any) -> None:
    with pytest.raises(ConfigError, match="pattern"):
        Sparsity(pattern=pattern)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "wanted", [Sparsity(keep=0.5), Sparsity(pattern="1:2")], ids=["keep", "n:m"]
)
def test_values_that_are_no_numbers_are_refused(
    wrong: float, dtype: torch.dtype, wanted: Sparsity
) -> None:
    model = network(("linear", 4, 3, 1), ("linear", 4, 3, 1))
    values = values_for(model, "random", 0, dtype)
    values["2.weight"][1, 1] = wrong
    with pytest.raises(NonFiniteError, match=r"2\.weight"):
        make_masks(model, values, wanted)


def test_values_rank_by_their_size_whatever_their_sign() -> None:
    model = network(("linear", 4, 3, 1))
    values = values_for(model, "random", 0)
    signed = {name: own * torch.randn_like(own).sign() for name, own in values.items()}
    found = make_masks(model, signed, Sparsity(keep=0.5))
    assert found.same_as(make_masks(model, values, Sparsity(keep=0.5)))


@pytest.mark.parametrize("sparsity", [0.5, None, "2:4"])
def test_what_is_no_sparsity_is_refused(sparsity: Any) -> None:
    model = network(("linear", 4, 3, 1))
    with pytest.raises(ConfigError, match="keep=0"):
        make_masks(model, values_for(model, "random", 0), sparsity)


def test_values_that_are_no_floating_point_numbers_are_refused() -> None:
    model = network(("linear", 4, 3, 1))
    values = {name: own > 0 for name, own in values_for(model, "random", 0).items()}
    with pytest.raises(ConfigError, match=r"0\.weight.*bool"):
        make_masks(model, values, Sparsity(keep=0.5))


def test_a_layer_that_would_empty_is_named() -> None:
    model = network(("linear", 4, 3, 1), ("linear", 3, 3, 1), ("linear", 3, 3, 1))
    values = {name: torch.ones(own.shape) for name, own in maskable(model).items()}
    values["2.weight"].zero_()
    with pytest.raises(BudgetError, match=r"2\.weight") as caught:
        make_masks(model, values, Sparsity(keep=0.7))
    assert "0.weight" not in str(caught.value)
    found = make_masks(model, values, Sparsity(keep=0.7, allow_empty=True))
    assert found.counts()["2.weight"] == (0, 9)


def test_a_small_layer_that_would_empty_is_named_in_layer_scope() -> None:
    model = network(("linear", 10, 10, 1), ("linear", 2, 1, 1))
    values = values_for(model, "random", 0)
    with pytest.raises(BudgetError, match=r"2\.weight"):
        make_masks(model, values, Sparsity(keep=0.3, scope="layer"))
    found = make_masks(model, values, Sparsity(keep=0.3, scope="layer", allow_empty=True))
    assert found.counts() == {"0.weight": (30, 100), "2.weight": (0, 2)}


def test_every_layer_that_m_does_not_divide_is_named() -> None:
    model = network(
        ("linear", 8, 6, 1), ("linear", 6, 4, 1), ("conv", 3, 8, 2), ("transposed", 6, 8, 2)
    )
    values = values_for(model, "random", 0)
    with pytest.raises(ConfigError, match="2:4") as caught:
        make_masks(model, values, Sparsity(pattern="2:4"))
    for name in ("2.weight", "4.weight", "6.weight"):
        assert f"!{name}" in str(caught.value)
    assert "0.weight" not in str(caught.value)
    names = ("*", "!2.weight", "!4.weight", "!6.weight")
    found = make_masks(model, values, Sparsity(pattern="2:4", names=names))
    assert list(found.masks) == ["0.weight"]


def test_a_name_that_fits_nothing_is_refused() -> None:
    model = network(("linear", 4, 3, 1))
    values = values_for(model, "random", 0)
    with pytest.raises(ConfigError, match="nowhere"):
        make_masks(model, values, Sparsity(keep=0.5, names=("nowhere*",)))
    with pytest.raises(ConfigError, match="nowhere"):
        make_masks(model, values, Sparsity(keep=0.5, names=("*", "!nowhere*")))
    with pytest.raises(ConfigError, match="nowhere"):
        make_masks(model, values, Sparsity(keep=0.5, shares={"nowhere*": 0.5}))


def test_values_of_another_model_are_refused() -> None:
    model = network(("linear", 4, 3, 1), ("linear", 3, 3, 1))
    values = values_for(model, "random", 0)
    fewer = {"0.weight": values["0.weight"]}
    with pytest.raises(PlanMismatchError, match=r"2\.weight"):
        make_masks(model, fewer, Sparsity(keep=0.5))
    turned = values | {"0.weight": values["0.weight"].t()}
    with pytest.raises(PlanMismatchError, match=r"0\.weight"):
        make_masks(model, turned, Sparsity(keep=0.5))
    flat = values | {"0.weight": values["0.weight"].reshape(-1)}
    with pytest.raises(PlanMismatchError, match=r"0\.weight"):
        make_masks(model, flat, Sparsity(keep=0.5))
    with pytest.raises(PlanMismatchError, match=r"weight"):
        make_masks(model, {}, Sparsity(keep=0.5))


def test_masks_of_another_model_are_refused() -> None:
    model = network(("linear", 4, 3, 1))
    values = values_for(model, "random", 0)
    for other in (network(("linear", 3, 4, 1)), nn.Linear(4, 3), network(("conv", 4, 3, 1))):
        with pytest.raises(PlanMismatchError, match=r"(?i)another|mask"):
            make_masks(model, values, Sparsity(keep=0.5), start=identity_masks(other))


@pytest.mark.parametrize(
    ("keep", "shares"),
    [(0.2, {"0.*": 0.9}), (0.9, {"0.*": 0.2}), (0.2, {"*": 0.9}), (0.9, {"*": 0.2})],
    ids=["too much", "too little", "all too much", "all too little"],
)
def test_shares_that_leave_the_rest_no_way_to_meet_the_whole_are_refused(
    keep: float, shares: dict[str, float]
) -> None:
    """`keep` is exact: what cannot be met is said, not left aside."""
    model = network(("linear", 4, 4, 1), ("linear", 4, 4, 1))
    values = values_for(model, "random", 0)
    with pytest.raises(BudgetError, match=r"(?i)share|keep"):
        make_masks(model, values, Sparsity(keep=keep, shares=shares))


def test_a_tied_weight_is_ranked_once() -> None:
    model = network(("linear", 4, 4, 1), ("linear", 4, 4, 1), ("linear", 4, 4, 1))
    model[2].weight = model[0].weight
    layers = maskable(model)
    assert list(layers) == ["0.weight", "4.weight"]
    assert layers["0.weight"].names == ("0.weight", "2.weight")
    values = values_for(model, "ties", 0)
    found = make_masks(model, values, Sparsity(keep=0.4))
    assert_kept(found, global_masks(values, 0.4))
    assert found.masks["0.weight"].names == ("0.weight", "2.weight")


def test_plans_made_by_hand_count_as_masks_to_start_from() -> None:
    model = network(("linear", 4, 1, 1))
    start = plan_of(model, {"0.weight": torch.tensor([[False, True, True, False]])})
    values = {"0.weight": torch.tensor([[9.0, 1.0, 2.0, 9.0]])}
    found = make_masks(model, values, Sparsity(keep=0.25), start=start)
    assert found.kept("0.weight").tolist() == [[False, False, True, False]]
