import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import apoptosis.cli.score
from apoptosis.cli.app import app
from apoptosis.criteria import CRITERIA, UnitScores, unit_scores
from apoptosis.structure import trace

RUN = CliRunner()

SOURCE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

def broken():
    net = make()
    net[0].weight.data[0, 0] = float("nan")
    return net

def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(3)
    ]
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def parts():
    names: dict = {}
    exec(SOURCE, names)
    return names["make"]().eval(), names["batches"]()


def score(own, *arguments, model="make"):
    found = ["score", f"{own}:{model}", "--data", f"{own}:batches", *map(str, arguments)]
    return RUN.invoke(app, found)


def done(result):
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(result, kind: str) -> str:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert kind in result.stderr
    return "".join(result.stderr.replace("│", "").split())


def of_library(parts, criterion, aggregation=None):
    model, batches = parts
    return CRITERIA[criterion].units(
        model, trace(model, batches[0][0][:1]), batches, None, aggregation
    )


@pytest.mark.parametrize("criterion", ["oba", "taylor-gate", "magnitude"])
@pytest.mark.parametrize("aggregation", [None, "paper"])
def test_scores_are_those_of_the_library(own, parts, criterion, aggregation):
    more = [] if aggregation is None else ["--aggregation", aggregation]
    data = json.loads(done(score(own, "--criterion", criterion, *more, "--json")))
    expected = of_library(parts, criterion, aggregation)
    assert data["criterion"] == criterion
    assert data["samples"] == expected.count
    for name, values in expected.values.items():
        torch.testing.assert_close(torch.tensor(data["units"][name]).double(), values)


def test_the_table_shows_the_spread_of_each_group_and_the_least_units(own, parts):
    text = done(score(own, "--criterion", "taylor", "--top", "4"))
    units = of_library(parts, "taylor").values
    rows = [line.split() for line in text.splitlines()]
    for name, own_scores in units.items():
        spread = [own_scores.min(), own_scores.median(), own_scores.max()]
        numbers = [f"{float(value):.3g}" for value in spread]
        assert [name, "hidden", str(len(own_scores)), *numbers] in rows
    every = sorted((float(v), n, i) for n, own in units.items() for i, v in enumerate(own))
    shown = rows[rows.index(["group", "unit", "score"]) + 1 :][:4]
    assert shown == [[name, str(unit), f"{value:.3g}"] for value, name, unit in every[:4]]
    assert "Next: apoptosis prune" in text


def test_no_units_are_listed_where_none_are_asked_for(own):
    assert "least valuable" not in done(score(own, "--criterion", "magnitude", "--top", "0"))


def test_parameter_scores_go_into_a_file_of_tensors(own, parts, tmp_path):
    path = tmp_path / "new" / "scores.safetensors"
    done(score(own, "--criterion", "oba", "--out", path))
    model, batches = parts
    scores = CRITERIA["oba"].score(model, batches, None)
    torch.testing.assert_close(load_file(path), scores.values)
    with safe_open(path, "pt") as file:
        facts = {name: json.loads(value) for name, value in file.metadata().items()}
    assert (facts["criterion"], facts["samples"]) == ("oba", 24)
    assert [p.name for p in path.parent.iterdir()] == ["scores.safetensors"]


def test_unit_scores_go_into_a_json_file(own, tmp_path):
    path = tmp_path / "scores.json"
    printed = json.loads(done(score(own, "--criterion", "taylor-gate", "--json", "--out", path)))
    assert json.loads(path.read_text()) == printed


ERRORS = {
    "criterion": (["--criterion", "tailor"], "ConfigError", "Didyoumean'taylor'?"),
    "aggregation": (["--aggregation", "pape"], "ConfigError", "Didyoumean'paper'?"),
    "suffix": (["--out", "{tmp}/scores.pt"], "ConfigError", "Say.jsonforscoresofunits"),
    "no suffix": (["--out", "{tmp}/scores"], "ConfigError", "itendswithnothing"),
    "units alone": (
        ["--criterion", "taylor-gate", "--out", "{tmp}/s.safetensors"],
        "ConfigError",
        "taylor-gatescoresunits,notparameters",
    ),
    "folder": (["--out", "{tmp}/folder.json"], "ConfigError", "isafolder"),
    "below a file": (["--out", "{tmp}/file/s.json"], "ConfigError", "fileisafile"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_is_refused_before_the_work(own, tmp_path, name, monkeypatch):
    monkeypatch.setattr(apoptosis.cli.score, "find_subject", lambda *_: pytest.fail("worked first"))
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").write_text("in the way")
    arguments, kind, message = ERRORS[name]
    assert message in refused(score(own, *(a.format(tmp=tmp_path) for a in arguments)), kind)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.json"]


def test_scores_that_are_no_numbers_are_refused(own, tmp_path):
    arguments = ("--criterion", "magnitude", "--out", tmp_path / "s.json")
    refused(score(own, *arguments, model="broken"), "NonFiniteError")
    assert not list(tmp_path.iterdir())


def test_groups_without_scores_are_named(own, monkeypatch):
    def half_scored(scores, structure, aggregation):
        found = unit_scores(scores, structure, aggregation)
        return UnitScores({"0": found.values["0"]}, "magnitude", missing=("2",))

    monkeypatch.setattr(apoptosis.cli.score, "unit_scores", half_scored)
    assert "left alone: 2" in done(score(own, "--criterion", "magnitude"))


def test_ctrl_c_leaves_nothing_behind(own, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(apoptosis.cli.score, "find_subject", interrupted)
    result = score(own, "--out", tmp_path / "s.json")
    assert result.exit_code == 130
    assert not list(tmp_path.iterdir())


def test_names_of_groups_are_not_cut(tmp_path, monkeypatch):
    name = "a_projection_" * 6
    path = tmp_path / "mine.py"
    path.write_text(
        SOURCE
        + f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.{name}, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.{name}(x).relu())

make = Net
"""
    )
    monkeypatch.setenv("COLUMNS", "80")
    text = done(score(path, "--top", "1"))
    tables = text[: text.index("Next:")]
    assert "…" not in tables
    firsts = [line.split()[0] for line in tables.splitlines() if line.strip()]
    assert name in "".join(firsts)
    assert "--criterion oba" in text, "it is not the default of prune"


@pytest.mark.parametrize(("name", "method"), [("s.json", "text"), ("s.safetensors", "bytes")])
def test_a_full_disk_is_told_with_place_and_remedy(own, tmp_path, monkeypatch, name, method):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"pathlib.Path.write_{method}", full)
    said = refused(score(own, "--out", tmp_path / name), "OSError")
    assert f"{tmp_path / name}:Nospaceleftondevice.Makeroomonthatdisk" in said
    assert list(tmp_path.iterdir()) == []
