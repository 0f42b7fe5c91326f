import json

import pytest

from apoptosis.checkpoint import write_file, write_json


def test_a_file_gets_its_name_only_when_it_is_whole(tmp_path):
    target = tmp_path / "deep" / "result.txt"

    def write(file):
        assert file != target
        assert not target.exists()
        file.write_text("whole")

    assert write_file(target, write) == target
    assert target.read_text() == "whole"
    assert [p.name for p in target.parent.iterdir()] == ["result.txt"]


def test_a_failure_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "result.txt"
    target.write_text("old")

    def write(file):
        file.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_file(target, write)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_others_may_read_a_result(tmp_path):
    target = write_json(tmp_path / "a.json", {"x": 1})
    assert target.stat().st_mode & 0o044 == 0o044
    assert json.loads(target.read_text()) == {"x": 1}


def test_nan_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_with_the_name_that_was_asked_for(tmp_path):
    def full(file):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left on device: '.*result.txt'") as caught:
        write_file(tmp_path / "result.txt", full)
    assert caught.value.filename == str(tmp_path / "result.txt")
