import json
import sys

import pytest
from typer.testing import CliRunner

from apoptosis.cli.app import app
from apoptosis.cli.sources import find_model
from apoptosis.errors import ConfigError

RUN = CliRunner()

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn

CALLS = []

@dataclass
class Width:
    of: int = 6

def with_inputs():
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    return net, torch.zeros(3, 4)

def without_inputs():
    return with_inputs()[0]

def keywords():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)
        def forward(self, *, x):
            return self.b(self.a(x).relu())
    return Named(), {"x": torch.zeros(3, 4)}

def words():
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.Linear(5, 2))

def nothing_to_cut():
    return nn.Linear(4, 2), torch.zeros(1, 4)

def no_model():
    return "a text"

def breaks():
    raise OSError("the disk is full")

def breaks_in_torch():
    return nn.Linear(4, "two")

def with_arguments(width, *sizes, depth=2, heads, **rest):
    return nn.Linear(width, heads), torch.zeros(1, width)

def with_defaults(width=4):
    return nn.Sequential(nn.Linear(width, Width().of), nn.Linear(6, 2)), torch.zeros(1, width)

def does_not_run():
    return nn.Linear(4, 2), torch.zeros(1, 5)
"""


LONG = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.the_first_projection_of_block = nn.Linear(8, 24)
        self.norm, self.second = nn.LayerNorm(24), nn.Linear(24, 16)
        self.third = nn.Linear(16, 2)

    def forward(self, x):
        y = self.second(self.norm(self.the_first_projection_of_block(x)))
        return self.third(torch.fft.fft(y).real)

def make():
    return Net(), torch.zeros(2, 8)
"""


@pytest.fixture
def nets(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(SOURCE)
    return path


def shown(*arguments: str) -> str:
    result = RUN.invoke(app, ["inspect", *arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def data(*arguments: str):
    return json.loads(shown(*arguments, "--json"))


def refused(*arguments: str) -> str:
    result = RUN.invoke(app, ["inspect", *arguments])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 24, "one screen"
    return " ".join(result.stderr.split())


def unboxed(text: str) -> str:
    """Without the frame and the places where lines break."""
    return text.replace(" ", "").replace("│", "")


def test_the_table_shows_groups_costs_and_what_stays(nets):
    text = shown(f"{nets}:with_inputs")
    for part in ("What can shrink", "MACs / unit", "parameters / unit", "What stays whole"):
        assert part in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    # Of unit 0: three rows times four inputs and six outputs; as many weights, a bias, and two of the norm.
    assert rows["0"] == ["0", "hidden", "*", "8", "30", "13", "5"]
    assert rows["2"] == ["2", "hidden", "6", "30", "11", "3"]
    assert "276 MACs for the example inputs" in " ".join(text.split())
    assert "inexact" in text
    assert "LayerNorm's statistics" in text.replace("\n", " ")


def test_json_holds_everything_and_nothing_else(nets):
    found = data(f"{nets}:with_inputs")
    assert found["macs"] == 3 * (4 * 8 + 8 * 6 + 6 * 2)
    assert found["params"] == 4 * 8 + 8 + 16 + 8 * 6 + 6 + 6 * 2 + 2
    first, second = found["groups"]
    assert (first["name"], first["exact"], first["units"]) == ("0", False, 8)
    assert "LayerNorm" in first["inexact_because"]
    assert (second["macs_per_unit"], second["params_per_unit"]) == (3 * (8 + 2), 8 + 1 + 2)
    assert {"tensor": "4.weight", "dim": 1, "role": "consumer"} in second["slices"]
    assert {pin["tensor"] for pin in found["pinned"]} >= {"0.weight", "4.weight"}
    assert len(found["fingerprint"]) == 16


def test_groups_are_chosen_by_kind_and_name(nets):
    assert [g["name"] for g in data(f"{nets}:with_inputs", "--name", "2")["groups"]] == ["2"]
    assert [g["name"] for g in data(f"{nets}:with_inputs", "--name", "!2")["groups"]] == ["0"]
    assert len(data(f"{nets}:with_inputs", "--kind", "hidden")["groups"]) == 2
    conv = data("digits_cnn", "--kind", "channel")["groups"]
    assert conv
    assert {g["kind"] for g in conv} == {"channel"}


def test_inputs_are_given_by_shape(nets):
    one = data(f"{nets}:without_inputs", "--input", "1x4")
    assert data(f"{nets}:without_inputs", "--input", "5x4")["macs"] == 5 * one["macs"]
    assert data(f"{nets}:with_inputs", "--input", "1x4")["macs"] == one["macs"], (
        "over the function's own"
    )
    assert [g["name"] for g in data(f"{nets}:words", "--input", "int:1x7")["groups"]] == ["0", "1"]


def test_keyword_inputs_of_a_function_are_used(nets):
    assert [g["name"] for g in data(f"{nets}:keywords")["groups"]] == ["a"]


def test_a_meta_model_shows_the_same(nets):
    assert data(f"{nets}:with_inputs", "--meta") == data(f"{nets}:with_inputs")
    assert data(f"{nets}:keywords", "--meta")["groups"]


def test_a_module_of_the_current_folder_is_found(nets, monkeypatch):
    monkeypatch.chdir(nets.parent)
    assert data("nets:with_inputs")["groups"] == data(f"{nets}:with_inputs")["groups"]


def test_the_librarys_own_network_has_inputs():
    text = shown("digits_cnn")
    assert "What can shrink" in text
    assert "channel: an output channel of a convolution" in text


def test_a_network_in_which_nothing_shrinks_is_shown_as_such(nets):
    found = data(f"{nets}:nothing_to_cut")
    assert found["groups"] == []
    assert {pin["reason"] for pin in found["pinned"]} == {
        "it is an input of the model",
        "it is an output of the model",
    }
    assert "What stays whole" in shown(f"{nets}:nothing_to_cut")


ERRORS = {
    "unknown name": (
        ["resnet"],
        "There is no model 'resnet'. Did you mean 'resnet56'? Known are digits_cnn",
    ),
    "no file": (["nowhere.py:make"], "There is no file nowhere.py"),
    "no module": (["no_such_module:make"], "'no_such_module' cannot be imported"),
    "no function": (["{nets}:make"], "has no function 'make'. It has Width, with_inputs"),
    "arguments": (["{nets}:with_arguments"], "with_arguments needs arguments: width, heads."),
    "not a function": (["{nets}:CALLS"], "has no function 'CALLS'"),
    "no inputs": (["{nets}:without_inputs"], "No inputs are known for"),
    "no shape": (["{nets}:with_inputs", "--input", "3 by 4"], "'3 by 4' is no shape of an input"),
    "no such type": (["{nets}:with_inputs", "--input", "bool:3x4"], "is no shape of an input"),
    "negative shape": (["{nets}:with_inputs", "--input", "-1x4"], "is no shape of an input"),
    "no model": (["{nets}:no_model"], "gave str, which is no torch.nn.Module"),
    "unknown kind": (
        ["{nets}:with_inputs", "--kind", "chanel"],
        "Did you mean 'channel'? There are",
    ),
    "no function named": (["{nets}"], "Say which function: {nets}:with_inputs."),
    "no match": (["{nets}:with_inputs", "--name", "layer*"], "'layer*'"),
    "does not run": (["{nets}:does_not_run"], "Linear did not run on the example inputs ((1, 5))"),
    "wrong input": (["{nets}:with_inputs", "--input", "1x9"], "did not run on the example inputs"),
    "no folder": (["transformers:nowhere"], "There is no nowhere/config.json"),
    "no timm model": (
        ["timm:resnet18x"],
        "timm has no model 'resnet18x'. Did you mean 'resnet18'? It has",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_fit_on_a_screen_and_say_what_to_do(nets, name):
    if name == "no timm model":
        from oracles.library import define_torchvision_ops

        define_torchvision_ops()
    arguments, message = ERRORS[name]
    found = refused(*(part.format(nets=nets) for part in arguments))
    assert unboxed(message.format(nets=nets)) in unboxed(found)


def test_an_error_inside_the_users_function_is_told(nets):
    found = unboxed(refused(f"{nets}:breaks"))
    assert unboxed("breaks failed with OSError: the disk is full. At") in found
    line = SOURCE.splitlines().index("def breaks():") + 2
    assert unboxed(f'nets.py:{line} in breaks: raise OSError("the disk is full")') in found


def test_of_an_error_in_a_library_the_users_line_is_told(nets):
    found = unboxed(refused(f"{nets}:breaks_in_torch"))
    line = SOURCE.splitlines().index("def breaks_in_torch():") + 2
    assert unboxed(f"nets.py:{line} in breaks_in_torch") in found
    with pytest.raises(ConfigError, match="failed with TypeError") as caught:
        find_model(f"{nets}:breaks_in_torch", [])
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import torch\n\nraise ValueError('not today')\n", "ValueError: not today. At {}:3 in"),
        ("x = 1\ny = = 2\n", "SyntaxError: invalid syntax (broken.py, line 2)"),
    ],
    ids=["raises", "no Python"],
)
@pytest.mark.parametrize("named", ["file", "module"])
def test_an_error_of_the_users_file_is_told(tmp_path, monkeypatch, source, message, named):
    path = tmp_path / "broken.py"
    path.write_text(source)
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)
    with pytest.raises(ConfigError, match="broken(.py)? failed with") as caught:
        find_model(f"{path if named == 'file' else 'broken'}:make", [])
    assert message.format(path) in str(caught.value)
    assert not [name for name in set(sys.modules) - modules if "broken" in name]


def test_a_file_hides_no_module_of_its_name(tmp_path):
    path = tmp_path / "json.py"
    path.write_text("from torch import nn\n\ndef make():\n    return nn.Linear(2, 2)\n")
    find_model(f"{path}:make", ["1x2"])
    assert sys.modules["json"] is json


def test_a_function_with_defaults_needs_no_arguments(nets):
    assert [g["units"] for g in data(f"{nets}:with_defaults")["groups"]] == [6]


def test_only_what_the_file_defines_is_offered(nets):
    found = refused(f"{nets}:make")
    assert "dataclass" not in found


def test_names_can_be_copied(tmp_path, monkeypatch):
    path = tmp_path / "long_names_of_nets.py"
    path.write_text(LONG)
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown(f"{path}:make").splitlines()
    name = "the_first_projection_of_block"
    assert name in [line.split()[0] for line in lines if line.strip()]
    text = "\n".join(lines)
    assert "long_names_of_nets.py:14" in text
    assert "…" not in text
    assert "\\" not in text
    monkeypatch.setenv("COLUMNS", "50")
    folded = shown(f"{path}:make")
    assert "…" not in folded
    firsts = [line.split()[0] for line in folded.splitlines() if line.strip()]
    assert name in "".join(firsts)


def test_help_teaches_with_examples():
    text = RUN.invoke(app, ["inspect", "--help"]).output
    assert "apoptosis inspect torchvision:resnet50" in " ".join(text.split())
