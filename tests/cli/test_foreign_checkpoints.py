"""Somebody else's checkpoints, folders of notes and configurations: nothing in them decides what code is run."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import apoptosis as ap
from apoptosis.checkpoint import load_outcome
from apoptosis.cli.app import app
from apoptosis.cli.sources import make_model
from apoptosis.errors import CheckpointError, ConfigError
from apoptosis.models import digits_cnn
from apoptosis.records import Outcome

RUN = CliRunner()

EVIL = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
from torch import nn

def make():
    Path(__file__).with_name("called").touch()
    return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))

def batches():
    make()
    import torch
    return [(torch.randn(4, 64), torch.randint(10, (4,)))]
"""


def save_as(folder, origin, model=None, example=None):
    """A checkpoint of a flat network of the digits that says it was made from `origin`."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    example = torch.zeros(1, 64) if example is None else example
    plan = ap.trace(model, example).identity()
    ap.save(folder, Outcome(model, plan, settings={"subject": {"model": origin}}))
    return folder


def said_by(*words):
    result = RUN.invoke(app, [*map(str, words)])
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ck").mkdir()
    (tmp_path / "evil.py").write_text(EVIL)
    return tmp_path


def traces(folder):
    """What code that ran has left."""
    return [path for path in folder.rglob("*") if path.name in ("imported", "called")]


NAMES = {
    "a file in it": "ck/evil.py:make",
    "a file elsewhere": "evil.py:make",
    "an absolute path": "{here}/evil.py:make",
    "a module": "evil:make",
    "a function of Python": "os:abort",
    "one that hangs": "builtins:input",
    "a program": "subprocess:getoutput",
    "transformers": "transformers:ck",
    "the hub of timm": "timm:hf-hub:evil/net",
    "a folder by timm": "timm:local-dir:ck",
    "a path by timm": "timm:../ck/resnet18",
    "a tag of timm": "timm:resnet18.a1_in1k/../x",
    "a path by torchvision": "torchvision:../ck",
    "no name": "",
    "a line break": "evil.py:make\n\x1b[2Jfoo",
}


@pytest.mark.parametrize("origin", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("word", ["evaluate", "inspect", "prune", "finetune", "score", "--teacher"])
def test_what_a_checkpoint_names_is_not_run(here, origin, word):
    (here / "evil.py").rename(here / "ck" / "evil.py") if "ck/" in origin else None
    save_as(here / "run", origin.format(here=here))
    words = {
        "inspect": ["inspect", "run"],
        "prune": ["prune", "run", "--data", "digits", "--keep-flops", "0.5", "--dry-run"],
        "finetune": ["finetune", "run", "--data", "digits", "--dry-run"],
        "--teacher": ["finetune", "digits_cnn", "--data", "digits", "--distil", "0.5"]
        + ["--teacher", "run", "--dry-run"],
    }.get(word, [word, "run", "--data", "digits"])
    said = said_by(*words)
    assert not traces(here)
    assert "\x1b[2J" not in said
    if origin.endswith("py:make"):
        assert "--dense " in said


def test_what_is_to_be_typed_is_shown_and_works(here):
    save_as(here / "run", "evil.py:make")
    result = RUN.invoke(app, ["evaluate", "run", "--data", "evil.py:batches"])
    assert result.exit_code == 1
    line = "apoptosis evaluate run --data evil.py:batches --dense evil.py:make"
    assert line in result.stderr.splitlines()[-1]
    words = line.split()[1:]
    assert RUN.invoke(app, words).exit_code == 0
    assert traces(here)


def test_a_word_for_one_function_is_none_for_another(here):
    save_as(here / "run", "evil.py:make")
    (here / "mine.py").write_text(EVIL)
    for other in ("mine.py:make", "evil.py:batches", "evil:make"):
        assert f"and not {other}" in said_by("inspect", "run", "--dense", other)
    assert not traces(here)


def test_a_file_that_has_moved_is_known_by_its_name(here):
    save_as(here / "run", "/home/somebody/nets/evil.py:make")
    (here / "sub").mkdir()
    (here / "evil.py").rename(here / "sub" / "evil.py")
    named = make_model("run", dense=["sub/evil.py:make"])
    assert named.name == "sub/evil.py:make"


def test_names_of_our_own_table_need_no_word(here):
    save_as(here / "run", "digits_cnn", digits_cnn(), torch.zeros(1, 1, 8, 8))
    assert make_model("run").name == "digits_cnn"


def test_networks_of_libraries_need_no_word_and_no_network(here, monkeypatch):
    from oracles.library import define_torchvision_ops

    define_torchvision_ops()
    import timm
    import torchvision

    def no_download(*_, **__):
        raise AssertionError("something was to be fetched")

    monkeypatch.setattr(torch.hub, "download_url_to_file", no_download)
    nets = {
        "timm:test_vit": (timm.create_model("test_vit"), torch.zeros(1, 3, 160, 160)),
        "torchvision:lraspp_mobilenet_v3_large": (
            torchvision.models.get_model(
                "lraspp_mobilenet_v3_large", weights=None, weights_backbone=None
            ),
            torch.zeros(1, 3, 64, 64),
        ),
    }
    for place, (origin, (net, example)) in enumerate(nets.items()):
        save_as(here / f"run{place}", origin, net.eval(), example)
        assert make_model(f"run{place}").name == origin


def test_masks_on_a_cut_need_the_word_of_the_cut(here):
    base = save_as(here / "base", "evil.py:make")
    save_as(here / "run", str(base))
    with pytest.raises(CheckpointError, match="--dense evil.py:make"):
        make_model("run")
    assert not traces(here)
    assert make_model("run", dense=["evil.py:make"]).name == str(base)


def test_checkpoints_that_name_each_other_are_refused(here):
    save_as(here / "one", "two")
    save_as(here / "two", "one")
    save_as(here / "self", "self")
    for name in ("one", "two", "self"):
        with pytest.raises(CheckpointError, match="made from itself"):
            make_model(name)


def test_a_configuration_of_transformers_brings_no_code(here):
    from oracles.library import define_torchvision_ops

    define_torchvision_ops()
    (here / "ck" / "modeling.py").write_text(EVIL + "class Net(nn.Module):\n    pass\n")
    config = {"model_type": "evil", "architectures": ["Net"]}
    config["auto_map"] = {"AutoConfig": "modeling.Net", "AutoModel": "modeling.Net"}
    (here / "ck" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="cannot make the model"):
        make_model("transformers:ck")
    assert not traces(here)
    assert not any((here / "ck").rglob("*.pyc"))


@pytest.mark.parametrize("architecture", ["pipeline", "Trainer", "set_seed", "PreTrainedModel"])
def test_an_architecture_is_a_model_of_transformers(here, architecture):
    from oracles.library import define_torchvision_ops

    define_torchvision_ops()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    config = {"model_type": "bert", "architectures": [architecture], **sizes}
    (here / "ck" / "config.json").write_text(json.dumps(config | {"intermediate_size": 16}))
    with pytest.raises(ConfigError, match="Look at its config.json"):
        make_model("transformers:ck")


def test_a_configuration_of_transformers_fetches_nothing(here):
    from oracles.library import define_torchvision_ops

    define_torchvision_ops()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    config = {"model_type": "bert", "architectures": ["BertModel"], **sizes}
    config |= {"intermediate_size": 16, "attn_implementation": "evil/kernel"}
    (here / "ck" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="evil/kernel"):
        make_model("transformers:ck")


# -- configurations and notes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", ["run.json", "settings.json", "step.note"])
@pytest.mark.parametrize("key", ["model", "data", "dense"])
def test_a_configuration_in_a_folder_of_ours_names_no_code(here, beside, key):
    (here / "ck" / beside).write_text("{}")
    values = {"model": "digits_cnn", "data": "digits", "keep-flops": 0.5, "out": "new"}
    values[key] = "evil.py:make"
    lines = [f"{own} = {json.dumps(value)}" for own, value in values.items()]
    (here / "ck" / "run.toml").write_text("\n".join(lines))
    said = said_by("prune", "--config", "ck/run.toml")
    assert "evil.py:make" in said
    assert "typed" in said
    assert not traces(here)


def test_the_same_words_typed_are_those_of_a_person(here):
    (here / "ck" / "settings.json").write_text("{}")
    (here / "ck" / "run.toml").write_text('model = "evil.py:make"\ndata = "evil.py:batches"\n')
    words = ["evaluate", "--config", "ck/run.toml"]
    said = RUN.invoke(app, words).stderr
    line = next(own for own in said.splitlines() if "apoptosis evaluate" in own)
    words = line[line.index("apoptosis evaluate") :].split()[1:]
    assert {"evil.py:make", "evil.py:batches", "ck/run.toml"} <= set(words)
    result = RUN.invoke(app, words)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("model", "data"), [("digits_cnn", "timm:batches"), ("whole:make", "digits")]
)
def test_prefixes_of_models_are_no_pass_for_data_nor_the_other_way_round(here, model, data):
    """Each option reads names in its own way: what one takes from a library is a file here for the other."""
    for name in ("timm.py", "whole.py"):
        (here / name).write_text("open('imported', 'w')")
    (here / "ck" / "settings.json").write_text("{}")
    (here / "ck" / "run.toml").write_text(f'model = ["{model}"]\ndata = "{data}"\n')
    assert "names code" in said_by("evaluate", "--config", "ck/run.toml")
    assert not traces(here)


def test_a_configuration_of_ones_own_names_code(here):
    (here / "run.toml").write_text('model = ["evil.py:make"]\ndata = "evil.py:batches"\n')
    result = RUN.invoke(app, ["evaluate", "--config", "run.toml"])
    assert result.exit_code == 0, result.output


def test_files_of_the_current_folder_are_not_imported_as_libraries(here):
    (here / "typer.py").write_text("open('imported', 'w')")
    words = [sys.executable, "-m", "apoptosis", "--version"]
    done = subprocess.run(words, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not traces(here)


def test_a_record_names_number_types_alone(here, monkeypatch):
    """Names of types in a record are looked up in a table; torch imports modules by the names it is asked for."""
    path = save_as(here / "run", "digits_cnn", digits_cnn(), torch.zeros(1, 1, 8, 8)) / "run.json"
    content = json.loads(path.read_text())
    content["other_dtypes"] = dict.fromkeys(digits_cnn().state_dict(), "some_module")
    for tensor in content["tensors"]:
        content["other_dtypes"].update(dict.fromkeys(tensor["names"], "some_module"))
    content["example"] = {"tensor": [1], "dtype": "some_module"}
    del content["checksum"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(content))
    asked, look_up = [], torch.__getattr__
    monkeypatch.setattr(torch, "__getattr__", lambda name: asked.append(name) or look_up(name))
    ap.load(here / "run", digits_cnn)
    load_outcome(here / "run", digits_cnn)
    assert "some_module" not in asked
