"""Checkpoints, notes and masks that ask for much: refused in words, in little memory and time."""

import hashlib
import json
import os
import zipfile

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from apoptosis.checkpoint import load, load_masks, load_outcome, open_journal, read_run, save
from apoptosis.cli.app import app
from apoptosis.cli.sources import make_model
from apoptosis.cli.weights import load_weights_
from apoptosis.errors import CheckpointError, ConfigError, PlanMismatchError
from apoptosis.reading import UnfitFileError, read_file
from apoptosis.records import Outcome
from apoptosis.structure import Plan, trace
from oracles.limits import little

MEMBERS = ("run.json", "plan.json", "model.safetensors")


def make():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture
def path(tmp_path):
    plan = trace(make(), torch.zeros(1, 4)).identity()
    return save(tmp_path / "run", Outcome(make(), plan, example_inputs=torch.zeros(1, 4)))


def vouched(path, change):
    """`run.json` changed by somebody who knows how to make its checksum."""
    content = json.loads((path / "run.json").read_text())
    del content["checksum"]
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "run.json").write_text(json.dumps(content))


def as_written(content, path, name):
    """The record says of a file what the file is."""
    data = (path / name).read_bytes()
    content["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("kind", ["pipe", "endless", "huge", "linked"])
def test_members_are_plain_files_of_a_readable_size(path, tmp_path, member, kind):
    (path / member).unlink()
    huge = tmp_path / "huge"
    huge.touch()
    os.truncate(huge, 10 * 2**30)
    if kind == "pipe":
        os.mkfifo(path / member)
    elif kind == "huge":
        huge.rename(path / member)
    else:
        (path / member).symlink_to("/dev/zero" if kind == "endless" else huge)
    with little(2**28), pytest.raises(CheckpointError, match=member):
        load(path, make)
    if member == "run.json":
        said = "at most 268,435,456" if kind in ("huge", "linked") else "is a (pipe|device)"
        with little(2**28), pytest.raises(CheckpointError, match=said):
            read_run(path)


@pytest.mark.parametrize("shape", [[2**34], [2**20, 2**20], [2**62, 2**62]])
def test_a_record_asks_for_no_more_numbers_than_the_network_has(path, shape):
    def change(content):
        content["tensors"][0] |= {"shape": shape}

    vouched(path, change)
    with little(2**28), pytest.raises(CheckpointError, match=r"numbers; Sequential has 58"):
        load(path, make)


def test_a_record_of_masks_asks_for_no_more_numbers_either(path):
    def change(content):
        content["format"] = 2
        content["tensors"] = [own | {"kept": None} for own in content["tensors"]]
        content["tensors"][0] |= {"shape": [2**40], "kept": 1}

    vouched(path, change)
    with little(2**28), pytest.raises(CheckpointError, match=r"numbers; Sequential has 58"):
        load(path, make)


def test_example_inputs_are_of_a_readable_size(path):
    vouched(path, lambda content: content.update(example={"tensor": [2**40], "dtype": "float32"}))
    with little(2**28):
        assert load_outcome(path, make).example_inputs is None
    vouched(path, lambda content: content.update(example={"tensor": [9**4000], "dtype": "int8"}))
    with little(2**28):
        assert load_outcome(path, make).example_inputs is None


def test_a_plan_names_a_number_of_units_that_can_be():
    data = json.loads(trace(make(), torch.zeros(1, 4)).plan({"0": [0, 2]}).to_json())
    for size in (2**27, 2**40, 9**400):
        data["groups"]["0"] |= {"kept": [[0, size - 1]], "size": size}
        with little(2**28), pytest.raises(PlanMismatchError, match="at most 67,108,864"):
            Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("name", ["__class__.dump_patches", "forward.__func__.x", "", "a b", "a."])
def test_a_plan_reaches_sizes_alone(name):
    data = json.loads(trace(make(), torch.zeros(1, 4)).identity().to_json())
    change = {"module": "0", "name": name, "place": None, "old": 1, "new": 2}
    data["attributes"] = [change]
    with pytest.raises(PlanMismatchError, match="no name of a size"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[]", "3", '"x"', "1" * 5000])
def test_deep_and_odd_json_is_refused(path, tmp_path, text):
    for member in ("run.json", "plan.json"):
        before = (path / member).read_bytes()
        (path / member).write_text(text)
        if member == "plan.json":
            vouched(path, lambda content: as_written(content, path, "plan.json"))
        with little(2**29), pytest.raises(CheckpointError, match=member):
            load(path, make)
        (path / member).write_bytes(before)
    data = len(text).to_bytes(8, "little") + text.encode()
    (path / "model.safetensors").write_bytes(data)
    vouched(path, lambda content: as_written(content, path, "model.safetensors"))
    vouched(path, lambda content: as_written(content, path, "plan.json"))
    with little(2**29), pytest.raises(CheckpointError, match="model.safetensors"):
        load(path, make)
    (tmp_path / "masks").write_bytes(data)
    with little(2**29), pytest.raises(CheckpointError, match="masks cannot be read"):
        load_masks(tmp_path / "masks")


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "3", "null", "{", "\udcff", "[[]]"])
@pytest.mark.parametrize("within", [True, False])
def test_settings_of_a_run_are_an_object(tmp_path, text, within):
    place = tmp_path / "notes"
    with open_journal(place, {"seed": 0}) as journal:
        journal.write("step", {"number": 3})
    path = place / "settings.json"
    if within:
        text = path.read_text().replace('{\n    "seed": 0\n  }', text)
    path.write_text(text, errors="surrogateescape")
    with (
        little(2**29),
        pytest.raises(CheckpointError, match="settings.json (cannot be read|is damaged)|not said"),
    ):
        open_journal(place, {"seed": 0}, resume=True).__enter__()


@pytest.mark.parametrize("name", ["settings.json", "step.note"])
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_notes_are_plain_files(tmp_path, name, kind):
    place = tmp_path / "notes"

    def put():
        (place / name).unlink(missing_ok=True)
        os.mkfifo(place / name) if kind == "pipe" else (place / name).symlink_to("/dev/zero")

    with open_journal(place, {"seed": 0}) as journal:
        journal.write("step", {"number": 3})
    put()
    with little(2**28), pytest.raises(CheckpointError, match=name):
        open_journal(place, {"seed": 0}, resume=True).__enter__()
    (place / name).unlink()
    for file in place.iterdir():
        file.unlink()
    with open_journal(place, {"seed": 0}) as journal:
        journal.write("step", {"number": 3})
        put()
        with little(2**28), pytest.raises(CheckpointError, match="is a (pipe|device)"):
            journal.read("step") if name == "step.note" else load_masks(place / name)


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_masks_are_a_plain_file(tmp_path, kind):
    path = tmp_path / "m"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with little(2**28), pytest.raises(CheckpointError, match="is a (pipe|device)"):
        load_masks(path)


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["huge", "unpacked"])
def test_weights_are_about_as_many_as_the_model_takes(tmp_path, kind):
    path = tmp_path / ("w.pt" if kind == "unpacked" else "w.safetensors")
    if kind == "unpacked":
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as held,
            held.open("w/data.pkl", "w") as out,
        ):
            for _ in range(20):
                out.write(bytes(2**24))
    else:
        path.touch()
        os.truncate(path, 10 * 2**30)
    with little(2**28), pytest.raises(CheckpointError, match=r"the model has 58 numbers"):
        load_weights_(make(), path)


TOML = {
    "deep": "a = " + "[" * 5000 + "]" * 5000,
    "deep tables": "a = " + "{b = " * 3000 + "1" + "}" * 3000,
    "long": "#" * (2**20 + 1),
    "digits": "a = " + "1" * 5000,
}


@pytest.mark.parametrize("text", TOML.values(), ids=TOML)
def test_a_configuration_is_a_short_flat_file(tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    result = CliRunner().invoke(app, ["evaluate", "--config", str(tmp_path / "run.toml")])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    assert "ConfigError" in result.stderr


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_a_configuration_is_a_plain_file(tmp_path, kind):
    path = tmp_path / "run.toml"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with little(2**29):
        result = CliRunner().invoke(app, ["evaluate", "--config", str(path)])
    assert result.exit_code == 2
    assert "plain file" in " ".join(result.stderr.replace("│", " ").split())


def test_a_folder_of_many_files_is_not_looked_through(tmp_path, monkeypatch):
    for number in range(1500):
        (tmp_path / str(number)).touch()
    asked = []
    monkeypatch.setattr("apoptosis.cli.sources.is_checkpoint", asked.append)
    with pytest.raises(ConfigError, match="There is no checkpoint"):
        make_model(str(tmp_path / "none"))
    assert len(asked) <= 1001


def test_a_file_that_grows_is_read_to_its_limit(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(UnfitFileError, match="5 bytes, and at most 4"):
        read_file(path, 4)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path, 4)


def test_a_note_in_the_place_of_another_is_found_out(tmp_path):
    with open_journal(tmp_path / "notes", {"seed": 0}) as journal:
        journal.write("first", {"number": 1})
        journal.part("fit").write("state", {"epochs": []})
        (tmp_path / "notes" / "fit.state.note").replace(tmp_path / "notes" / "first.note")
        with pytest.raises(CheckpointError, match="first.note is damaged .*under another name"):
            journal.read("first")
