import pytest
from typer.testing import CliRunner

from apoptosis.cli.app import app
from apoptosis.cli.sources import find_model
from apoptosis.models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_every_network_of_the_table_is_found_with_its_inputs(name):
    named = find_model(name, [], meta=True)
    (x,) = named.example_inputs
    assert tuple(x.shape) == MODELS[name].input_shape
    assert x.is_meta
    assert all(parameter.is_meta for parameter in named.model.parameters())


def test_a_network_is_inspected_by_its_name():
    result = CliRunner().invoke(app, ["inspect", "resnet20_narrow"])
    assert result.exit_code == 0, result.stderr
    assert "40.6 M MACs" in result.stdout
