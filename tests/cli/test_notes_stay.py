"""Notes of a run go when it has its result, or when a person removes them; nothing else takes them away."""

import inspect
import shlex

import pytest

from apoptosis import errors
from apoptosis.cli.app import app
from oracles.command_runs import (
    COMMANDS,
    RUN,
    SOURCE,
    done,
    files,
    refused,
    stopped,
    words_of,
)

ENDS = [
    *(
        error
        for _, error in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error, errors.ApoptosisError)
    ),
    *(OSError, MemoryError, KeyboardInterrupt, SystemExit, RuntimeError),
]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


def notes(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.note")}


def test_however_a_run_that_goes_on_ends_its_notes_stay(own, tmp_path, monkeypatch):
    out = tmp_path / "out"
    stopped(own, "weights", "--out", out)
    before = notes(tmp_path / "out.progress")
    assert before
    for end in ENDS:

        def failing(*_, end=end, **__):
            raise end("as it happens")

        with monkeypatch.context() as patch:
            patch.setattr("apoptosis.cli.sparsify.sparsify", failing)
            RUN.invoke(app, words_of(own, "weights", "--out", out, "--resume"))
        assert notes(tmp_path / "out.progress") == before, end
        assert not out.exists()
    done(words_of(own, "weights", "--out", out, "--resume"))
    done(words_of(own, "weights", "--out", tmp_path / "whole"))
    assert files(out) == files(tmp_path / "whole")
    assert not (tmp_path / "out.progress").exists()


@pytest.mark.parametrize("name", ["prune", "train"])
def test_a_refusal_before_the_first_step_leaves_notes(own, tmp_path, name):
    out = tmp_path / "out"
    stopped(own, name, "--out", out)
    before = notes(tmp_path / "out.progress")
    words, more = COMMANDS[name][0], ["--out", str(out), "--resume", "--data", f"{own}:both"]
    words = [f"{own}:make" if word == "MODEL" else word for word in words]
    for wrong in (["--seed", "5"], ["--device", "nowhere"], ["--weights", str(tmp_path / "no")]):
        refused([*words, *more, *wrong])
    assert notes(tmp_path / "out.progress") == before


def test_a_training_that_diverges_late_leaves_its_notes_and_says_so(own, tmp_path):
    path = tmp_path / "late_nan.py"
    path.write_text(own.read_text() + LATE)
    words = ["train", f"{path}:make", "--data", f"{path}:flaky", "--epochs", "6"]
    said = refused([*words, "--out", str(tmp_path / "out")])
    assert "NonFiniteError" in said
    assert notes(tmp_path / "out.progress")
    assert shlex.join(["rm", "-r", f"{tmp_path}/out.progress"]).replace(" ", "") in "".join(
        said.split()
    )


LATE = """
passes = []

class Late(list):
    def __iter__(self):
        passes.append(0)
        for x, y in super().__iter__():
            yield (x * float("nan") if len(passes) > 4 else x), y

def flaky():
    scoring, test = both()
    return {"scoring": scoring, "training": Late(scoring), "evaluation": test}
"""


@pytest.mark.parametrize("name", ["settings.json", "run.toml", "results.json", "a.note"])
@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["begun", "resumed"])
def test_files_of_a_person_beside_the_result_are_left_alone(own, tmp_path, name, resume):
    place = tmp_path / "out.progress"
    place.mkdir()
    (place / name).write_text("mine = 1")
    said = refused(words_of(own, "weights", "--out", tmp_path / "out", *resume))
    assert "no folder of notes" in said
    assert "rm -r" not in said
    assert {path.name: path.read_text() for path in place.iterdir()} == {name: "mine = 1"}
    assert not (tmp_path / "out").exists()
