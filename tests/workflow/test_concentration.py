"""Plans that take most from few groups say so; those that spread what goes do not."""

import pytest
import torch
from torch import nn

import apoptosis as ap
from apoptosis.criteria import CRITERIA, Criterion, magnitude
from apoptosis.criteria.scores import Scores
from apoptosis.planning import Budget, Selection
from apoptosis.structure import trace
from apoptosis.workflow.concentration import concentration_of

X = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
BATCHES = [(X, torch.arange(12) % 3)]


def chain(num: int = 6, width: int = 20) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
    for _ in range(num - 1):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3)).eval()


@pytest.fixture(scope="module")
def structure():
    return trace(chain(), X[:1])


def found(structure, kept: dict[int, int]):
    plan = structure.plan({str(2 * number): range(left) for number, left in kept.items()})
    return concentration_of(structure, plan, Selection())


def test_one_group_that_is_hollowed_out_is_told_with_what_it_gives(structure):
    told = found(structure, {2: 1, 4: 19})
    assert told is not None
    assert told.groups == {"4": (1, 20)}
    macs = structure.macs()
    alone = [macs - structure.macs({"4": 1}), macs - structure.macs({"8": 19})]
    assert told.share == pytest.approx(alone[0] / sum(alone))
    assert told.as_data() == {"groups": {"4": [1, 20]}, "share": told.share}


@pytest.mark.parametrize(
    "kept",
    [
        dict.fromkeys(range(6), 10),
        dict.fromkeys(range(6), 1),
        {2: 6, 3: 19},
        {0: 4},
        {0: 2, 1: 4, 2: 4, 3: 4, 4: 4, 5: 4},
        {2: 10, 3: 10},
    ],
    ids=["alike", "all hollow", "not yet hollow", "little", "one of many", "halves"],
)
def test_what_is_spread_or_leaves_enough_is_not(structure, kept):
    assert found(structure, kept) is None


def test_groups_that_may_not_shrink_do_not_count_as_left_whole(structure):
    plan = structure.plan({"4": [0]})
    assert concentration_of(structure, plan, Selection(names=("4", "6"))) is None
    assert concentration_of(structure, plan, Selection(names=("4", "6", "8"))) is not None


def lopsided(model, batches, task):
    """Scores of another size in every layer, as derivatives often are."""
    scores = magnitude(model)
    values = {
        name: own * 10.0 ** (int(name.split(".")[0]) / 2) for name, own in scores.values.items()
    }
    return Scores(values, "lopsided")


def test_prune_says_it_in_settings_and_text():
    how = {"criterion": Criterion("lopsided", "of mine", lopsided), "steps": 3}
    outcome = ap.prune(chain(9), BATCHES, Budget(flops=0.75), **how)
    few = outcome.settings["few_groups"]
    assert 0 < few["share"] <= 1
    for name, (kept, size) in few["groups"].items():
        assert outcome.plan.counts()[name] == (kept, size)
    assert "few groups" in str(outcome)
    limited = ap.prune(chain(9), BATCHES, Budget(flops=0.75), **how, selection=Selection(cap=0.5))
    assert "few_groups" not in limited.settings
    assert "few groups" not in str(limited)


@pytest.mark.parametrize("name", ["magnitude", "oba", "taylor", "obs"])
def test_criteria_that_spread_what_goes_are_not_warned_of(name):
    outcome = ap.prune(
        chain(), BATCHES, Budget(flops=0.5), criterion=CRITERIA[name], steps=2, repair=[]
    )
    assert "few_groups" not in outcome.settings
