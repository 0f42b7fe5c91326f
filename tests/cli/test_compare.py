"""`apoptosis compare`: criteria on one network; tables, files, what is refused, and runs that were stopped."""

import csv
import json
import shlex
import tomllib

import pytest
from typer.testing import CliRunner

from apoptosis import progress
from apoptosis.cli.app import app

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

def parts():
    return {
        "scoring": batches(),
        "training": batches(4, seed=2),
        "validation": batches(2, seed=3),
        "evaluation": batches(2, seed=4),
    }

def alone():
    return batches()

def untuned():
    return {"scoring": batches(), "evaluation": batches(2, seed=4)}
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


def words_of(own, *more, data="parts") -> list[str]:
    words = ["compare", f"{own}:make", "--data", f"{own}:{data}", "--keep-flops", "0.6,0.3"]
    return [*words, "--steps", "2", *map(str, more)]


def done(words) -> str:
    result = RUN.invoke(app, words)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(words, code: int = 1) -> str:
    result = RUN.invoke(app, words)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.replace("│", " ").split())


def figures(folder) -> list[dict]:
    """Lines of the table of trials, without seconds."""
    with (folder / "comparison.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    return [{k: v for k, v in row.items() if not k.endswith("_s")} for row in rows]


@pytest.fixture(scope="module")
def compared(own, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "out"
    more = ("--criterion", "taylor", "--criterion", "oba", "--epochs", 2, "--seeds", 2)
    return done(words_of(own, *more, "--out", out)), out


def test_every_contestant_and_the_baselines_stand_in_table_and_files(compared):
    shown, out = compared
    names = {"taylor", "oba", "random", "magnitude-l2-uniform"}
    rows = figures(out)
    assert {row["contestant"] for row in rows} == names
    assert len(rows) == len(names) * 2 * 2
    assert all(name in shown for name in names)
    for path in out.iterdir():
        assert str(path) in shown.replace("\n", "")


def test_it_says_what_was_judged_and_what_was_chosen_on_what(compared):
    shown = " ".join(compared[0].split())
    assert "Accuracy in % on test data (n = 32)" in shown
    assert "2 seeds" in shown
    assert "Order of the rows: by validation data (n = 32)" in shown
    assert "2 epochs of fine-tuning" in shown


def test_json_alone_is_printed(own, compared, tmp_path):
    more = ("--criterion", "taylor", "--criterion", "oba", "--epochs", 2, "--seeds", 2)
    data = json.loads(done(words_of(own, *more, "--out", tmp_path / "again", "--json")))
    assert data["seeds"] == [0, 1]
    assert figures(tmp_path / "again") == figures(compared[1])
    assert data["n"] == {"scoring": 48, "test": 32, "validation": 32}


def test_without_epochs_nothing_is_tuned(own, tmp_path):
    done(words_of(own, "--criterion", "magnitude", "--out", tmp_path / "out", data="untuned"))
    rows = figures(tmp_path / "out")
    assert {row["tuned_test_accuracy"] for row in rows} == {""}


def test_all_is_every_criterion_and_uniform_has_each_twice(own, tmp_path):
    more = ("--criterion", "magnitude", "--uniform", "--criterion", "taylor")
    shown = json.loads(done(words_of(own, *more, "--dry-run", "--json")))
    assert set(shown["contestants"]) == {
        *("magnitude", "magnitude-uniform", "taylor", "taylor-uniform"),
        *("random", "magnitude-l2-uniform"),
    }
    every = json.loads(done(words_of(own, "--criterion", "all", "--dry-run", "--json")))
    assert {"oba", "obd-fisher", "taylor-gate"} < set(every["contestants"])


def test_a_dry_run_counts_networks_and_writes_nothing(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ("--criterion", "oba", "--epochs", 2, "--seeds", 3, "--dry-run")
    text = " ".join(done(words_of(own, *more)).split())
    assert "3 contestants × 2 budgets × 3 seeds = 18 networks, each in 2 steps" in text
    assert "then 2 epochs of fine-tuning" in text
    assert "Nothing was written." in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["comparing", "epoch"])
def test_a_stopped_comparison_goes_on_to_the_same_end(own, compared, tmp_path, monkeypatch, name):
    """Stopped after the fourth network, or inside an epoch of a later one."""
    seen: list[str] = []

    def stop(event):
        seen.append(event.what)
        late = seen.count("comparing") > 4
        if event.what.startswith(name) and late and event.done and not event.finished:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    more = ("--criterion", "taylor", "--criterion", "oba", "--epochs", 2, "--seeds", 2)
    with monkeypatch.context() as patch:
        patch.setattr("apoptosis.cli.compare.progress_bars", lambda _: progress.listen(stop))
        result = RUN.invoke(app, words_of(own, *more, "--out", out))
    assert result.exit_code == 130, result.output
    assert not out.exists()
    line = result.stderr.splitlines()[-1].removeprefix("Go on: ")
    assert tomllib.loads((tmp_path / "out.progress" / "run.toml").read_text())["seeds"] == 2
    seen.clear()
    with monkeypatch.context() as patch:
        patch.setattr(
            "apoptosis.cli.compare.progress_bars",
            lambda _: progress.listen(lambda event: seen.append(event.what)),
        )
        done(shlex.split(line)[1:])
    assert sum(what.startswith("pruning") for what in seen) < 4 * 16  # four are not done again
    assert figures(out) == figures(compared[1])
    assert not (tmp_path / "out.progress").exists()


@pytest.mark.parametrize(
    ("more", "data", "words"),
    [
        (("--criterion", "obaa"), "parts", "Did you mean 'oba'?"),
        (("--repair", "norms"), "parts", "There is no repair 'norms'"),
        ((), "alone", "has no batches to judge on"),
        (("--learning-rate", "-1", "--epochs", "1"), "parts", "--learning-rate"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_work(
    own, tmp_path, monkeypatch, more, data, words
):
    monkeypatch.setattr("apoptosis.cli.compare.compare", lambda *_, **__: pytest.fail("worked"))
    assert words in refused(words_of(own, *more, "--out", tmp_path / "out", data=data))
    assert list(tmp_path.iterdir()) == []


def test_a_budget_that_nobody_can_meet_is_refused_before_the_work(own, tmp_path):
    words = ["compare", f"{own}:make", "--data", f"{own}:parts", "--keep-flops", "0.00001"]
    text = refused([*words, "--out", str(tmp_path / "out")])
    assert "--keep-flops" in text
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_refused_before_the_work(own, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "file" in refused(words_of(own, "--out", tmp_path / "file"), code=2).lower()


@pytest.mark.parametrize("name", ["run.json", "thesis.tex"])
def test_tables_are_not_put_among_other_files(own, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}")
    text = refused(words_of(own, "--out", tmp_path / "out"))
    assert "earlier comparison" in text
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


def test_an_earlier_comparison_may_be_replaced(own, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "comparison.md").write_text("half of one")
    (tmp_path / "out" / ".apoptosis-comparison-abc.csv").write_text("killed in the writing")
    record = {"contestants": {}, "baselines": [], "trials": []}
    (tmp_path / "out" / "comparison.json").write_text(json.dumps(record))
    (tmp_path / "out" / "thoughts.txt").write_text("mine")
    done(words_of(own, "--criterion", "taylor", "--out", tmp_path / "out"))
    assert (tmp_path / "out" / "comparison.md").read_text() != "half of one"
    assert (tmp_path / "out" / "thoughts.txt").read_text() == "mine"


def test_plots_that_do_not_fit_leave_a_comparison_to_go_on_with(own, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", full)
        result = RUN.invoke(app, words_of(own, "--criterion", "taylor", "--out", out))
    assert result.exit_code == 1, result.output
    assert f"{out}/accuracy.png:No" in "".join(result.stderr.replace("│", "").split())
    line = result.stderr.splitlines()[-1].removeprefix("Go on: ")
    again = f"compare {own}:make --data {own}:parts --config {out}.progress/run.toml --resume"
    assert (
        line == f"apoptosis {again}"
    )  # code is named anew: none is run that stands in a folder alone
    done(shlex.split(line)[1:])
    assert (out / "accuracy.png").is_file()
    assert not (tmp_path / "out.progress").exists()
