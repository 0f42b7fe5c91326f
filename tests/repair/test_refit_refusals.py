"""What `Refit` refuses, and in which words; what looks bad and is not."""

import pytest
import torch

from apoptosis.errors import (
    ConfigError,
    DataError,
    ModelError,
    NonFiniteError,
    PlanMismatchError,
)
from apoptosis.repair import Refit
from apoptosis.structure import cut, trace
from oracles.refitted import error, halved, normal, unlabelled
from oracles.shrinking import hard_coded, small_case

pytestmark = pytest.mark.usefixtures("way")
"""Every claim holds on both ways through the networks."""


@pytest.mark.parametrize("batches", [[], ()])
def test_no_batches_are_refused(batches):
    model, x = small_case("mlp").model(), normal(4, 4)
    plan, small = halved(model, x)
    with pytest.raises(DataError, match="there are no batches"):
        Refit()(model, small, plan, batches)


def test_batches_that_can_be_read_once_are_refused():
    model, x = small_case("mlp").model(), normal(4, 4)
    plan, small = halved(model, x)
    with pytest.raises(DataError, match=r"only once.*iterated again"):
        Refit()(model, small, plan, iter(unlabelled(x)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_are_refused_by_the_name_of_the_layer(bad):
    model, x = small_case("mlp").model(), normal(8, 4)
    plan, small = halved(model, x)
    x[5, 0] = bad
    with pytest.raises(NonFiniteError, match=r"Layer '0' was to be fitted, and NaN or infinity"):
        Refit()(model, small, plan, unlabelled(x, 4, 4))


def test_dead_inputs_are_no_obstacle():
    model, x = small_case("mlp").model(), normal(40, 4)
    with torch.no_grad():
        model[0].bias[:3] = -1e3
    plan, small = halved(model, x, "0")
    found = Refit()(model, small, plan, unlabelled(x))
    assert torch.equal(found[2].weight[:, :3], small[2].weight[:, :3])
    assert error(found, model, x) < error(small, model, x)


def test_programs_are_refused_with_what_to_do():
    model, x = hard_coded(), normal(4, 4)
    plan = trace(model, x).plan({"a": [0, 1]})
    with pytest.raises(ModelError, match=r"delivered as a program.*'distil'.*delivery_because"):
        Refit()(model, cut(model, plan), plan, unlabelled(x))


def test_networks_of_another_plan_are_refused():
    model, x = small_case("mlp").model(), normal(4, 4)
    plan, small = halved(model, x)
    other, _ = halved(model, x, "0")
    with pytest.raises(PlanMismatchError, match=r"'2.weight' has shape \(6, 8\).*the plan makes"):
        Refit()(model, small, other, unlabelled(x))
    with pytest.raises(PlanMismatchError, match="has shape"):
        Refit()(small, small, plan, unlabelled(x))


def test_networks_without_any_layer_to_fit_are_refused():
    model, x = small_case("experts").model(), small_case("experts").inputs(4)
    plan, small = halved(model, x)
    with pytest.raises(
        ModelError, match=r"none that should be can be. 'parts.0': Experts holds weights"
    ):
        Refit(scope="consumers")(model, small, plan, unlabelled(x))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scope": "all"}, r"scope='all' was asked for; there are every, consumers"),
        ({"rounds": -1}, "rounds=-1"),
        ({"ridge": -1.0}, r"ridge=-1.0 was asked for; it is a number from 0 on"),
        ({"ridge": float("nan")}, r"ridge=nan was asked for"),
    ],
)
def test_options_nobody_can_mean_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        Refit(**options)
