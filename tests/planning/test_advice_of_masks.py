"""What a refusal of masks advises works, and a little less would not: the shares that its words name are tried."""

import re
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from apoptosis.errors import BudgetError
from apoptosis.planning import Sparsity, make_masks

WIDTHS = [(3, 7, 2), (5, 40, 3), (2, 12, 9), (30, 33, 4), (6, 24, 16)]


def network(widths: tuple[int, ...]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))


def increasing(model: nn.Module) -> dict[str, Tensor]:
    """Values that empty the first layer first."""
    found, first = dict[str, Tensor](), 0.0
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            found[name] = torch.arange(weight.numel()).view_as(weight) + 1 + first
            first += weight.numel()
    return found


def refusal(model: nn.Module, sparsity: Sparsity) -> str:
    with pytest.raises(BudgetError) as refused:
        make_masks(model, increasing(model), sparsity)
    return str(refused.value)


def number(text: str, pattern: str) -> float:
    found = re.search(pattern + r"(\d[\d.e-]*\d|\d)", text)
    assert found, text
    return float(found[1])


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("keep", [0.0004, 0.02, 0.1])
def test_the_advice_against_an_empty_layer_keeps_it(widths: tuple[int, ...], keep: float) -> None:
    model = network(widths)
    told = refusal(model, Sparsity(keep=keep))
    first = model[0].weight.numel()
    smallest = min(p.numel() for p in model.parameters() if p.ndim > 1)

    enough = number(told, r"shares=\{'0\.weight': ")
    assert enough >= keep
    assert enough * first >= 1
    assert enough <= keep + 1e-4 or (enough - 1e-4) * first < 1
    one_layer = network(widths[:2])
    assert (
        make_masks(one_layer, increasing(one_layer), Sparsity(keep=enough, scope="layer"))
        .masks["0.weight"]
        .num_kept
        >= 1
    )

    evenly = told.split("scope='layer'")[1].split(")")[0]
    if keep * smallest >= 1:
        assert evenly == ""
        share = keep
    else:
        share = number(evenly, "keep=")
        assert (share - 1e-4) * smallest < 1
    kept = make_masks(model, increasing(model), Sparsity(keep=share, scope="layer"))
    assert all(mask.num_kept for mask in kept.masks.values() if mask.numel)


def test_a_layer_that_had_lost_all_before_is_not_named() -> None:
    model = network((4, 5, 3))
    values = increasing(model)
    emptied = make_masks(model, values, Sparsity(keep=15 / 35, allow_empty=True))
    assert not emptied.masks["0.weight"].num_kept
    again = make_masks(model, values, Sparsity(keep=10 / 35), start=emptied)
    assert again.masks["2.weight" if "2.weight" in again.masks else "1.weight"].num_kept == 10


@pytest.mark.parametrize("num", [7, 8])
def test_six_empty_layers_are_named_and_the_others_counted(num: int) -> None:
    model = network((3,) * (num + 1) + (50,))
    told = refusal(model, Sparsity(keep=0.5))
    assert told.count("(9 weights)") == 6
    assert f"and {num - 6} more" in told
    assert "more" not in refusal(network((3,) * 7 + (50,)), Sparsity(keep=0.5)).split(",")[-1][:60]


@pytest.mark.parametrize("fixed", [0.05, 0.37, 0.9])
@pytest.mark.parametrize("keep", [0.001, 0.03, 0.33, 0.87, 0.9999])
def test_the_nearest_share_that_can_be_met_is_advised(keep: float, fixed: float) -> None:
    model = network((13, 29, 31, 7))
    sizes = {n: p.numel() for n, p in model.named_parameters() if p.ndim > 1}
    every = sum(sizes.values())
    shares = {"0.weight": fixed, "1.weight": fixed}
    alone = sum(int(Fraction(str(fixed)) * sizes[name]) for name in shares)
    can = range(alone, alone + sizes["2.weight"] + 1)
    asked = Sparsity(keep=keep, shares=shares, allow_empty=True)
    if int(Fraction(str(keep)) * every) in can:
        make_masks(model, increasing(model), asked)
        return
    told = refusal(model, asked)
    advised = number(told, "ask for keep=")
    kept = make_masks(
        model, increasing(model), Sparsity(keep=advised, shares=shares, allow_empty=True)
    )
    num = sum(kept.masks[name].num_kept for name in sizes)
    nearest = can[0] if keep * every < can[0] else can[-1]
    assert abs(num - nearest) <= every * 1e-4
    assert f"{can[0]:,} to {can[-1]:,} can stay" in told
    in_four_digits = {round(advised - 1e-4, 4), round(advised, 4), round(advised + 1e-4, 4)}
    if any(int(Fraction(str(share)) * every) in can for share in in_four_digits):
        assert round(advised, 4) == advised, "it is written in few digits where these lead there"
