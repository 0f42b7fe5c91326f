import json

import pytest
from typer.testing import CliRunner

from apoptosis.cli.app import app
from apoptosis.cli.demo import DemoOptions, measure_ranking
from apoptosis.criteria import CRITERIA

RUN = CliRunner()
GROUPS = ["stem.conv", "down.conv", "top.conv"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    shown = RUN.invoke(app, ["demo", "--epochs", "2", "--seed", "4", "--out", str(out / "new")])
    assert shown.exit_code == 0, shown.output
    return shown, out / "new"


def test_the_table_shows_every_criterion_and_group(demo):
    shown, _ = demo
    for word in [*CRITERIA, *GROUPS, "mean"]:
        assert word in shown.stdout


def test_the_end_says_how_far_to_trust_it_and_what_to_try_next(demo):
    shown, _ = demo
    text = " ".join(shown.stdout.split())
    assert "This is one small network and one seed" in text
    assert "Next: apoptosis demo --seed 5" in text


def test_results_hold_all_that_is_needed_to_repeat_them(demo):
    _, out = demo
    result = json.loads((out / "ranking.json").read_text())
    assert (result["seed"], result["epochs"], result["n"], result["device"]) == (4, 2, 1200, "cpu")
    assert {"apoptosis", "torch", "python"} <= result["versions"].keys()
    assert {row["criterion"] for row in result["criteria"]} == set(CRITERIA)
    assert all(list(row["spearman"]) == GROUPS for row in result["criteria"])
    assert result["channels"] == {"stem.conv": 16, "down.conv": 32, "top.conv": 32}


def test_the_folder_holds_the_plot_the_figures_and_nothing_else(demo):
    _, out = demo
    assert sorted(path.name for path in out.iterdir()) == ["ranking.json", "ranking.png"]
    assert (out / "ranking.png").read_bytes().startswith(b"\x89PNG")


def test_knowing_the_network_beats_knowing_nothing(demo):
    """The weakest claim the demo rests on: first-order scores carry information, random ones do not."""
    _, out = demo
    means = {
        row["criterion"]: row["mean"]
        for row in json.loads((out / "ranking.json").read_text())["criteria"]
    }
    assert means["taylor"] > means["random"] + 0.2
    assert abs(means["random"]) < 0.37  # three standard deviations for 16, 32 and 32 channels


def test_json_alone_is_printed_and_another_run_agrees(demo, tmp_path):
    _, out = demo
    arguments = ["demo", "--epochs", "2", "--seed", "4", "--json", "--out", str(tmp_path)]
    printed = json.loads(RUN.invoke(app, arguments).stdout)
    before = json.loads((out / "ranking.json").read_text())
    for result in (printed, before):
        for row in result["criteria"]:
            del row["seconds"]
    assert printed == before


def test_the_seed_changes_the_network(demo):
    _, out = demo
    before = json.loads((out / "ranking.json").read_text())
    facts = measure_ranking(DemoOptions(out=out, seed=5, epochs=2)).facts
    assert facts["train_loss"] != before["train_loss"]


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("apoptosis.cli.demo.measure_ranking", lambda _: pytest.fail("worked first"))
    (tmp_path / "file").write_text("in the way")
    failed = RUN.invoke(app, ["demo", "--out", str(tmp_path / "file" / "below")])
    assert failed.exit_code == 1
    assert "NotADirectoryError" in failed.stderr
