"""Tables say what was measured and on what; pictures change with the figures and can be drawn from any comparison."""

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from apoptosis.comparison import Comparison, Dense, Judged, Trial
from apoptosis.report import (
    conditions,
    csv_text,
    markdown_text,
    plot_accuracy_against_cost,
    plot_layer_costs,
    write_comparison,
)
from apoptosis.report.accuracy import spread_apart

NAMES = ("oba", "taylor", "magnitude-l2-uniform", "random")


def judged(accuracy: float | None, count: int = 300) -> Judged:
    return Judged(None if accuracy is None else 1 - accuracy, accuracy, count)


def comparison(num_seeds: int = 1, *, tuned: bool = True, shift: float = 0.0) -> Comparison:
    """Accuracies that can be worked out: 0.9 less 0.1 per place in NAMES, half at the smaller budget."""
    trials = []
    for seed in range(num_seeds):
        for place, name in enumerate(NAMES):
            for share in (0.5, 0.25):
                value = (0.9 - 0.1 * place + shift) * (1 if share == 0.5 else 0.5) + 0.01 * seed
                trials.append(
                    Trial(
                        contestant=name,
                        seed=seed,
                        asked=share,
                        got=share - 0.02,
                        test=judged(value - 0.2),
                        validation=judged(value - 0.2, 200),
                        tuned_test=judged(value) if tuned else None,
                        tuned_validation=judged(value, 200) if tuned else None,
                        scored=64,
                        prune_s=1.0 + place,
                        tune_s=0.5,
                        widths={"a": 4},
                        layer_macs={"a": int(600 * share), "block.b": int(400 * share)},
                    )
                )
    dense = tuple(
        Dense(seed, judged(0.95), judged(0.96, 200), {"a": 8}, {"a": 600, "block.b": 400})
        for seed in range(num_seeds)
    )
    about = {name: {"criterion": name, "widths": "global"} for name in NAMES}
    facts = {
        "device": "cpu",
        "n": {"scoring": 64, "test": 300, "validation": 200},
        "options": {"steps": 5, "repair": ["batch_norm"], "fit": {"epochs": 3}},
        "versions": {"torch": "2"},
    }
    return Comparison(dense, tuple(trials), about, ("magnitude-l2-uniform", "random"), facts)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_a_row_for_each_with_figures_of_test_data():
    lines = markdown_text(comparison()).splitlines()
    assert cells(lines[0]) == [
        "criterion", "50%: pruned", "tuned", "25%: pruned", "tuned", "pruning", "tuning",
    ]  # fmt: skip
    assert cells(lines[2]) == ["oba", "70.0", "90.0", "25.0", "45.0", "2.0 s", "1.0 s"]
    assert [cells(line)[0] for line in lines[2:6]] == list(NAMES)


def test_without_fine_tuning_there_are_no_columns_for_it():
    lines = markdown_text(comparison(tuned=False)).splitlines()
    assert cells(lines[0]) == ["criterion", "50%", "25%", "pruning"]
    assert cells(lines[2]) == ["oba", "70.0", "25.0", "2.0 s"]


def test_several_seeds_are_shown_with_their_deviation():
    line = markdown_text(comparison(3)).splitlines()[2]
    assert cells(line)[2] == "91.0 ± 1.0"
    assert "mean ± s.d. of 3 seeds" in markdown_text(comparison(3))


def test_conditions_say_what_was_judged_and_chosen_on_what():
    figures, order, same = conditions(comparison())
    assert figures.startswith("Accuracy in % on test data (n = 300)")
    assert "the dense network has 95.0" in figures
    assert "by validation data (n = 200)" in order
    assert (
        same
        == "The same for all: 5 steps on 64 samples, repaired by batch_norm, 3 epochs of fine-tuning."
    )


def test_one_is_singular():
    own = comparison()
    options = own.facts["options"]
    options = {**options, "steps": 1, "fit": {**options["fit"], "epochs": 1}}
    said = conditions(replace(own, facts={**own.facts, "options": options}))[2]
    assert "1 step on 64 samples" in said
    assert "1 epoch of fine-tuning" in said


def test_the_title_of_one_epoch_is_singular(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_title", lambda _, text, **__: titles.append(text))
    own = comparison()
    options = {**own.facts["options"], "fit": {"epochs": 1}}
    own = replace(own, facts={**own.facts, "options": options})
    plot_accuracy_against_cost(own, tmp_path / "a.png")
    assert titles[1] == "After 1 epoch of fine-tuning"


def test_conditions_say_where_nothing_was_chosen():
    own = comparison()
    blind = [replace(t, validation=None, tuned_validation=None) for t in own.trials]
    assert "nobody is called best" in conditions(replace(own, trials=tuple(blind)))[1]


def test_csv_has_a_line_per_trial_and_empty_cells_for_the_unknown():
    rows = list(csv.DictReader(io.StringIO(csv_text(comparison(2, tuned=False)))))
    assert len(rows) == 2 * len(NAMES) * 2
    assert rows[0]["contestant"] == "oba"
    assert float(rows[0]["test_accuracy"]) == pytest.approx(0.7)
    assert rows[0]["tuned_test_accuracy"] == ""
    assert int(rows[1]["macs"]) == 250


def test_a_loss_stands_in_where_there_is_no_accuracy():
    own = comparison()
    without = replace(own.dense[0], test=Judged(0.25, None, 300))
    trials = tuple(replace(t, test=Judged(0.5, None, 300), tuned_test=None) for t in own.trials)
    text = markdown_text(replace(own, dense=(without,), trials=trials))
    assert "Loss on test data" in text
    assert cells(text.splitlines()[2])[1] == "0.5000"


def test_all_files_are_written(tmp_path):
    written = write_comparison(comparison(), tmp_path / "new")
    assert sorted(path.name for path in written) == [
        "accuracy.png", "comparison.csv", "comparison.json", "comparison.md", "layers.png",
    ]  # fmt: skip
    assert sorted((tmp_path / "new").iterdir()) == sorted(written)
    read = json.loads((tmp_path / "new" / "comparison.json").read_text())
    assert Comparison.from_data(read) == comparison()


# --- pictures --------------------------------------------------------------------------------------------------------


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_the_plot_of_accuracy_changes_with_the_figures_and_only_with_them(tmp_path):
    one = pixels(plot_accuracy_against_cost(comparison(), tmp_path / "one.png"))
    same = pixels(plot_accuracy_against_cost(comparison(), tmp_path / "same.png"))
    other = pixels(plot_accuracy_against_cost(comparison(shift=0.03), tmp_path / "other.png"))
    assert np.array_equal(one, same)
    assert one.shape != other.shape or not np.array_equal(one, other)


def test_those_to_highlight_can_be_named(tmp_path):
    plain = pixels(plot_accuracy_against_cost(comparison(), tmp_path / "a.png", ["random"]))
    other = pixels(plot_accuracy_against_cost(comparison(), tmp_path / "b.png", ["taylor"]))
    assert plain.shape != other.shape or not np.array_equal(plain, other)


def test_a_panel_more_where_there_was_fine_tuning(tmp_path):
    two = pixels(plot_accuracy_against_cost(comparison(3), tmp_path / "two.png"))
    one = pixels(plot_accuracy_against_cost(comparison(3, tuned=False), tmp_path / "one.png"))
    assert two.shape[1] == 2 * one.shape[1]


def test_layers_can_be_drawn_for_any_contestants_and_budget(tmp_path):
    one = pixels(plot_layer_costs(comparison(), tmp_path / "a.png", ["oba"], 0.5))
    two = pixels(plot_layer_costs(comparison(), tmp_path / "b.png", ["oba", "random"]))
    assert two.shape[1] > one.shape[1]


def test_figures_that_are_missing_leave_gaps_and_no_error(tmp_path):
    own = comparison()
    broken = tuple(
        replace(t, test=judged(None), tuned_test=judged(None)) if t.contestant == "oba" else t
        for t in own.trials
    )
    path = plot_accuracy_against_cost(replace(own, trials=broken), tmp_path / "x.png")
    assert path.stat().st_size > 0
    assert "| oba | – | – |" in markdown_text(replace(own, trials=broken))


@example([0.85, 1.0, 1.0, 1.0], 0.07)  # the run at the top is moved onto the one below it
@given(st.lists(st.floats(0, 1), max_size=14), st.sampled_from([0.01, 0.05, 0.07]))
def test_names_keep_their_order_and_their_distance(heights, gap):
    spots = spread_apart(heights, gap, 0, 1)
    order = sorted(range(len(heights)), key=lambda place: heights[place])
    placed = [spots[place] for place in order]
    assert all(b - a > gap - 1e-9 for a, b in zip(placed, placed[1:], strict=False))
    assert all(-1e-9 <= spot <= 1 + 1e-9 for spot in spots)
    if all(b - a >= gap for a, b in zip(sorted(heights), sorted(heights)[1:], strict=False)):
        assert spots == pytest.approx(heights)
