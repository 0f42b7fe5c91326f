import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import apoptosis.cli.subject
from apoptosis.cli.app import app
from apoptosis.errors import TraceError

RUN = CliRunner()

SOURCE = """
import torch
from torch import nn
from apoptosis import Task

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(3)
    ]

def both():
    return batches(), batches()[:2]

def without_labels():
    return [x for x, _ in batches()]

def many_classes():
    return batches(), [(torch.randn(8, 4), torch.full((8,), 7))]

def tokens():
    return [torch.arange(20).view(2, 10) % 7], None, Task.language_model()

def language_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 7))
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


def evaluate(own, *words, data="both"):
    return RUN.invoke(app, ["evaluate", *map(str, words), "--data", f"{own}:{data}"])


def done(result) -> str:
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(result) -> str:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.replace("│", " ").split())


def names_of(own) -> dict:
    names: dict = {}
    exec(own.read_text(), names)
    return names


def test_figures_are_those_of_the_held_out_data(own):
    data = json.loads(done(evaluate(own, f"{own}:make", "--json")))
    names = names_of(own)
    model, held_out = names["make"](), names["batches"]()[:2]
    x, y = torch.cat([x for x, _ in held_out]), torch.cat([y for _, y in held_out])
    (row,) = data["models"]
    with torch.no_grad():
        assert row["loss"] == pytest.approx(float(nn.functional.cross_entropy(model(x), y)))
        assert row["metrics"]["correct"] == float((model(x).argmax(1) == y).float().mean())
    assert row["params"] == 4 * 16 + 16 + 16 * 3 + 3
    assert row["macs"] == 4 * 16 + 16 * 3
    assert row["bytes"] is None
    assert 0 < row["seconds_per_batch"] < 1
    assert (data["on"], data["batch_size"], row["count"]) == ("held out", 8, 16)


def test_several_models_stand_in_one_table(own, tmp_path):
    words = ["--data", f"{own}:both", "--out"]
    for out, share in (
        ("half", ["--keep-params", "0.5"]),
        ("few", ["--unstructured", "--scope", "layer", "--keep", "0.2"]),
    ):
        done(RUN.invoke(app, ["prune", f"{own}:make", *share, *words, str(tmp_path / out)]))
    every = [f"{own}:make", tmp_path / "half", tmp_path / "few"]
    rows = json.loads(done(evaluate(own, *every, "--dense", f"{own}:make", "--json")))["models"]
    assert [row["model"] for row in rows] == list(map(str, every))
    dense, half, few = rows
    assert half["params"] <= dense["params"] / 2
    assert (few["params"], few["macs"]) == (dense["params"], dense["macs"])
    assert few["nonzero_params"] < dense["nonzero_params"] / 2
    for row, folder in ((half, "half"), (few, "few")):
        files = [f for f in (tmp_path / folder).iterdir() if f.name != "run.json"]
        assert row["bytes"] == sum(file.stat().st_size for file in files)
    text = " ".join(done(evaluate(own, *every, "--dense", f"{own}:make")).split())
    assert "16 samples held out, in batches of 8" in text
    assert "nonzero" in text
    assert "%" in text
    assert "correct" not in text


def test_weights_go_into_one_model(own, tmp_path):
    path = tmp_path / "w.safetensors"
    save_file(names_of(own)["make"]().state_dict(), path)
    data = json.loads(done(evaluate(own, f"{own}:make", "--weights", path, "--json")))
    assert data["models"][0]["bytes"] == path.stat().st_size
    said = refused(evaluate(own, f"{own}:make", f"{own}:make", "--weights", path))
    assert "goes into one model, and 2 were named" in said


def test_a_model_that_cannot_be_traced_has_no_macs_and_the_rest(own, monkeypatch):
    def refuse(*_):
        raise TraceError("It cannot be followed.")

    monkeypatch.setattr(apoptosis.cli.subject, "trace", refuse)
    data = json.loads(done(evaluate(own, f"{own}:make", "--json")))
    assert data["models"][0]["macs"] is None
    assert data["models"][0]["loss"] > 0


def test_data_to_score_on_judge_where_there_are_no_others(own):
    text = done(evaluate(own, f"{own}:make", data="batches"))
    assert "24 samples to score on, for no others were given" in " ".join(text.split())


def test_tokens_are_called_tokens(own):
    text = done(evaluate(own, f"{own}:language_model", data="tokens"))
    assert "18 tokens" in " ".join(text.split())
    words = ["--data", f"{own}:tokens", "--criterion", "taylor"]
    text = done(RUN.invoke(app, ["score", f"{own}:language_model", *words]))
    assert "18 tokens" in " ".join(text.split())


def test_labels_that_cannot_be_judged_by_are_refused_in_words(own):
    assert "labels" in refused(evaluate(own, f"{own}:make", data="without_labels"))
    assert "labels" in refused(evaluate(own, f"{own}:make", data="many_classes"))


def test_pruning_without_labels_says_why_there_are_no_figures(own, tmp_path):
    words = ["--data", f"{own}:without_labels", "--criterion", "magnitude", "--keep-params", "0.5"]
    text = done(RUN.invoke(app, ["prune", f"{own}:make", *words, "--out", str(tmp_path / "half")]))
    assert "Not evaluated: A loss needs labels" in text


def test_random_weights_are_told():
    result = RUN.invoke(app, ["evaluate", "digits_cnn", "--data", "digits"])
    assert "has random weights" in result.stderr
