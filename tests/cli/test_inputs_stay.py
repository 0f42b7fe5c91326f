"""No command writes its result over what it reads, by whatever name the place is given; nor over what is no result."""

import os
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import save_file

from apoptosis.cli.app import app
from apoptosis.cli.places import check_folder
from oracles.command_runs import RUN, SOURCE, done, refused

PRUNE = ["--keep-params", "0.5", "--steps", "1", "--criterion", "magnitude"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A file of functions, a checkpoint, weights."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "mine.py").write_text(SOURCE)
    model, data = f"{folder}/mine.py:make", f"{folder}/mine.py:both"
    done(["train", model, "--data", data, "--epochs", "1", "--out", str(folder / "dense")])
    tensors = {
        name: torch.zeros(shape)
        for name, shape in {
            "0.weight": (16, 4),
            "0.bias": (16,),
            "1.weight": (16,),
            "1.bias": (16,),
            "1.running_mean": (16,),
            "1.running_var": (16,),
            "4.weight": (12, 16),
            "4.bias": (12,),
            "6.weight": (3, 12),
            "6.bias": (3,),
        }.items()
    }
    save_file(tensors | {"1.num_batches_tracked": torch.tensor(1)}, folder / "dense.safetensors")
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    here = shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(here)
    return here


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


COMMANDS = {
    "prune": ["prune", "dense", *PRUNE],
    "rounds": ["prune", "dense", "--keep-params", "0.7,0.4", "--steps", "1", "--epochs", "1"],
    "weights": ["prune", "dense", "--unstructured", "--keep", "0.5"],
    "train": ["train", "dense", "--epochs", "1"],
    "finetune": ["finetune", "dense", "--epochs", "1"],
    "teacher": [
        *("finetune", "mine.py:make", "--epochs", "1", "--distil", "0.5", "--teacher", "dense")
    ],
    "compare": ["compare", "dense", "--keep-flops", "0.5", "--steps", "1"],
}


def names_of_dense(place):
    (place / "link").symlink_to(place / "dense", target_is_directory=True)
    (place / "up").mkdir()
    (place / "up" / "link").symlink_to("../dense", target_is_directory=True)
    return [
        *("dense", "dense/", "./dense", "up/../dense", "link", "up/link", str(place / "dense")),
        *("dense/small", "link/small", "dense/small/smaller"),
        *(["DENSE"] if (place / "DENSE").exists() else []),
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_checkpoint_that_is_read_is_not_written_over(place, name):
    outs = names_of_dense(place)
    before = contents(place)
    for out in outs if name == "prune" else outs[::3]:
        for more in ([], ["--resume"]):
            said = refused([*COMMANDS[name], "--data", "mine.py:both", "--out", out, *more])
            assert "--out" in said, out
    assert contents(place) == before


def test_earlier_rounds_are_not_written_over_it_either(place):
    pathlib.Path(place / "dense").rename(place / "out-params0.7")
    before = contents(place)
    words = ["prune", "out-params0.7", *COMMANDS["rounds"][2:], "--data", "mine.py:both"]
    assert "out-params0.7" in refused([*words, "--out", "out"])
    assert contents(place) == before


def test_rounds_of_nearly_equal_shares_have_places_of_their_own(place):
    words = ["prune", "mine.py:make", "--data", "mine.py:both", "--steps", "1", "--epochs", "1"]
    done([*words, "--keep-params", "0.70000004,0.70000003,0.4", "--out", "out"])
    assert (place / "out-params0.70000004" / "run.json").exists()
    assert (place / "out-params0.70000003" / "run.json").exists()


def test_weights_that_are_read_are_not_written_over(place):
    model = ["mine.py:make", "--data", "mine.py:both"]
    os.link(place / "dense.safetensors", place / "hard.safetensors")
    (place / "soft.safetensors").symlink_to("dense.safetensors")
    before = contents(place)
    for out in ("dense.safetensors", "./dense.safetensors", "hard.safetensors", "soft.safetensors"):
        words = ["score", *model, "--weights", "dense.safetensors", "--out", out]
        assert "--weights" in refused(words)
    for weights in ("dense/model.safetensors", "dense"):
        said = refused(["prune", *model, *PRUNE, "--weights", weights, "--out", "dense"])
        assert "--out" in said
    assert contents(place) == before


@pytest.mark.parametrize("name", ["model.safetensors", "run.json", "plan.json", "other.json"])
def test_scores_are_not_put_into_a_checkpoint(place, name):
    before = contents(place)
    said = refused(["score", "mine.py:make", "--data", "mine.py:both", "--out", f"dense/{name}"])
    assert "checkpoint" in said
    assert contents(place) == before


def test_data_and_files_of_functions_are_not_written_over(place):
    before = contents(place)
    (place / "data").mkdir()
    for out in ("mine.py", "."):
        refused(["prune", "mine.py:make", *PRUNE, "--data", "mine.py:both", "--out", out])
    assert contents(place) == before


FOREIGN = {
    "a run.json of another program": {"run.json": '{"run": 1, "model.safetensors": 2}'},
    "with weights": {"run.json": "[]", "model.safetensors": "weights"},
    "of no program": {"run.json": "not json", "plan.json": "plans"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_that_only_looks_like_a_checkpoint_is_left_alone(place, name):
    folder = place / "theirs"
    folder.mkdir()
    for file, text in FOREIGN[name].items():
        (folder / file).write_text(text)
    for words in (COMMANDS["prune"], COMMANDS["weights"], COMMANDS["finetune"]):
        said = refused([*words, "--data", "mine.py:both", "--out", "theirs"])
        assert "no checkpoint" in said
    assert contents(folder) == {file: text.encode() for file, text in FOREIGN[name].items()}


@pytest.mark.parametrize("words", [["compare", "mine.py:make", "--keep-flops", "0.5"], ["demo"]])
def test_tables_are_not_put_among_files_of_a_person(place, words):
    folder = place / "plots"
    folder.mkdir()
    (folder / "comparison.json").write_text('{"mine": 1}')
    (folder / "accuracy.png").write_bytes(b"a picture")
    (folder / "ranking.json").write_text("[]")
    before = contents(folder)
    more = ["--data", "mine.py:both"] if words[0] == "compare" else []
    said = refused([*words, *more, "--out", "plots"])
    assert "tables and plots" in said
    assert contents(folder) == before


def test_another_place_beside_the_input_is_fine(place):
    words = [*COMMANDS["prune"], "--dense", "mine.py:make", "--data", "mine.py:both", "--out"]
    before = contents(place / "dense")
    done([*words, "small"])
    done([*words, "small"])  # a result of an earlier run may be replaced
    result = RUN.invoke(app, [*words, "dense-2"])
    assert result.exit_code == 0, result.stderr
    assert contents(place / "dense") == before


def test_a_folder_called_like_a_network_or_data_of_the_library_is_no_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits_cnn").mkdir()
    inputs = {"MODEL": "digits_cnn", "--data": "digits", "--weights": "~nobody-here/x"}
    check_folder(pathlib.Path("digits_cnn/a"), inputs)
    check_folder(pathlib.Path("digits/a"), inputs)
