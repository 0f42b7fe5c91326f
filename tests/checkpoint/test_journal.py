"""Notes of a run: they come back as they were, or are refused in words; nobody shares them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from apoptosis.checkpoint import open_journal
from apoptosis.checkpoint.journal import NOTES_SHARE
from apoptosis.errors import CheckpointError

SETTINGS = {"seed": 0, "model": "resnet20"}
TENSORS = {
    "half": torch.randn(3, 2).half(),
    "brain": torch.randn(4).bfloat16(),
    "double": torch.randn(2, 2, dtype=torch.float64),
    "none": torch.zeros(0, 5),
    "one": torch.tensor(7),
    "truth": torch.tensor([True, False]),
    "turned": torch.randn(2, 3).t(),
    "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
}


def test_notes_come_back_as_they_were(tmp_path):
    facts = {"number": 3, "names": ["a", "b"], "loss": 0.1 + 0.2, "nothing": None}
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        journal.write("step", facts, TENSORS)
        journal.part("fit").write("step", {"other": True})
    with open_journal(tmp_path / "run", SETTINGS, resume=True) as journal:
        note = journal.read("step")
        assert note is not None
        assert note.facts == facts
        assert note.tensors.keys() == TENSORS.keys()
        for name, own in TENSORS.items():
            assert note.tensors[name].dtype == own.dtype
            assert note.tensors[name].shape == own.shape
            as_bytes = [
                t.contiguous().reshape(-1).view(torch.uint8) for t in (own, note.tensors[name])
            ]
            assert torch.equal(*as_bytes), name
        assert journal.part("fit").read("step").facts == {"other": True}
        assert journal.part("fit").read("none") is None


def test_a_later_note_takes_the_place_of_the_last(tmp_path):
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        for number in range(3):
            journal.write("step", {"number": number})
        assert journal.read("step").facts == {"number": 2}
        assert len(list(journal.folder.glob("*.note"))) == 1


def test_tensors_that_share_memory_are_kept_apart(tmp_path):
    base = torch.arange(6.0)
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        journal.write("step", {}, {"all": base, "part": base[:3], "again": base})
        found = journal.read("step").tensors
    assert torch.equal(found["all"], base)
    assert torch.equal(found["part"], base[:3])
    assert torch.equal(found["again"], base)


def test_a_stopped_run_is_not_begun_again_by_mistake(tmp_path):
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        journal.write("step", {})
    with (
        pytest.raises(CheckpointError, match=r"was stopped.*resume.*remove the folder"),
        open_journal(tmp_path / "run", SETTINGS),
    ):
        pass
    with open_journal(tmp_path / "run", SETTINGS, resume=True) as journal:
        assert journal.read("step") is not None


def test_what_had_not_begun_may_begin(tmp_path):
    with open_journal(tmp_path / "run", SETTINGS):
        pass
    with open_journal(tmp_path / "run", {"seed": 1}) as journal:
        assert journal.read("step") is None
        held = json.loads((tmp_path / "run" / "settings.json").read_text())
        assert held == {"apoptosis journal": 1, "settings": {"seed": 1}}


def test_other_settings_are_named(tmp_path):
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        journal.write("step", {})
    with (
        pytest.raises(
            CheckpointError,
            match=r'model "resnet20" \(now "vgg"\), seed 0 \(now not said\), steps not said \(now 3\)',
        ),
        open_journal(tmp_path / "run", {"model": "vgg", "steps": 3}, resume=True),
    ):
        pass


@pytest.mark.parametrize("damage", ["cut short", "changed", "emptied", "other"])
def test_damaged_notes_are_refused(tmp_path, damage):
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        journal.write("step", {"number": 1}, {"t": torch.randn(50)})
        path = tmp_path / "run" / "step.note"
        data = bytearray(path.read_bytes())
        changed = bytearray(data)
        changed[-3] ^= 1
        texts = {"cut short": data[:-4], "changed": changed, "emptied": b"", "other": b"x" * 99}
        path.write_bytes(texts[damage])
        with pytest.raises(CheckpointError, match=r"step\.note is damaged.*begin again"):
            journal.read("step")


def test_settings_nobody_can_read_are_refused(tmp_path):
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        journal.write("step", {})
    (tmp_path / "run" / "settings.json").write_text("{")
    with (
        pytest.raises(CheckpointError, match="nobody knows what run"),
        open_journal(tmp_path / "run", SETTINGS, resume=True),
    ):
        pass


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis\.tex"), open_journal(tmp_path, SETTINGS):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"), open_journal(tmp_path / "file", {}):
        pass
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_nothing_is_left_of_a_run_that_is_done(tmp_path):
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        journal.write("step", {}, TENSORS)
        journal.write_toml("run.toml", "seed = 0\n")
        journal.remove()
    assert not (tmp_path / "run").exists()


def test_what_somebody_put_there_meanwhile_stays(tmp_path):
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        journal.write("step", {})
        (tmp_path / "run" / "thoughts.txt").write_text("keep")
        journal.remove()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thoughts.txt"]


def test_leftovers_of_a_killed_writer_are_cleared(tmp_path):
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        journal.write("step", {})
    (tmp_path / "run" / ".apoptosis-step-abc.note").write_bytes(b"half")
    with open_journal(tmp_path / "run", SETTINGS, resume=True):
        assert sorted(p.name for p in (tmp_path / "run").glob(".*")) == []


def test_a_full_disk_leaves_the_last_note(tmp_path, monkeypatch):
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        journal.write("step", {"number": 1})

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(
            CheckpointError, match=r"No space left.*Notes before.*make room.*resume"
        ):
            journal.write("step", {"number": 2})
        monkeypatch.undo()
        assert journal.read("step").facts == {"number": 1}
        assert list(journal.folder.glob(".*.note")) == []


def test_a_first_note_that_does_not_fit_promises_none_before_it(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        with pytest.raises(CheckpointError, match="none before it.*begin again") as caught:
            journal.write("step", {"number": 1})
        assert "resume" not in str(caught.value)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_place_is_said(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with (
            pytest.raises(CheckpointError, match="may be written to"),
            open_journal(tmp_path / "run", SETTINGS),
        ):
            pass
    finally:
        tmp_path.chmod(0o700)


def test_errors_inside_the_block_stay_what_they_are(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match="my data"),
        open_journal(tmp_path / "run", SETTINGS),
    ):
        raise FileNotFoundError("my data")


HOLDER = """
import sys, time
from apoptosis.checkpoint import open_journal
with open_journal(sys.argv[1], {}) as journal:
    journal.write("step", {})
    sys.stdout.write("held\\n")
    sys.stdout.flush()
    time.sleep(60)
"""


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks")
def test_a_second_process_is_refused_and_a_killed_one_is_in_nobodys_way(tmp_path):
    place = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with (
        pytest.raises(CheckpointError, match=f"Process {process.pid} is working on"),
        open_journal(place, {}, resume=True),
    ):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with open_journal(place, {}, resume=True) as journal:
        assert journal.read("step") is not None


def test_notes_that_may_be_left_out_take_a_small_share_of_the_time(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("apoptosis.checkpoint.journal.time.monotonic", lambda: now[0])
    with open_journal(tmp_path / "run", SETTINGS) as journal:
        assert journal.is_due(), "the first is always written"
        journal.write("step", {})
        journal._seconds = 1.0
        now[0] += 0.9 / NOTES_SHARE
        assert not journal.is_due()
        now[0] += 0.2 / NOTES_SHARE
        assert journal.is_due()


class Killed(BaseException):
    """As if the process had ended here."""


@pytest.mark.parametrize("moment", range(1, 6))
def test_killed_while_notes_are_removed_a_run_can_begin_or_go_on(tmp_path, monkeypatch, moment):
    """Settings go last: notes without them would be of nobody knows what."""
    place, seen, plain = tmp_path / "run", [], Path.unlink

    def unlink(path, missing_ok=False):
        seen.append(path.name)
        if len(seen) == moment:
            raise Killed
        plain(path, missing_ok=missing_ok)

    with open_journal(place, SETTINGS) as journal:
        for name in ("a", "b", "c"):
            journal.write(name, {})
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            with pytest.raises(Killed):
                journal.remove()
    with open_journal(place, SETTINGS, resume=True) as journal:
        journal.remove()
    assert not place.exists()
