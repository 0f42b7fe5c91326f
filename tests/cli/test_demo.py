"""The demo: one network, every criterion, both questions; and what it leaves in its folder."""

import json
import shlex

import pytest
import torch
from typer.testing import CliRunner

from apoptosis.cli import demo, demo_ranking
from apoptosis.cli.app import app
from apoptosis.criteria import CRITERIA
from apoptosis.errors import DataError

RUN = CliRunner()
GROUPS = ["stem.conv", "down.conv", "top.conv"]
CONTESTANTS = {*CRITERIA, "magnitude-l2-uniform"}
FILES = [
    "accuracy.png",
    "comparison.csv",
    "comparison.json",
    "comparison.md",
    "layers.png",
    "ranking.json",
    "ranking.png",
]
TIMES = ("seconds", "prune_s", "tune_s", "mean_prune_s", "mean_tune_s")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "new"
    shown = RUN.invoke(app, ["demo", "--epochs", "2", "--seed", "4", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    return " ".join(shown.stdout.split()), out


def read(out, name: str) -> dict:
    return json.loads((out / name).read_text())


def timeless(data):
    """The same without seconds, which differ from run to run."""
    if isinstance(data, dict):
        return {name: timeless(own) for name, own in data.items() if name not in TIMES}
    return [timeless(own) for own in data] if isinstance(data, list) else data


def test_both_tables_show_every_criterion(whole):
    shown, _ = whole
    first, second = shown.split("2. Which criterion knows")
    for word in CONTESTANTS:
        assert word in first
    for word in [*CRITERIA, *GROUPS, "mean"]:
        assert word in second


def test_every_criterion_prunes_to_a_half_and_to_a_quarter_and_is_tuned(whole):
    _, out = whole
    trials = read(out, "comparison.json")["trials"]
    cells = {(trial["contestant"], trial["asked"]) for trial in trials}
    assert cells == {(name, share) for name in CONTESTANTS for share in (0.5, 0.25)}
    for trial in trials:
        assert 0.8 * trial["asked"] < trial["got"] <= trial["asked"]
        assert trial["test"]["count"] == trial["tuned_test"]["count"] == 300


def test_fine_tuning_brings_back_what_pruning_took(whole):
    """The mean over criteria and budgets: single ones may be unlucky."""
    _, out = whole
    trials = read(out, "comparison.json")["trials"]
    gains = [trial["tuned_test"]["accuracy"] - trial["test"]["accuracy"] for trial in trials]
    assert sum(gains) / len(gains) > 0.02


def test_it_says_how_far_to_trust_it(whole):
    shown, _ = whole
    assert "one seed, so small differences are chance" in shown
    assert "over 300 images has a standard error of" in shown
    assert "This is one small network and one seed" in shown


def test_the_commands_it_proposes_can_be_typed(whole, tmp_path, monkeypatch):
    """Tried as dry runs: they are understood, and what they ask for can be reached."""
    shown, _ = whole
    monkeypatch.chdir(tmp_path)
    compare = shown.split("Was it luck? ")[1].split(" Next, ")[0]
    prune = shown.split("Next, the network itself: ")[1]
    for line in (compare, prune):
        words = shlex.split(line)
        assert words[0] == "apoptosis"
        result = RUN.invoke(app, [*words[1:], "--dry-run"])
        assert result.exit_code == 0, result.stderr
    assert shlex.split(prune)[-2:] == ["--seed", "4"]


def test_results_hold_all_that_is_needed_to_repeat_them(whole):
    _, out = whole
    ranking, comparison = read(out, "ranking.json"), read(out, "comparison.json")
    facts = comparison
    assert (ranking["seed"], ranking["epochs"], ranking["n"], ranking["device"]) == (
        (4, 2, 1200, "cpu")
    )
    assert (facts["seeds"], facts["epochs"], facts["model"]) == ([4], 2, "digits_cnn")
    for own in (ranking, facts):
        assert {"apoptosis", "torch", "python"} <= own["versions"].keys()
        assert "commit" in own
    assert {row["criterion"] for row in ranking["criteria"]} == set(CRITERIA)
    assert all(list(row["spearman"]) == GROUPS for row in ranking["criteria"])
    assert ranking["channels"] == {"stem.conv": 16, "down.conv": 32, "top.conv": 32}


def test_the_folder_holds_tables_and_plots_and_nothing_else(whole):
    shown, out = whole
    assert sorted(path.name for path in out.iterdir()) == FILES
    assert all(name in shown for name in FILES)
    for path in out.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_knowing_the_network_beats_knowing_nothing(whole):
    """The weakest claim the demo rests on: first-order scores carry information, random ones do not."""
    _, out = whole
    means = {row["criterion"]: row["mean"] for row in read(out, "ranking.json")["criteria"]}
    assert means["taylor"] > means["random"] + 0.2
    assert abs(means["random"]) < 0.37  # three standard deviations for 16, 32 and 32 channels


@pytest.fixture
def two_criteria(monkeypatch):
    """A demo of seconds."""
    few = {name: CRITERIA[name] for name in ("magnitude", "taylor")}
    for own in (demo, demo_ranking):
        monkeypatch.setattr(own, "CRITERIA", few)


def test_json_alone_is_printed_and_another_run_agrees(two_criteria, tmp_path):
    arguments = ["demo", "--epochs", "1", "--out", str(tmp_path)]
    printed = json.loads(RUN.invoke(app, [*arguments, "--json"]).stdout)
    assert RUN.invoke(app, arguments).exit_code == 0
    again = {name: read(tmp_path, f"{name}.json") for name in ("comparison", "ranking")}
    assert timeless(printed) == timeless(again)


def test_the_seed_changes_the_network(two_criteria, tmp_path):
    first, second = (
        demo.measure(demo.DemoOptions(out=tmp_path, seed=seed, epochs=1)) for seed in (0, 1)
    )
    assert first[1].facts["train_loss"] != second[1].facts["train_loss"]
    assert first[0].dense[0].test.loss != second[0].dense[0].test.loss


def test_it_runs_on_one_thread_and_puts_back_what_was_set(tmp_path, monkeypatch):
    """Beside another busy process two threads wait for each other at every one of its tiny operations."""
    seen = []

    def measure(_):
        seen.append(torch.get_num_threads())
        raise DataError("The cause.")

    monkeypatch.setattr(demo, "measure", measure)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert RUN.invoke(app, ["demo", "--out", str(tmp_path)]).exit_code == 1
        assert (seen, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "measure", lambda _: pytest.fail("worked first"))
    (tmp_path / "file").write_text("in the way")
    failed = RUN.invoke(app, ["demo", "--out", str(tmp_path / "file" / "below")])
    assert failed.exit_code == 1
    assert "ConfigError" in failed.stderr
    assert "--out" in failed.stderr
