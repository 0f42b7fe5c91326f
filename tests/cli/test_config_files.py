import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from apoptosis.cli.app import app
from apoptosis.cli.config_files import as_toml

RUN = CliRunner()


def written(tmp_path, text: str) -> str:
    (tmp_path / "run.toml").write_text(text)
    return str(tmp_path / "run.toml")


def dry(path: str, *words: str) -> dict:
    result = RUN.invoke(app, ["prune", "--config", path, "--dry-run", "--json", *words])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(path: str, *words: str, command: str = "prune") -> str:
    result = RUN.invoke(app, [command, "--config", path, *words])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 24, "one screen"
    return " ".join(result.stderr.replace("│", " ").split())


def test_a_file_gives_model_and_options_and_what_is_typed_wins(tmp_path):
    path = written(
        tmp_path,
        """
        model = "mlp"
        data = "digits"
        steps = 9
        [prune]
        keep-params = 0.5
        steps = 2
        name = ["net.*"]
        [score]
        top = 3
        """,
    )
    result = RUN.invoke(app, ["prune", "--config", path, "digits_cnn", "--json", "--dry-run"])
    assert result.exit_code != 0, "names of the file are used: digits_cnn has no groups net.*"
    found = dry(path, "digits_cnn", "--name", "*", "--keep-flops", "0.4")
    assert found["model"] == "digits_cnn"
    assert found["steps"] == 2, "the command's table comes before the top"
    assert found["asked"] == {"flops": 0.4, "params": 0.5}


def test_underscores_are_dashes_and_a_list_may_be_one(tmp_path):
    path = written(
        tmp_path,
        'model = "digits_cnn"\ndata = "digits"\nkeep_flops = 0.5\nname = "*"\ndry-run = true\njson = true\n',
    )
    result = RUN.invoke(app, ["prune", "--config", path])
    assert json.loads(result.stdout)["asked"] == {"flops": 0.5}


def test_kinds_of_pruning_are_told_apart_in_a_file_too(tmp_path):
    path = written(
        tmp_path, 'model = "digits_cnn"\ndata = "digits"\nunstructured = true\nkeep = 0.2\n'
    )
    assert dry(path)["kind"] == "weights"


def test_unknown_keys_are_answered_with_the_nearest(tmp_path):
    said = refused(written(tmp_path, "keep-flop = 0.5"))
    assert "ConfigError" in said
    assert "has no option 'keep-flop'. Did you mean 'keep-flops'?" in said
    said = refused(written(tmp_path, "floor = 2"), command="score")
    assert "It is one of prune: write it below [prune]" in said
    assert "no option 'config'" in refused(written(tmp_path, 'config = "other.toml"'))


def test_tables_of_no_command_are_answered_with_the_nearest(tmp_path):
    said = refused(written(tmp_path, "[prnue]\nsteps = 2"))
    assert "no command for the table [prnue]. Did you mean 'prune'? Tables are" in said
    said = refused(written(tmp_path, "prune = 3"))
    assert "prune is a command, so a table is meant: write [prune]" in said


@pytest.mark.parametrize("place", ["", "[prune]\n"])
def test_an_option_that_stands_twice_is_refused(tmp_path, place):
    said = refused(written(tmp_path, f"{place}keep-flops = 0.5\nkeep_flops = 0.25"))
    assert "'keep-flops' and 'keep_flops' are one option. Keep one" in said


@pytest.mark.parametrize("words", [("keep-flops", "keep_flops"), ("keep_flops", "keep-flops")])
def test_a_table_comes_before_the_top_however_it_is_written(tmp_path, words):
    top, below = words
    text = f'model = "digits_cnn"\ndata = "digits"\n{top} = 0.5\n[prune]\n{below} = 0.4'
    assert dry(written(tmp_path, text))["asked"] == {"flops": 0.4}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('steps = "two"', "is a text, and steps takes a whole number"),
        ("steps = true", "is a truth value, and steps takes a whole number"),
        ("data = 3", "is a number, and data takes a text in quotes"),
        ("dry-run = 1", "is a number, and dry-run takes true or false"),
        ('keep-units = ["a"]', "and keep-units takes a number"),
        ("name = [1]", "is a list, and name takes a text in quotes, or a list of these"),
        ("data = { a = 1 }", "is a table, and data takes a text"),
        ("seed = 2024-01-01", "seed = 2024-01-01 is a date, and seed takes a whole number"),
    ],
)
def test_wrong_kinds_of_values_are_named_with_their_key(tmp_path, line, told):
    assert told in refused(written(tmp_path, line))


def test_wrong_values_are_answered_as_typed_ones(tmp_path):
    said = refused(written(tmp_path, 'model = "mlp"\ndata = "digits"\nsteps = 0'))
    assert "--steps" in said


def test_files_that_cannot_be_read_are_one_screen(tmp_path):
    assert "No such file" in refused(str(tmp_path / "none.toml"))
    assert "Is a directory" in refused(str(tmp_path))
    assert "is no TOML" in refused(written(tmp_path, "steps: 3"))
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    assert "UTF-8" in refused(str(tmp_path / "run.toml"))


def test_nothing_of_it_waits_for_torch(tmp_path):
    program = f"""
import sys
from typer.testing import CliRunner
from apoptosis.cli.app import app
for words in (["--config", {written(tmp_path, "keep-flop = 1")!r}], ["--keep-flop", "1"], ["--steps", "x"], []):
    assert CliRunner().invoke(app, ["prune", *words]).exit_code == 2
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_is_written_is_read_again():
    values = {
        "a": 'quote " and \\ and\nnewline and ü',
        "b": [0.1, 1e-12],
        "c": True,
        "d": Path("x/y"),
        "e": 3,
        "none": None,
    }
    found = tomllib.loads(as_toml(values))
    assert found == {"a": values["a"], "b": [0.1, 1e-12], "c": True, "d": "x/y", "e": 3}
