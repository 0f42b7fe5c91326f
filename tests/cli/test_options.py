import subprocess
import sys

import pytest
from typer.testing import CliRunner

from apoptosis.cli.app import app
from apoptosis.cli.options import MODEL_NAMES
from apoptosis.criteria import AGGREGATIONS
from apoptosis.models import MODELS
from apoptosis.workflow import DEFAULT_CRITERION, DEFAULT_STEPS, DEFAULT_WEIGHT_CRITERION

HELP = """
import sys
from typer.testing import CliRunner
from apoptosis.cli.app import app
for command in ([], ["prune"], ["score"], ["inspect"]):
    assert CliRunner().invoke(app, [*command, "--help"]).exit_code == 0
sys.exit("torch" in sys.modules)
"""


def shown(command: str) -> str:
    text = CliRunner().invoke(app, [command, "--help"]).output
    return " ".join(text.replace("│", " ").split())


def test_models_in_the_help_are_those_of_the_table():
    assert tuple(MODELS) == MODEL_NAMES


@pytest.mark.parametrize("command", ["inspect", "score", "prune"])
def test_help_lists_every_model_and_teaches_with_examples(command):
    text = shown(command)
    for name in MODEL_NAMES:
        assert name in text
    assert f"apoptosis {command} " in text


def test_help_tells_the_choices_and_defaults_of_the_library():
    text = shown("prune")
    assert ", ".join(AGGREGATIONS) in text
    told = f"{DEFAULT_CRITERION} for units and {DEFAULT_WEIGHT_CRITERION} for weights"
    assert told in text
    assert f"[default: {DEFAULT_STEPS}]" in text


def test_help_does_not_wait_for_torch():
    subprocess.run([sys.executable, "-c", HELP], check=True)
