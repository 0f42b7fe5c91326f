import json
import math

import numpy as np
import pytest
from PIL import Image

from apoptosis.report import Agreement, RankingReport, plot_ranking


def report(**means: float) -> RankingReport:
    agreements = [
        Agreement(name, {"a": mean - 0.1, "b": mean + 0.1}, 0.5) for name, mean in means.items()
    ]
    return RankingReport(tuple(agreements), {"a": 4, "b": 8}, {"seed": 3})


def test_the_mean_is_over_groups():
    assert Agreement("x", {"a": 0.2, "b": -0.6}, 0).mean == pytest.approx(-0.2)


def test_the_best_comes_first_and_the_undefined_last():
    names = [row.criterion for row in report(low=-0.5, none=math.nan, high=0.5).best_first()]
    assert names == ["high", "low", "none"]


def test_json_holds_the_facts_and_every_figure():
    value = json.loads(json.dumps(report(x=0.3, none=math.nan).as_json(), allow_nan=False))
    assert value["seed"] == 3
    assert value["channels"] == {"a": 4, "b": 8}
    assert value["criteria"][0] == {
        "criterion": "x",
        "spearman": {"a": 0.2, "b": 0.4},
        "mean": 0.3,
        "seconds": 0.5,
    }
    assert value["criteria"][1]["mean"] is None


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_the_plot_is_a_picture_that_changes_with_the_figures(tmp_path):
    one = pixels(plot_ranking(report(x=0.3, y=-0.9), tmp_path / "one.png"))
    same = pixels(plot_ranking(report(x=0.3, y=-0.9), tmp_path / "same.png"))
    other = pixels(plot_ranking(report(x=0.4, y=-0.9), tmp_path / "other.png"))
    assert min(one.shape[:2]) > 200
    assert np.array_equal(one, same)
    assert one.shape == other.shape
    assert not np.array_equal(one, other)


def test_an_undefined_figure_can_be_drawn(tmp_path):
    assert plot_ranking(report(x=0.3, none=math.nan), tmp_path / "x.png").stat().st_size > 0
