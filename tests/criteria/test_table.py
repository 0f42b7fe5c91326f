"""Every criterion of the table runs on a model in train mode, scores what it should and leaves all as it was."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from apoptosis.criteria import CRITERIA, find_criterion, magnitude, oba, obd, random, taylor
from apoptosis.errors import ConfigError, DataError, ModelError
from oracles.building import CLASSES, built, images
from oracles.untouched import Snapshot

DATA_FREE = {"magnitude", "random"}


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


@pytest.mark.parametrize("name", CRITERIA)
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
def test_modules_run_in_eval_mode(name):
    model, seen = lived_in(), []
    model[5].register_forward_pre_hook(lambda module, _args: seen.append(module.training))
    find_criterion(name).score(model, [images()], None)
    assert not any(seen)
    assert bool(seen) == (name not in DATA_FREE)


@pytest.mark.parametrize("name", CRITERIA)
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


@pytest.mark.parametrize("name", CRITERIA)
def test_a_tied_weight_is_scored_once(name):
    model = built(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    model[2].weight = model[0].weight
    batch = (torch.ones(3, 4, dtype=torch.float64), torch.tensor([0, 1, 3]))
    scores = find_criterion(name).score(model, [batch], None)
    assert set(scores.values) == {"0.weight", "0.bias", "2.bias"}


@pytest.mark.parametrize("name", [name for name in CRITERIA if name not in DATA_FREE])
def test_no_data_is_an_error_that_leaves_the_model_alone(name):
    model = lived_in()
    before = Snapshot(model)
    with pytest.raises(DataError, match="no sample"):
        find_criterion(name).score(model, [], None)
    before.assert_unchanged()


@pytest.mark.parametrize("name", CRITERIA)
def test_nothing_to_score_is_an_error(name):
    model = lived_in().requires_grad_(requires_grad=False)
    before = Snapshot(model)
    with pytest.raises(ModelError, match="requires grad"):
        find_criterion(name).score(model, [images()], None)
    before.assert_unchanged()


def test_names_stand_for_these_options():
    made = {name: entry.score(lived_in(), [images()], None) for name, entry in CRITERIA.items()}
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
        "random": ("random", None),
    }


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
