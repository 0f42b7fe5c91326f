"""A journal touches what it wrote itself: other files are refused before work, and stay byte for byte."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from apoptosis.checkpoint import has_notes, open_journal
from apoptosis.errors import CheckpointError, ConfigError

SETTINGS = {"seed": 0}


def a_tensor_file(path: Path) -> None:
    save_file({"weight": torch.ones(2)}, path)


OTHERS = {
    "settings.json": lambda path: path.write_text('{"theme": "dark"}'),
    "results.json": lambda path: path.write_text('{"accuracy": 0.9}'),
    "experiment.toml": lambda path: path.write_text("seed = 1\n"),
    "run.toml": lambda path: path.write_text("model = 'mine'\n"),
    "lock": lambda path: path.write_text("4711"),
    "thoughts.note": lambda path: path.write_text("buy milk"),
    "empty.note": lambda path: path.write_bytes(b""),
    "weights.note": a_tensor_file,
    ".thoughts-abc.note": lambda path: path.write_text("half a thought"),
    "runs.note": lambda path: path.mkdir(),
    "thesis.tex": lambda path: path.write_text("years of work"),
}


def contents(folder: Path) -> dict[str, bytes | None]:
    return {p.name: p.read_bytes() if p.is_file() else None for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_with_a_file_of_somebody_else_is_refused_and_left_as_it_was(
    tmp_path, name, resume
):
    OTHERS[name](tmp_path / name)
    before = contents(tmp_path)
    with (
        pytest.raises(CheckpointError, match="(?s)no folder of notes.*another place") as caught,
        open_journal(tmp_path, SETTINGS, resume=resume),
    ):
        pass
    assert name in str(caught.value)
    assert contents(tmp_path) == before
    with pytest.raises(CheckpointError, match="no folder of notes"):
        has_notes(tmp_path)


@pytest.mark.parametrize("name", OTHERS)
def test_what_somebody_puts_into_an_open_journal_stays_when_it_is_removed(tmp_path, name):
    place = tmp_path / "run"
    with open_journal(place, SETTINGS) as journal:
        journal.write("step", {"number": 1})
        journal.write_toml("run.toml", "seed = 0\n")
        if (place / name).exists():
            (place / name).unlink()
        OTHERS[name](place / name)
        before = contents(place)[name]
        journal.remove()
    assert contents(place) == {name: before}


def test_a_note_does_not_take_the_place_of_a_file_of_somebody_else(tmp_path):
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        OTHERS["thoughts.note"](tmp_path / "run" / "step.note")
        with pytest.raises(CheckpointError, match=r"step\.note.*not written by"):
            journal.write("step", {})
    assert (tmp_path / "run" / "step.note").read_text() == "buy milk"


@pytest.mark.parametrize("name", ["settings.json", "apoptosis.lock", "step.note", "run.toml"])
def test_links_are_not_followed(tmp_path, name):
    """Writing through one would change a file elsewhere, whatever it is called here."""
    with open_journal(tmp_path / "other", SETTINGS) as journal:
        journal.write("step", {})
        journal.write_toml("run.toml", "seed = 0\n")
    away, place = tmp_path / "other" / name, tmp_path / "run"
    place.mkdir()
    try:
        (place / name).symlink_to(away)
    except OSError:
        pytest.skip("no links here")
    before = away.read_bytes()
    with (
        pytest.raises(CheckpointError, match="no folder of notes"),
        open_journal(place, SETTINGS, resume=True),
    ):
        pass
    assert (place / name).is_symlink()
    assert away.read_bytes() == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "settings.json")
    with pytest.raises(CheckpointError, match="no folder of notes"), open_journal(tmp_path, {}):
        pass


def test_a_folder_that_was_there_stays(tmp_path, monkeypatch):
    """It may be a mount, somebody's home, or where a shell is."""
    monkeypatch.chdir(tmp_path)
    for life in range(2):
        with open_journal(".", SETTINGS, resume=life > 0) as journal:
            journal.write("step", {})
    with open_journal(".", SETTINGS, resume=True) as journal:
        journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_run_made_goes_with_its_notes_in_a_later_process_too(tmp_path):
    for life in range(3):
        with open_journal(tmp_path / "run", SETTINGS, resume=life > 0) as journal:
            journal.write("step", {})
    with open_journal(tmp_path / "run", SETTINGS, resume=True) as journal:
        journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_within_is_not_entered(tmp_path):
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        journal.write("step", {})
        with open_journal(tmp_path / "run" / "inner", SETTINGS) as inner:
            inner.write("step", {})
        journal.remove()
    assert has_notes(tmp_path / "run" / "inner")


def test_leftovers_of_any_writer_that_was_killed_are_in_nobodys_way(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def dying(*_, **__):
        raise Killed

    for write in (
        lambda journal: journal.write("step", {}),
        lambda journal: journal.write_toml("run.toml", "seed = 0\n"),
    ):
        with (
            open_journal(tmp_path / "run", SETTINGS, resume=True) as journal,
            monkeypatch.context() as patch,
        ):
            patch.setattr(Path, "replace", dying)
            patch.setattr(Path, "unlink", dying)
            with pytest.raises(Killed):
                write(journal)
    with open_journal(tmp_path / "run", SETTINGS, resume=True) as journal:
        assert not list(journal.folder.glob(".*"))
        journal.remove()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wrong", [[1, 2], "seed", None, {"seed": object()}, {"x": float("nan")}])
def test_settings_that_are_no_plain_values_are_refused(tmp_path, wrong):
    with (
        pytest.raises(ConfigError, match="settings of a journal"),
        open_journal(tmp_path / "run", wrong),
    ):
        pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["[1]", "7", '{"apoptosis journal": 1, "settings": [1]}'])
def test_settings_that_are_no_object_are_refused(tmp_path, text):
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        journal.write("step", {})
    (tmp_path / "run" / "settings.json").write_text(text)
    with (
        pytest.raises(CheckpointError, match=r"settings\.json"),
        open_journal(tmp_path / "run", SETTINGS, resume=True),
    ):
        pass
    assert (tmp_path / "run" / "step.note").exists()
    assert json.loads((tmp_path / "run" / "settings.json").read_text()) == json.loads(text)
