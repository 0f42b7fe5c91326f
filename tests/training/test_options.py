"""Options of another kind are refused by name when they are made, not where they are first compared."""

import math
from dataclasses import fields

import pytest
import torch

from apoptosis.checkpoint import load, load_masks, read_run
from apoptosis.errors import CheckpointError, ConfigError
from apoptosis.training import FitOptions

WRONG = {
    "None": None,
    "a text": "x",
    "bytes": b"x",
    "a list": [object()],
    "a dict": {},
    "an object": object(),
    "a tensor": torch.zeros(2),
    "a function": print,
    "a class": int,
    "NaN": math.nan,
}


@pytest.mark.parametrize("value", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("name", [own.name for own in fields(FitOptions)])
def test_every_option_is_of_its_kind(name, value):
    with pytest.raises(ConfigError, match=f"FitOptions: {name}"):
        FitOptions(**{name: value})


@pytest.mark.parametrize("name", ["epochs", "learning_rate", "seed"])
def test_truth_values_are_no_numbers(name):
    with pytest.raises(ConfigError, match=f"{name}=True is no"):
        FitOptions(**{name: True})


def test_whole_numbers_are_numbers():
    assert FitOptions(learning_rate=1, momentum=0, milestones=[0.5]).curve(1.0) is not None
    with pytest.raises(ConfigError, match="64 bits"):
        FitOptions(seed=2**64)


@pytest.mark.parametrize("path", [None, 3, b"x", [], object(), "\0"])
@pytest.mark.parametrize(
    "read", [read_run, load_masks, lambda path: load(path, torch.nn.Linear(1, 1))]
)
def test_a_place_is_a_path(path, read):
    with pytest.raises(CheckpointError, match="Give (a|the whole) path|no such"):
        read(path)
