import subprocess
import sys

import pytest
from typer.testing import CliRunner

import apoptosis.cli.demo
from apoptosis import __version__
from apoptosis.cli.app import app, main
from apoptosis.criteria import CRITERIA
from apoptosis.errors import DataError

RUN = CliRunner()


def failing_demo(monkeypatch, error: BaseException, *arguments: str):
    def run_demo(options):
        raise error

    monkeypatch.setattr(apoptosis.cli.demo, "run_demo", run_demo)
    return RUN.invoke(app, [*arguments, "demo"])


def test_help_teaches_with_examples():
    shown = RUN.invoke(app, ["--help"])
    assert shown.exit_code == 0
    for example in ("apoptosis demo ", "apoptosis demo --seed 1", "apoptosis criteria"):
        assert example in shown.output


def test_version_is_shown():
    shown = RUN.invoke(app, ["--version"])
    assert (shown.exit_code, shown.output.strip()) == (0, f"apoptosis {__version__}")


def test_criteria_lists_every_entry_of_the_table():
    shown = RUN.invoke(app, ["criteria"])
    assert shown.exit_code == 0
    words = shown.output.split()
    for name, criterion in CRITERIA.items():
        assert name in words
        assert criterion.summary.split()[0] in words


def test_a_refusal_shows_cause_and_remedy_without_a_traceback(monkeypatch):
    failed = failing_demo(monkeypatch, DataError("The cause. The remedy."))
    assert failed.exit_code == 1
    assert "DataError" in failed.stderr
    assert "The cause. The remedy." in failed.stderr
    assert "Traceback" not in failed.stderr
    assert failed.stdout == ""


def test_debug_shows_the_traceback_as_well(monkeypatch):
    failed = failing_demo(monkeypatch, DataError("The cause."), "--debug")
    assert failed.exit_code == 1
    assert "Traceback" in failed.stderr
    assert "The cause." in failed.stderr


def test_a_bug_is_not_dressed_up_as_a_refusal(monkeypatch):
    failed = failing_demo(monkeypatch, ZeroDivisionError("a bug"))
    assert isinstance(failed.exception, ZeroDivisionError)


def test_ctrl_c_exits_130_with_a_line(monkeypatch):
    failed = failing_demo(monkeypatch, KeyboardInterrupt())
    assert failed.exit_code == 130
    assert failed.stderr.startswith("Stopped.")


def test_ctrl_c_outside_a_command_exits_130_too(monkeypatch, capsys):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("apoptosis.cli.app.app", interrupted)
    with pytest.raises(SystemExit, match="130"):
        main()
    assert capsys.readouterr().err.startswith("Stopped.")


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["demo", "--epochs", "0"],
        ["demo", "--no-such-option"],
        ["demo", "--seed", str(2**64)],
        ["score", "digits_cnn", "--data", "digits", "--seed", str(2**64)],
    ],
)
def test_wrong_usage_exits_2(arguments):
    assert RUN.invoke(app, arguments).exit_code == 2


def test_the_module_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "apoptosis", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"apoptosis {__version__}"


def test_what_the_system_says_comes_with_its_place_and_a_remedy(monkeypatch):
    failed = failing_demo(monkeypatch, PermissionError(13, "Permission denied", "demo/a.png"))
    assert failed.exit_code == 1
    said = " ".join(failed.stderr.replace("│", " ").split())
    assert "demo/a.png: Permission denied. Give a place that you may use" in said
    assert "Errno" not in said
    failed = failing_demo(monkeypatch, OSError("their own words"))
    assert "their own words" in failed.stderr


def test_help_of_a_comparison_speaks_of_comparisons():
    shown = " ".join(RUN.invoke(app, ["compare", "--help"]).output.replace("│", " ").split())
    assert "Every pruned network is judged before" in shown
    assert "each stage of single weights" not in shown


def test_help_says_which_commands_read_a_file():
    assert "Every command but criteria takes" in RUN.invoke(app, ["--help"]).output
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        shown = RUN.invoke(app, [name, "--help"]).output
        assert ("--config" in shown) == (name != "criteria"), name
