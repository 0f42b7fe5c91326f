import json
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from apoptosis.cli.app import app
from apoptosis.cli.sources import find_model, make_model
from apoptosis.errors import ConfigError
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


@pytest.fixture
def bert(tmp_path):
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | {"intermediate_size": 16}))
    return tmp_path


@pytest.mark.parametrize("name", ["digits_cnn", "timm:test_vit", "torchvision:resnet18", "bert"])
def test_the_python_that_is_shown_makes_the_same_network(name, bert):
    from oracles.library import define_torchvision_ops

    define_torchvision_ops()
    with torch.device("meta"):
        named = make_model(f"transformers:{bert}" if name == "bert" else name)
        names: dict = {}
        exec(f"{named.imports}\nmodel = ({named.maker})()", names)
    made: nn.Module = names["model"]
    assert type(made) is type(named.model)
    assert named.has_random_weights
    shapes = {key: item.shape for key, item in named.model.state_dict().items()}
    assert {key: item.shape for key, item in made.state_dict().items()} == shapes


@pytest.mark.parametrize(
    "config", ["{", "{}", '{"model_type": "bert", "architectures": ["NoSuchModel"]}']
)
def test_a_folder_that_transformers_cannot_use_is_refused(tmp_path, config):
    from oracles.library import define_torchvision_ops

    define_torchvision_ops()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="cannot make the model of .* Look at its config.json"):
        make_model(f"transformers:{tmp_path}")


@pytest.mark.parametrize("written", ["model.safetensors", "model.safetensors.index.json"])
def test_weights_of_a_transformers_folder_are_loaded(bert, tmp_path, written):
    from oracles.library import define_torchvision_ops

    define_torchvision_ops()
    trained = make_model(f"transformers:{bert}").model
    folder = tmp_path / "trained"
    sharded = {"max_shard_size": "3KB"} if "index" in written else {}
    trained.save_pretrained(folder, **sharded)
    assert (folder / written).is_file()
    named = make_model(f"transformers:{folder}")
    assert not named.has_random_weights
    torch.testing.assert_close(named.model.state_dict(), trained.state_dict(), rtol=0, atol=0)
    names: dict = {}
    exec(f"{named.imports}\nmodel = ({named.maker})()", names)
    torch.testing.assert_close(names["model"].state_dict(), trained.state_dict(), rtol=0, atol=0)
    with torch.device("meta"):
        meta = make_model(f"transformers:{folder}")
    assert all(parameter.is_meta for parameter in meta.model.parameters())


@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
def test_installing_a_library_keeps_the_torch_that_is_there(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError) as caught:
        make_model(f"{library}:any")
    assert str(caught.value).endswith(f"pip install {library} 'torch=={torch.__version__}'")


def test_misspelt_names_are_answered_with_the_nearest():
    from oracles.library import define_torchvision_ops

    define_torchvision_ops()
    with pytest.raises(ConfigError, match=r"Did you mean 'vit_base_patch16_224'\?"):
        make_model("timm:vit_bas_patch16_224")
    with pytest.raises(ConfigError, match=r"Did you mean 'resnet50'\?"):
        make_model("torchvision:resnet_50")
