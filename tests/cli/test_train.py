"""`train`, `finetune`, and training as a part of `prune`."""

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import apoptosis as ap
from apoptosis.checkpoint import read_run
from apoptosis.cli.app import app
from apoptosis.cli.sources import make_model
from apoptosis.cli.training_options import FineTuning, PruneTuning, Training
from apoptosis.training import FitOptions, evaluate
from apoptosis.workflow import DEFAULT_TUNING

RUN = CliRunner()

SOURCE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    )

def batches(num=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    inputs = [torch.randn(16, 4, generator=generator) for _ in range(num)]
    return [(x, (x @ weight).argmax(1)) for x in inputs]

def both():
    return batches(), batches(2, seed=2)

def without_labels():
    return [x for x, _ in batches()]
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


def run(*words) -> dict:
    result = RUN.invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*words, code: int = 1) -> str:
    result = RUN.invoke(app, [*map(str, words)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.fixture(scope="module")
def dense(own, tmp_path_factory):
    out = tmp_path_factory.mktemp("dense") / "dense"
    words = ("train", f"{own}:make", "--data", f"{own}:both", "--epochs", 8)
    return run(*words, "--out", out), out


@pytest.fixture(scope="module")
def half(own, dense, tmp_path_factory):
    out = tmp_path_factory.mktemp("half") / "half"
    words = (
        "prune",
        dense[1],
        "--dense",
        f"{own}:make",
        "--data",
        f"{own}:both",
        "--steps",
        2,
        "--keep-params",
        0.5,
    )
    return run(*words, "--out", out), out


def names_of(own) -> dict:
    names: dict = {}
    exec(own.read_text(), names)
    return names


def test_a_trained_network_is_saved_and_judged_on_held_out_data(own, dense):
    data, out = dense
    names = names_of(own)
    found = evaluate(ap.load(out, dense=names["make"]), names["batches"](2, seed=2))
    after = data["evaluation"]["after"]
    assert after["loss"] == pytest.approx(found.loss)
    assert after["metrics"]["correct"] == found.metrics["correct"]
    assert after["loss"] < data["evaluation"]["before"]["loss"]
    assert [epoch["validation"] for epoch in data["training"]["epochs"]] == [None] * 8
    assert data["next"].startswith(f"apoptosis prune {out} --data")
    assert f"--dense {own}:make" in data["next"]


def test_the_best_epoch_on_validation_data_is_kept_and_shown(tmp_path):
    words = ["train", "digits_cnn", "--data", "digits", "--epochs", "2", "--batch-size", "200"]
    result = RUN.invoke(app, [*words, "--out", str(tmp_path / "dense")])
    assert result.exit_code == 0, result.stderr
    (training,) = read_run(tmp_path / "dense").settings["training"]
    accuracies = [epoch["validation"]["metrics"]["correct"] for epoch in training["epochs"]]
    assert training["kept"] == accuracies.index(max(accuracies)) + 1
    assert "validation loss" in result.stdout
    assert "on 300 samples held out" in result.stdout
    assert f"epoch {training['kept']} is kept, on validation" in result.stdout
    assert "random weights" not in result.stderr


def test_options_reach_the_library(own, tmp_path, monkeypatch):
    import apoptosis.cli.train

    seen = []

    def fine_tuned(outcome, teacher, material, task, fit, journal):
        seen.append(fit)
        return ap.Outcome(
            outcome.model, outcome.plan, settings={"training": [{"kept": None, "epochs": []}]}
        )

    monkeypatch.setattr(apoptosis.cli.train, "fine_tuned", fine_tuned)
    told = {
        "epochs": 3,
        "optimizer": "adamw",
        "learning-rate": 0.5,
        "schedule": "step",
        "weight-decay": 0.1,
        "momentum": 0.5,
        "label-smoothing": 0.2,
        "precision": "bfloat16",
        "keep-epoch": "last",
        "seed": 7,
        "distil": 0.25,
        "temperature": 4.0,
    }
    words = [word for key, value in told.items() for word in (f"--{key}", value)]
    teacher = ("--teacher", f"{own}:make", "--channels-last")
    run(
        "finetune",
        f"{own}:make",
        "--data",
        f"{own}:both",
        *words,
        *teacher,
        "--out",
        tmp_path / "a",
    )
    expected = {key.replace("-", "_"): value for key, value in told.items()}
    expected["keep"] = expected.pop("keep_epoch")
    assert seen == [FitOptions(**expected, channels_last=True)]


def test_a_dry_run_says_how_many_steps_and_about_how_long_and_writes_nothing(
    own, dense, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "new"
    words = (
        "finetune",
        dense[1],
        "--dense",
        f"{own}:make",
        "--data",
        f"{own}:both",
        "--epochs",
        5,
        "--dry-run",
    )
    more = ("--distil", 0.5, "--teacher", dense[1], "--out", out)
    data = run(*words, *more)
    assert (data["epochs"], data["batches"], data["out"]) == (5, 3, str(out))
    assert data["training_s"] == pytest.approx(15 * data["step_s"])
    assert data["params"] == sum(p.numel() for p in names_of(own)["make"]().parameters())
    before = (dense[1] / "model.safetensors").read_bytes()
    shown = RUN.invoke(app, [*map(str, words)])
    assert shown.exit_code == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert "5 epochs, 3 steps each. Nothing was written. One step took" in text
    assert f"It would be saved in runs/{dense[1].name}-tuned" in text
    assert (dense[1] / "model.safetensors").read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_is_refused_what_a_run_would_be(own, tmp_path):
    words = ("train", f"{own}:make", "--data", f"{own}:without_labels", "--dry-run")
    assert "label" in refused(*words)
    (tmp_path / "file").write_text("in the way")
    words = ("train", f"{own}:make", "--data", f"{own}:both", "--dry-run")
    assert "is a file" in refused(*words, "--out", tmp_path / "file")


def test_defaults_in_the_help_are_those_of_the_library():
    assert Training().fit(0) == FitOptions()
    assert FineTuning().fit(0) == DEFAULT_TUNING
    assert PruneTuning().epochs == 0


def test_finetuning_keeps_the_plan_of_a_cut_network(own, half, tmp_path):
    _, out = half
    words = ("finetune", out, "--dense", f"{own}:make", "--data", f"{own}:both", "--epochs", 4)
    data = run(*words, "--out", tmp_path / "tuned")
    assert data["evaluation"]["after"]["loss"] < data["evaluation"]["before"]["loss"]
    before, after = read_run(out), read_run(tmp_path / "tuned")
    assert after.shapes == before.shapes
    assert after.settings["budget"] == before.settings["budget"]
    assert after.settings["subject"]["model"] == f"{own}:make"
    names: dict = {}
    exec("\n".join(data["load"]), names)
    x = torch.randn(3, 4)
    again = make_model(str(tmp_path / "tuned"), [f"{own}:make"]).model
    torch.testing.assert_close(names["small"](x), again(x), rtol=0, atol=0)


def test_finetuning_keeps_masks(own, dense, tmp_path):
    words = (
        "prune",
        dense[1],
        "--dense",
        f"{own}:make",
        "--data",
        f"{own}:both",
        "--unstructured",
        "--keep",
        0.3,
    )
    run(*words, "--out", tmp_path / "few")
    run(
        "finetune",
        tmp_path / "few",
        "--dense",
        f"{own}:make",
        "--data",
        f"{own}:both",
        "--epochs",
        2,
        "--out",
        tmp_path / "on",
    )
    before, after = (
        ap.masks_of(make_model(str(tmp_path / n), [f"{own}:make"]).model) for n in ("few", "on")
    )
    assert after.same_as(before)
    old, new = (load_file(tmp_path / n / "model.safetensors") for n in ("few", "on"))
    assert not torch.equal(old["0.weight"], new["0.weight"])


def test_a_teacher_is_followed_and_must_be_named(own, half, dense, tmp_path):
    words = ("finetune", half[1], "--dense", f"{own}:make", "--data", f"{own}:both", "--epochs", 1)
    assert "none was named. Name one: --teacher" in refused(*words, "--distil", 0.5)
    assert "Say how much: --distil 0.5" in refused(*words, "--teacher", dense[1])
    plain = run(*words, "--out", tmp_path / "a")
    taught = run(*words, "--distil", 1, "--teacher", dense[1], "--out", tmp_path / "b")
    assert plain["training"]["epochs"][0]["loss"] != taught["training"]["epochs"][0]["loss"]


def test_pruning_trains_after_each_round(own, dense, tmp_path):
    words = (
        "prune",
        dense[1],
        "--dense",
        f"{own}:make",
        "--data",
        f"{own}:both",
        "--steps",
        2,
        "--epochs",
        2,
    )
    data = run(*words, "--keep-params", "0.6,0.3", "--out", tmp_path / "small")
    assert [len(own["epochs"]) for own in data["training"]] == [2, 2]
    saved = [tmp_path / "small-params0.6", tmp_path / "small"]
    assert [one["saved"] for one in data["rounds"]] == list(map(str, saved))
    shares = [next(s for s in read_run(p).spent if s.what == "params").got for p in saved]
    assert 0.3 < shares[0] <= 0.6
    assert shares[1] <= 0.3
    text = RUN.invoke(
        app, ["evaluate", *map(str, saved), "--dense", f"{own}:make", "--data", f"{own}:both"]
    )
    assert text.exit_code == 0
    one = run(*words, "--keep-params", "0.3", "--out", tmp_path / "one")
    assert [len(own["epochs"]) for own in one["training"]] == [2]
    assert one["groups"]["0"]["before"] == 16


def test_single_weights_are_trained_after_each_stage(own, dense, tmp_path):
    words = (
        "prune",
        dense[1],
        "--dense",
        f"{own}:make",
        "--data",
        f"{own}:both",
        "--unstructured",
        "--keep",
        0.3,
    )
    data = run(*words, "--stages", 2, "--epochs", 1, "--out", tmp_path / "few")
    assert len(data["training"]) == 2
    assert ap.masks_of(make_model(str(tmp_path / "few"), [f"{own}:make"]).model) is not None


def test_what_cannot_be_meant_is_refused(own, half):
    data = ("--dense", f"{own}:make", "--data", f"{own}:both")
    prune = ("prune", half[1], *data, "--keep-params")
    assert "round by round, with training after each. Say how long" in refused(*prune, "0.6,0.3")
    assert "less than the one before" in refused(*prune, "0.3,0.6", "--epochs", 1)
    said = refused(*prune, "0.6,0.3", "--keep-flops", 0.5, "--epochs", 1)
    assert "have as many shares each" in said
    said = refused(*prune, 0.5, "--learning-rate", 3, "--distil", 0.5)
    assert "--learning-rate and --distil belong to fine-tuning" in said
    train = ("train", f"{own}:make", *data)
    assert "--learning-rate -1.0 is not above zero" in refused(*train, "--learning-rate", -1)
    assert "is not one of sgd, adamw" in refused(*train, "--optimizer", "adam", code=2)
    assert "labels" in refused("train", f"{own}:make", "--data", f"{own}:without_labels")


def test_one_epoch_is_told_once(own, tmp_path):
    words = [
        "prune",
        f"{own}:make",
        "--data",
        f"{own}:both",
        "--keep-params",
        "0.5",
        "--steps",
        "1",
    ]
    words += ["--epochs", "1", "--out", str(tmp_path / "a")]
    dry = RUN.invoke(app, [*words, "--dry-run"]).stdout
    assert "Training: 1 epoch." in " ".join(dry.split())
    shown = " ".join(RUN.invoke(app, words).stdout.split())
    assert shown.count("in epoch 1") == 1, shown
