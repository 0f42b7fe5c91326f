"""Each option of a training has the default that the documentation tells, and bounds that are tried from both sides."""

import math
from dataclasses import asdict
from typing import Any

import pytest

from apoptosis.errors import ConfigError
from apoptosis.training import FitOptions


def test_defaults_are_those_that_recipes_and_saved_runs_mean() -> None:
    assert asdict(FitOptions()) == {
        "epochs": 10,
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "schedule": "one-cycle",
        "milestones": (0.5, 0.75),
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "label_smoothing": 0.0,
        "distil": 0.0,
        "temperature": 2.0,
        "precision": "float32",
        "channels_last": False,
        "keep": "best",
        "seed": 0,
    }


TINY = 1e-9
ALLOWED: dict[str, list[Any]] = {
    "epochs": [0, 1, 10_000],
    "learning_rate": [TINY, 1.0, 50.0],
    "momentum": [0.0, 1 - TINY],
    "weight_decay": [0.0, 5.0],
    "label_smoothing": [0.0, 1 - TINY],
    "distil": [0.0, 0.5, 1.0],
    "temperature": [TINY, 1.0, math.inf],
    "milestones": [(), (TINY,), (0.25, 1 - TINY)],
}
REFUSED: dict[str, list[Any]] = {
    "epochs": [-1],
    "learning_rate": [0.0, -TINY],
    "momentum": [-TINY, 1.0],
    "weight_decay": [-TINY],
    "label_smoothing": [-TINY, 1.0],
    "distil": [-TINY, 1 + TINY],
    "temperature": [0.0, -TINY],
    "milestones": [(0.0,), (1.0,), (0.5, -TINY), (1 + TINY, 0.5)],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in ALLOWED for v in ALLOWED[n]])
def test_what_lies_within_bounds_is_taken(name: str, value: Any) -> None:
    assert getattr(FitOptions(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in REFUSED for v in REFUSED[n]])
def test_what_lies_outside_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        FitOptions(**{name: value})
