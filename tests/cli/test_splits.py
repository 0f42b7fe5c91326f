"""What a network is judged on was kept from it when it was made, whatever --seed says later."""

import json

import pytest
from typer.testing import CliRunner

from apoptosis.checkpoint import read_run
from apoptosis.cli.app import app

RUN = CliRunner()


def run(*words) -> tuple[dict, str]:
    result = RUN.invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    out = tmp_path_factory.mktemp("dense") / "dense"
    run("train", "digits_cnn", "--data", "digits", "--epochs", 1, "--seed", 2, "--out", out)
    return out


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    out = tmp_path_factory.mktemp("other") / "other"
    run("train", "digits_cnn", "--data", "digits", "--epochs", 1, "--out", out)
    return out


def losses(data: dict) -> list[float]:
    return [model["loss"] for model in data["models"]]


def test_another_seed_changes_nothing_about_who_is_held_out(dense):
    first, quiet = run("evaluate", dense, "--data", "digits", "--seed", 2)
    second, told = run("evaluate", dense, "--data", "digits")
    assert losses(first) == losses(second)
    assert "was made with the split of digits by seed 2, which is kept" in told
    assert "was made with the split" not in quiet


def test_a_split_is_handed_on_from_checkpoint_to_checkpoint(dense, tmp_path):
    words = ("--data", "digits", "--criterion", "magnitude", "--keep-flops", 0.5, "--seed", 5)
    pruned, _ = run("prune", dense, *words, "--out", tmp_path / "half")
    subject = read_run(tmp_path / "half").settings["subject"]
    assert (subject["seed"], subject["split_seed"]) == (5, 2)
    judged, _ = run("evaluate", tmp_path / "half", "--data", "digits")
    assert losses(judged)[0] == pytest.approx(pruned["evaluation"]["after"]["loss"])


def test_weights_of_a_checkpoint_bring_their_split(dense):
    first, _ = run("evaluate", dense, "--data", "digits")
    second, _ = run("evaluate", "digits_cnn", "--weights", dense, "--data", "digits", "--seed", 9)
    assert losses(first) == losses(second)


def test_networks_of_different_splits_are_not_judged_together(dense, other):
    result = RUN.invoke(app, ["evaluate", str(dense), str(other), "--data", "digits"])
    assert result.exit_code == 1
    text = " ".join(result.stderr.replace("│", " ").split())
    assert "different splits of digits" in text
    assert "by seed 2" in text
    assert "Evaluate them one by one" in text


def test_the_oracle_can_fail(dense, monkeypatch):
    """Without the record, another seed judges on images that the network was trained on."""
    first, _ = run("evaluate", dense, "--data", "digits", "--seed", 2)
    monkeypatch.setattr("apoptosis.cli.splits._noted", lambda *_: [])
    second, _ = run("evaluate", dense, "--data", "digits", "--seed", 0)
    assert losses(first) != losses(second)
