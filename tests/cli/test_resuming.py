"""Runs that were stopped go on to the same end; others are refused."""

import json
import shlex
import tomllib

import pytest

from apoptosis.checkpoint import open_journal
from apoptosis.cli.app import app
from oracles.command_runs import (
    COMMANDS,
    RUN,
    SOURCE,
    done,
    files,
    listening,
    refused,
    stopped,
    words_of,
)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_stopped_run_goes_on_to_the_same_end(own, tmp_path, name):
    done(words_of(own, name, "--out", tmp_path / "whole"))
    result = stopped(own, name, "--out", tmp_path / "parts")
    line = result.stderr.splitlines()[-1].removeprefix("Go on: ")
    command = words_of(own, name)[0]
    folder = tmp_path / "parts.progress"
    code = f"{own}:make --data {own}:both"  # what a folder says of code is not believed
    assert line == f"apoptosis {command} {code} --config {folder / 'run.toml'} --resume"
    assert not (tmp_path / "parts").exists()
    done(shlex.split(line)[1:])
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    assert not folder.exists()


def test_the_same_command_goes_on_too_and_what_was_done_is_not_done_again(own, tmp_path):
    stopped(own, "train", "--out", tmp_path / "a")
    events = []
    with listening(events.append):
        data = json.loads(
            done(words_of(own, "train", "--out", tmp_path / "a", "--resume", "--json"))
        )
    assert len(data["training"]["epochs"]) == 6
    judged = [event for event in events if event.what == "evaluating" and event.done == 0]
    assert len(judged) == 2, "before and after: what was done is not judged again"


def test_a_run_goes_on_by_what_was_chosen_for_it_whatever_is_chosen_now(own, tmp_path, monkeypatch):
    done(words_of(own, "prune", "--out", tmp_path / "whole"))
    stopped(own, "prune", "--out", tmp_path / "parts")
    monkeypatch.setattr("apoptosis.workflow.pruning.choose_criterion", lambda *_, **__: "random")
    data = json.loads(
        done(words_of(own, "prune", "--out", tmp_path / "parts", "--resume", "--json"))
    )
    assert data["settings"]["criterion"] != "random"
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def test_a_stopped_run_is_not_begun_anew_unasked(own, tmp_path):
    out = tmp_path / "a"
    stopped(own, "prune", "--out", out)
    said = refused(words_of(own, "prune", "--out", out))
    said = said.replace(" ", "")
    line = f"apoptosisprune{own}:make--data{own}:both--config{out}.progress/run.toml--resume"
    assert f"Goonwithit:{line}" in said
    assert f"beginagain:rm-r{out}.progress" in said
    done(words_of(own, "prune", "--out", out, "--dry-run"))


def test_a_run_with_other_options_is_refused_with_the_differences(own, tmp_path):
    out = tmp_path / "a"
    stopped(own, "train", "--out", out)
    said = refused([*words_of(own, "train", "--out", out, "--resume"), "--seed", "3"])
    assert "other settings: seed 0 (now 3)" in said
    said = refused([*words_of(own, "finetune", "--out", out, "--resume")])
    assert 'command "train" (now "finetune")' in said


def test_a_second_process_is_refused(own, tmp_path):
    with open_journal(tmp_path / "a.progress", {}):
        said = refused(words_of(own, "train", "--out", tmp_path / "a"))
    assert "is working on" in said


def test_all_options_of_a_run_stand_in_its_file(own, tmp_path):
    stopped(own, "one-shot", "--out", tmp_path / "a", "--name", "*", "--samples", 20)
    found = tomllib.loads((tmp_path / "a.progress" / "run.toml").read_text())
    assert found["model"] == f"{own}:make"
    assert found["keep-params"] == [0.5]
    assert (found["samples"], found["name"], found["epochs"]) == (20, ["*"], 6)
    assert found["widths"] == "global", "defaults too: they may change with the version"
    assert {"resume", "json", "dry-run", "config"}.isdisjoint(found)


def test_nothing_stays_where_there_is_nothing_to_go_on_from(own, tmp_path, monkeypatch):
    def stop(event):
        raise KeyboardInterrupt

    with listening(stop):
        result = RUN.invoke(app, words_of(own, "train", "--out", tmp_path / "a"))
    assert result.exit_code == 130
    assert "Go on" not in result.stderr
    refused(words_of(own, "train", "--out", tmp_path / "a", "--learning-rate", 1e30))
    assert not list(tmp_path.iterdir()), "a training that diverges would diverge again"


def test_nothing_to_go_on_from_is_told_and_the_run_begins(own, tmp_path):
    result = RUN.invoke(app, words_of(own, "train", "--out", tmp_path / "new", "--resume"))
    assert result.exit_code == 0, result.stderr
    assert "this run begins anew" in " ".join(result.stderr.split())
    assert (tmp_path / "new" / "run.json").is_file()


def test_a_finished_run_is_not_gone_on_with(own, tmp_path):
    done(words_of(own, "train", "--out", tmp_path / "whole"))
    before = files(tmp_path / "whole")
    text = refused(words_of(own, "train", "--out", tmp_path / "whole", "--resume"))
    assert "that run is finished" in text
    assert files(tmp_path / "whole") == before


def test_another_network_at_the_same_place_is_not_gone_on_with(own, tmp_path):
    """Notes of pruning say who stays, not what the weights are."""
    path = tmp_path / "mine.py"
    path.write_text(own.read_text())
    stopped(path, "prune", "--out", tmp_path / "parts")
    # Of another length, too: Python takes a file of the same second and size for the one it has compiled.
    path.write_text(own.read_text().replace("torch.manual_seed(0)", "torch.manual_seed(11)"))
    text = refused(words_of(path, "prune", "--out", tmp_path / "parts", "--resume"))
    assert "weights at the start" in text


FAILING = """
from collections import Counter

passes = Counter()

class Failing(list):
    def __iter__(self):
        passes["n"] += 1
        for x, y in super().__iter__():
            yield (x * float("nan") if passes["n"] > AFTER else x), y

def flaky():
    scoring, test = both()
    return {"scoring": scoring, "training": Failing(scoring), "evaluation": test}
"""


def test_rounds_that_were_done_stay_when_a_later_one_fails(own, tmp_path):
    path = tmp_path / "flaky_net.py"
    path.write_text(own.read_text() + FAILING.replace("AFTER", "9"))
    words = ["prune", f"{path}:make", "--data", f"{path}:flaky", "--keep-params", "0.7,0.4"]
    more = ["--steps", "2", "--epochs", "6", "--out", str(tmp_path / "out")]
    text = refused([*words, *more])
    assert "Round 2: The training loss became nan" in text
    told = f"What came before is saved: {tmp_path / 'out-params0.7'}"
    assert "".join(told.split()) in "".join(text.split())  # long paths are folded
    assert (tmp_path / "out-params0.7" / "run.json").is_file()
    assert not (tmp_path / "out").exists()


def test_a_note_that_does_not_fit_says_how_to_go_on(own, tmp_path, monkeypatch):
    written = []

    def filling(file, data):
        written.append(file)
        if len(written) > 3:
            raise OSError(28, "No space left on device")
        file.write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr("apoptosis.checkpoint.journal._write", filling)
        result = RUN.invoke(app, words_of(own, "rounds", "--out", tmp_path / "a"))
    assert result.exit_code == 1, result.output
    assert "CheckpointError" in result.stderr
    line = result.stderr.splitlines()[-1].removeprefix("Go on: ")
    done(shlex.split(line)[1:])


def test_damaged_notes_are_nothing_to_go_on_with(own, tmp_path):
    stopped(own, "train", "--out", tmp_path / "a")
    for note in (tmp_path / "a.progress").glob("*.note"):
        note.write_bytes(note.read_bytes()[:-4])
    said = refused(words_of(own, "train", "--out", tmp_path / "a", "--resume"))
    assert "is damaged" in said
    assert "Go on" not in said
