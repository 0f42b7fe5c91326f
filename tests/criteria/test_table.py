"""Every criterion of the table runs on a model in train mode, scores what it should and leaves all as it was.

Most score parameters, some score units; all of them can be asked for units.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from apoptosis.criteria import (
    CRITERIA,
    Aggregation,
    Criterion,
    find_criterion,
    magnitude,
    oba,
    obd,
    random,
    taylor,
    taylor_units,
    unit_scores,
)
from apoptosis.errors import ConfigError, DataError, ModelError
from apoptosis.structure import trace
from oracles.building import CLASSES, built, images
from oracles.untouched import Snapshot

DATA_FREE = {"magnitude", "magnitude-l2", "random"}
OF_UNITS = {"taylor-gate", "taylor-activation", "gates", "obs"}
OF_PARAMETERS = [name for name in CRITERIA if name not in OF_UNITS]
READING = [name for name in CRITERIA if name not in DATA_FREE]


def mixed():
    """Norms, dropout, a frozen layer and a norm that somebody froze in eval mode."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(48, CLASSES),
    )
    model[3].requires_grad_(requires_grad=False)
    return model


def lived_in():
    model = built(mixed, train=True)
    model[4].eval()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    model[0].register_forward_hook(lambda _m, _i, out: out)
    return model


def traced(model):
    return trace(model, images(1)[0])


def test_each_scores_parameters_or_units_and_never_both():
    for name, entry in CRITERIA.items():
        assert (entry.score is None) == (name in OF_UNITS)
        assert (entry.score_units is None) == (name not in OF_UNITS)


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_a_model_in_train_mode_is_scored_in_eval_mode_and_left_as_it_was(name):
    model = lived_in()
    before = Snapshot(model)
    scores = find_criterion(name).score(model, [images(4), images(2, seed=8)], None)
    before.assert_unchanged()
    evaluated = copy.deepcopy(model).eval()
    again = find_criterion(name).score(evaluated, [images(4), images(2, seed=8)], None)
    for parameter, value in scores.values.items():
        assert_close(value, again.values[parameter], rtol=0, atol=0)
    assert scores.count == (0 if name in DATA_FREE else 6)


@pytest.mark.parametrize("name", CRITERIA)
def test_units_of_a_model_in_train_mode_are_those_in_eval_mode(name):
    model = lived_in()
    structure, before = traced(model), Snapshot(model)
    units = find_criterion(name).units(model, structure, [images(4), images(2, seed=8)])
    before.assert_unchanged()
    evaluated = copy.deepcopy(model).eval()
    again = find_criterion(name).units(evaluated, structure, [images(4), images(2, seed=8)])
    assert list(units.values) == [group.name for group in structure.groups] == ["0", "3"]
    for group in structure.groups:
        value = units.values[group.name]
        assert_close(value, again.values[group.name], rtol=0, atol=0)
        assert (tuple(value.shape), value.dtype) == ((group.size,), torch.float64)
        assert value.isfinite().all()
        assert value.max() > value.min()
        assert not value.requires_grad
    assert (units.criterion, units.missing) == (name, ())
    assert units.count == (0 if name in DATA_FREE else 6)
    if name in DATA_FREE:
        assert units.loss is None
    else:
        (x, y), (u, v) = images(4), images(2, seed=8)
        joint = nn.functional.cross_entropy(evaluated(torch.cat([x, u])), torch.cat([y, v]))
        assert units.loss == pytest.approx(joint.item(), rel=1e-12)


@pytest.mark.parametrize("name", CRITERIA)
def test_modules_run_in_eval_mode(name):
    model, seen = lived_in(), []
    structure = traced(model)
    model[5].register_forward_pre_hook(lambda module, _args: seen.append(module.training))
    find_criterion(name).units(model, structure, [images()])
    assert not any(seen)
    assert bool(seen) == (name not in DATA_FREE)


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_there_is_one_finite_score_per_trainable_entry_and_none_of_the_rest(name):
    model = lived_in()
    scores = find_criterion(name).score(model, [images()], None)
    wanted = {key: p for key, p in model.named_parameters() if p.requires_grad}
    assert list(scores.values) == list(wanted)
    assert "3.weight" not in scores.values
    for key, value in scores.values.items():
        assert value.shape == wanted[key].shape
        assert value.dtype == torch.float64
        assert value.isfinite().all()
        assert not value.requires_grad
        assert value.untyped_storage().data_ptr() != wanted[key].untyped_storage().data_ptr()


def tied():
    model = built(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    model[2].weight = model[0].weight
    return model, (torch.ones(3, 4, dtype=torch.float64), torch.tensor([0, 1, 3]))


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_a_tied_weight_is_scored_once(name):
    model, batch = tied()
    scores = find_criterion(name).score(model, [batch], None)
    assert set(scores.values) == {"0.weight", "0.bias", "2.bias"}


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_units_are_parameter_scores_gathered_in_the_criterions_own_way(name):
    model, entry = lived_in(), find_criterion(name)
    structure = traced(model)
    scores = entry.score(model, [images()], None)
    for asked, how in (
        (None, entry.aggregation),
        ("paper", "paper"),
        (Aggregation(absolute="slice"), "layers"),
    ):
        found = entry.units(model, structure, [images()], None, asked)
        want = unit_scores(scores, structure, how)
        assert found.values.keys() == want.values.keys()
        for group, value in want.values.items():
            assert_close(found.values[group], value, rtol=0, atol=0)
        assert found.options == want.options
    other = replace(entry, aggregation=Aggregation(absolute="none"))
    found = other.units(model, structure, [images()]).values
    for group, value in unit_scores(scores, structure, "signed").values.items():
        assert_close(found[group], value, rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(OF_UNITS))
def test_of_an_aggregation_unit_criteria_take_the_normaliser_alone(name):
    model, entry = lived_in(), find_criterion(name)
    structure = traced(model)
    plain = entry.units(model, structure, [images()]).values
    for asked, scale in (
        ("default", lambda _: 1.0),
        ("paper", torch.max),
        (Aggregation(absolute="entry", normalise="l2"), torch.norm),
    ):
        found = entry.units(model, structure, [images()], None, asked).values
        for group, value in plain.items():
            assert_close(found[group], value / scale(value), rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", [name for name in READING if name not in OF_UNITS])
def test_no_data_is_an_error_that_leaves_the_model_alone(name):
    model = lived_in()
    before = Snapshot(model)
    with pytest.raises(DataError, match="no sample"):
        find_criterion(name).score(model, [], None)
    before.assert_unchanged()


@pytest.mark.parametrize("name", READING)
def test_units_without_data_are_an_error_that_leaves_the_model_alone(name):
    model = lived_in()
    structure, before = traced(model), Snapshot(model)
    with pytest.raises(DataError, match="no sample"):
        find_criterion(name).units(model, structure, [])
    before.assert_unchanged()


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_nothing_to_score_is_an_error(name):
    model = lived_in().requires_grad_(requires_grad=False)
    before = Snapshot(model)
    with pytest.raises(ModelError, match="requires grad"):
        find_criterion(name).score(model, [images()], None)
    before.assert_unchanged()


@pytest.mark.parametrize("name", sorted(OF_UNITS))
def test_gates_need_no_trainable_parameter(name):
    model = lived_in()
    structure = traced(model)
    want = find_criterion(name).units(model, structure, [images()]).values
    frozen = model.requires_grad_(requires_grad=False)
    before = Snapshot(frozen)
    found = find_criterion(name).units(frozen, structure, [images()]).values
    before.assert_unchanged()
    for group, value in want.items():
        assert_close(found[group], value, rtol=1e-12, atol=1e-16)


def test_names_stand_for_these_options():
    made = {
        name: entry.score(lived_in(), [images()], None)
        for name, entry in CRITERIA.items()
        if entry.score is not None
    }
    by_name = {
        name: (scores.criterion, scores.options.get("kind") or scores.options.get("diagonal"))
        for name, scores in made.items()
    }
    assert by_name == {
        "oba": ("oba", "connectivity"),
        "oba-functional": ("oba", "functional"),
        "oba-hessian": ("oba", "hessian"),
        "oba-ggn": ("oba", "ggn"),
        "taylor": ("taylor", None),
        "obd-hessian": ("obd", "hessian"),
        "obd-ggn": ("obd", "ggn"),
        "obd-fisher": ("obd", "fisher"),
        "magnitude": ("magnitude", None),
        "magnitude-l2": ("magnitude", None),
        "random": ("random", None),
    }
    model = lived_in()
    forms = {
        name: CRITERIA[name].score_units(model, traced(model), [images()], None)
        for name in OF_UNITS
    }
    assert (forms["gates"].criterion, forms["gates"].options["weight"]) == ("gates", 0.0)
    assert (forms["obs"].criterion, forms["obs"].options["ridge"]) == ("obs", 1e-4)
    for name in OF_UNITS - {"gates", "obs"}:
        found = forms[name].criterion, forms[name].options["form"]
        assert found == (name, name.removeprefix("taylor-"))


def test_entries_are_named_after_themselves_and_say_what_they_are():
    for name, entry in CRITERIA.items():
        assert entry.name == name
        assert entry.summary
    assert len({entry.summary for entry in CRITERIA.values()}) == len(CRITERIA)
    with pytest.raises(TypeError):
        CRITERIA["mine"] = CRITERIA["oba"]  # pyright: ignore


def test_an_unknown_name_is_answered_with_all_known_ones():
    with pytest.raises(ConfigError, match=r"'hessian-free' was asked for; there are oba, .*random"):
        find_criterion("hessian-free")


def test_functions_and_table_are_the_same():
    for name, function in (
        ("oba", oba),
        ("taylor", taylor),
        ("magnitude", magnitude),
        ("random", random),
    ):
        assert CRITERIA[name].score is function
    assert CRITERIA["obd-ggn"].score.func is obd
    assert CRITERIA["taylor-gate"].score_units.func is taylor_units


def test_a_criterion_of_ones_own_gives_units_under_its_name():
    mine = Criterion("mine", "the size of weights", magnitude)
    model = lived_in()
    units = mine.units(model, traced(model), [])
    assert (units.criterion, units.count) == ("mine", 0)
    want = unit_scores(magnitude(model), traced(model), mine.aggregation)
    for group, value in want.values.items():
        assert_close(units.values[group], value, rtol=0, atol=0)


def test_a_criterion_takes_one_of_two_functions():
    with pytest.raises(ConfigError, match="neither of `score` and `score_units`"):
        Criterion("mine", "")
    with pytest.raises(ConfigError, match="both of `score` and `score_units`"):
        Criterion("mine", "", CRITERIA["magnitude"].score, CRITERIA["taylor-gate"].score_units)


@pytest.mark.parametrize("asked", [["oba"], {"oba": 1}, None])
def test_what_is_no_name_is_answered_like_an_unknown_one(asked):
    with pytest.raises(ConfigError, match="was asked for; there are"):
        find_criterion(asked)
