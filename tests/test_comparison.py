"""The record of a comparison: means and deviations, who comes first, and a round trip through JSON."""

import json
import statistics
from dataclasses import replace

import pytest

from apoptosis.comparison import Comparison, Dense, Judged, Spread, Trial


def trial(name: str, seed: int = 0, asked: float = 0.5, **figures) -> Trial:
    def judged(what: str) -> Judged | None:
        value = figures.get(what)
        return None if value is None else Judged(1 - value, value, 100)

    return Trial(
        contestant=name,
        seed=seed,
        asked=asked,
        got=asked - 0.01,
        test=judged("test") or Judged(None, 0.1, 100),
        validation=judged("validation"),
        tuned_test=judged("tuned_test"),
        tuned_validation=judged("tuned_validation"),
        scored=64,
        prune_s=1.5,
        tune_s=2.5,
        widths={"a": 4},
        layer_macs={"a": 10, "b": 20},
    )


def comparison(*trials: Trial) -> Comparison:
    names = dict.fromkeys(own.contestant for own in trials)
    dense = Dense(0, Judged(0.1, 0.95, 100), None, {"a": 8}, {"a": 40, "b": 40})
    about = {name: {"criterion": name, "widths": "global"} for name in names}
    return Comparison((dense,), trials, about, facts={"device": "cpu"})


def test_spreads_are_those_of_a_sample():
    values = [0.91, 0.87, 0.9]
    own = Spread.of(values)
    assert (own.mean, own.deviation, own.count) == (
        statistics.mean(values),
        statistics.stdev(values),
        3,
    )


def test_one_value_has_no_deviation_and_a_missing_one_no_mean():
    assert Spread.of([0.5]) == Spread(0.5, None, 1)
    assert Spread.of([0.5, None]).mean is None
    assert Spread.of([]).mean is None


def test_validation_data_choose_and_test_data_do_not():
    lucky = trial("lucky", test=0.2, tuned_test=0.99, tuned_validation=0.7)
    good = trial("good", test=0.3, tuned_test=0.8, tuned_validation=0.9)
    assert comparison(lucky, good).best_first() == ["good", "lucky"]
    assert comparison(lucky, good).chosen_on == "validation"


def test_without_validation_data_nobody_is_chosen():
    low, high = trial("low", test=0.2), trial("high", test=0.9)
    assert comparison(low, high).best_first() == ["low", "high"]
    assert comparison(low, high).chosen_on is None


def test_without_fine_tuning_the_pruned_networks_are_judged():
    low, high = trial("low", test=0.9, validation=0.1), trial("high", test=0.2, validation=0.5)
    assert comparison(low, high).best_first() == ["high", "low"]
    assert not comparison(low, high).is_tuned


def test_the_mean_runs_over_budgets_and_seeds():
    trials = [
        trial("a", seed=0, asked=0.5, validation=0.9),
        trial("a", seed=0, asked=0.25, validation=0.3),
        trial("b", seed=0, asked=0.5, validation=0.7),
        trial("b", seed=0, asked=0.25, validation=0.6),
    ]
    assert comparison(*trials).best_first() == ["b", "a"]
    assert comparison(*trials).budgets == [0.5, 0.25]


@pytest.mark.parametrize("tuned", [None, 0.8])
def test_a_comparison_comes_back_from_json(tuned):
    own = comparison(trial("a", test=0.5, tuned_test=tuned), trial("b", validation=0.2))
    text = json.dumps(own.as_data(), allow_nan=False)
    assert Comparison.from_data(json.loads(text)) == own


def test_tasks_without_accuracy_are_shown_by_their_loss():
    own = comparison(trial("a", test=0.5))
    assert own.measure == "accuracy"
    data = own.as_data()
    data["dense"][0]["test"]["accuracy"] = None
    assert Comparison.from_data(data).measure == "loss"


def test_the_notable_are_the_first_the_best_and_the_baselines():
    trials = [
        trial(name, validation=v) for name, v in (("a", 0.1), ("b", 0.2), ("c", 0.9), ("d", 0.3))
    ]
    own = replace(comparison(*trials), baselines=("d",))
    assert own.notable() == ["a", "c", "d"]
    blind = replace(comparison(*(replace(t, validation=None) for t in trials)), baselines=("d",))
    assert blind.notable() == ["a", "d"]
