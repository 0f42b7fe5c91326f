import subprocess
import sys
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from apoptosis.cli.app import app
from apoptosis.cli.options import MODEL_NAMES
from apoptosis.cli.training_options import Training
from apoptosis.criteria import AGGREGATIONS, CRITERIA
from apoptosis.models import MODELS
from apoptosis.workflow import (
    DEFAULT_CRITERION,
    DEFAULT_WEIGHT_CRITERION,
    FALLBACK_CRITERION,
)

HELP = """
import sys
from typer.testing import CliRunner
from apoptosis.cli.app import app
for command in ("", "demo", "train", "score", "prune", "finetune", "evaluate", "inspect", "compare"):
    assert CliRunner().invoke(app, [*filter(None, [command]), "--help"]).exit_code == 0
    if command:
        assert CliRunner().invoke(app, [command, "--no-such-option"]).exit_code == 2
assert CliRunner().invoke(app, ["train", "mlp", "--data", "digits", "--schedule", "cosin"]).exit_code == 2
sys.exit("torch" in sys.modules)
"""


def shown(command: str) -> str:
    text = CliRunner().invoke(app, [command, "--help"]).output
    return " ".join(text.replace("│", " ").split())


def test_models_in_the_help_are_those_of_the_table():
    assert tuple(MODELS) == MODEL_NAMES


@pytest.mark.parametrize(
    "command", ["inspect", "score", "prune", "train", "finetune", "evaluate", "compare"]
)
def test_help_lists_every_model_and_teaches_with_examples(command):
    text = shown(command)
    for name in MODEL_NAMES:
        assert name in text
    assert f"apoptosis {command} " in text


def test_help_tells_the_choices_and_defaults_of_the_library():
    text = shown("prune")
    assert ", ".join(AGGREGATIONS) in text
    told = f"{DEFAULT_CRITERION} for units ({FALLBACK_CRITERION} where that cannot be used)"
    assert f"{told} and {DEFAULT_WEIGHT_CRITERION} for weights" in text
    obs, others = CRITERIA[DEFAULT_CRITERION], CRITERIA[FALLBACK_CRITERION]
    assert (obs.steps, others.steps) == (1, 20)
    assert "unless said, once for obs and 20 times for others" in text
    assert obs.repair == ("refit", "refit_blocks")
    assert "Unless said, refit and refit_blocks after obs" in text


def test_help_and_answers_to_typos_do_not_wait_for_torch():
    subprocess.run([sys.executable, "-c", HELP], check=True)


def test_help_tells_the_exit_codes():
    text = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert "0 done, 1 refused, 2 typed wrongly, 130 stopped by Ctrl-C" in text


def test_every_command_that_trains_has_the_same_options_for_it():
    own = [field.name.replace("_", "-") for field in fields(Training)]
    for command in ("train", "finetune", "prune"):
        text = shown(command)
        for name in own:
            assert f"--{name} " in text or name == "training-batch-size"
    assert "--training-batch-size" in shown("prune")
