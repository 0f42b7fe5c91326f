"""Saliencies of single weights, number by number: what the formula of the module says, in plain Python."""

import math

import pytest
import torch
from torch import Tensor, nn

from apoptosis.criteria import SALIENCIES, Saliency, Scores, find_saliency, saliencies
from apoptosis.errors import ConfigError, PlanMismatchError
from apoptosis.masks import Mask, MaskPlan, identity_masks, maskable


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 3, 2), nn.Linear(2, 2)).double()


def scores_of(model: nn.Module, *, zero: str = "") -> dict[str, Tensor]:
    torch.manual_seed(1)
    found = {name: torch.randn_like(own).detach() for name, own in model.named_parameters()}
    return {name: own * (name != zero) for name, own in found.items()}


def by_hand(
    score: list[float], weight: list[float], alive: list[bool], how: Saliency
) -> list[float]:
    sizes = [abs(s) if a else 0.0 for s, a in zip(score, alive, strict=True)]
    scale = {
        "none": 1.0,
        "max": max(sizes),
        "l2": math.sqrt(math.fsum(s * s for s in sizes)),
        "mean": math.fsum(sizes) / max(1, sum(alive)),
    }[how.normalise]
    scale = scale if scale > 0 else 1.0
    return [s / scale + how.magnitude * abs(w) for s, w in zip(sizes, weight, strict=True)]


@pytest.mark.parametrize("normalise", ["none", "max", "l2", "mean"])
@pytest.mark.parametrize("magnitude", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_saliencies_are_the_formula(normalise: str, magnitude: float, masked: bool) -> None:
    model, how = network(), Saliency(normalise, magnitude)
    scores = scores_of(model, zero="2.weight")
    alive = identity_masks(model)
    if masked:
        masks = {
            name: Mask.of(own.names, torch.arange(own.numel).view(own.shape) % 3 != 0)
            for name, own in alive.masks.items()
        }
        gone = torch.zeros(alive.masks["2.weight"].shape, dtype=torch.bool)
        masks["2.weight"] = Mask.of(("2.weight",), gone)
        alive = MaskPlan(masks, alive.fingerprint)
    found = saliencies(Scores(scores, "made up"), model, how, maskable(model), alive)
    assert list(found) == ["0.weight", "1.weight", "2.weight"]
    weights = dict(model.named_parameters())
    for name, own in found.items():
        want = by_hand(
            scores[name].flatten().tolist(),
            weights[name].flatten().tolist(),
            alive.masks[name].kept().flatten().tolist(),
            how,
        )
        want = torch.tensor(want, dtype=torch.float64).view(own.shape)
        torch.testing.assert_close(own, want, rtol=1e-12, atol=1e-15)


def test_scores_and_weights_stay_as_they_are() -> None:
    model = network()
    scores = scores_of(model)
    before = {name: own.clone() for name, own in scores.items()}
    saliencies(
        Scores(scores, "made up"),
        model,
        Saliency("l2", 1.0),
        maskable(model),
        identity_masks(model),
    )
    assert all(torch.equal(before[name], own) for name, own in scores.items())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_weights_have_none() -> None:
    model = nn.Sequential(nn.Linear(0, 4), nn.Linear(4, 2))
    scores = {name: torch.ones_like(own) for name, own in model.named_parameters()}
    for normalise in ("none", "l2", "mean", "max"):
        found = saliencies(Scores(scores, "ones"), model, Saliency(normalise), maskable(model))
        assert found["0.weight"].shape == (4, 0)


@pytest.mark.parametrize("name", SALIENCIES)
def test_a_saliency_is_found_by_name_or_is_itself(name: str) -> None:
    assert find_saliency(name) is SALIENCIES[name]
    own = Saliency("mean", 3.0)
    assert find_saliency(own) is own


@pytest.mark.parametrize("asked", ["papers", "", None, 1, ["plain"]])
def test_an_unknown_saliency_is_refused_with_those_there_are(asked: object) -> None:
    with pytest.raises(ConfigError, match="plain, normalised, paper, balanced"):
        find_saliency(asked)  # pyright: ignore


@pytest.mark.parametrize("magnitude", [-1e-9, math.inf, math.nan, True, "1", None])
def test_an_amount_of_magnitude_nobody_can_mean_is_refused(magnitude: object) -> None:
    with pytest.raises(ConfigError, match="magnitude"):
        Saliency("none", magnitude)  # pyright: ignore


def test_scores_that_are_not_there_or_of_another_shape_are_refused() -> None:
    model = network()
    scores = scores_of(model)
    less = {name: own for name, own in scores.items() if name != "1.weight"}
    with pytest.raises(PlanMismatchError, match=r"'1\.weight'.*has none"):
        saliencies(Scores(less, "made up"), model, Saliency(), maskable(model))
    other = scores | {"2.weight": torch.zeros(2, 3)}
    with pytest.raises(PlanMismatchError, match=r"'2\.weight'.*has shape \(2, 3\)"):
        saliencies(Scores(other, "made up"), model, Saliency(), maskable(model))
