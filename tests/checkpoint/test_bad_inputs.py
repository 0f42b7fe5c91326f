"""Whatever is given instead of a checkpoint, or with one: an error in words, with cause and remedy."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from apoptosis.checkpoint import load, read_run, save
from apoptosis.errors import CheckpointError
from apoptosis.structure import Plan
from oracles.small_networks import Convolutions, Counting, InCode, pruned

IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
ROWS = torch.linspace(-1, 1, 8).view(2, 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "run", pruned(Convolutions, IMAGES))


def resealed(path: Path, **changes: object) -> None:
    """A record with other content and the right checksum, as another program might write it."""
    content = json.loads((path / "run.json").read_text()) | changes
    content.pop("checksum")
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "run.json").write_text(json.dumps(content))


def test_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder. Give the folder that `save`"):
        load(tmp_path / "nowhere", dense=Convolutions)
    with pytest.raises(CheckpointError, match="no such folder"):
        read_run(tmp_path / "nowhere")


def test_a_file(path):
    with pytest.raises(CheckpointError, match="run.json is a file; a checkpoint is a folder"):
        load(path / "run.json", dense=Convolutions)
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        save(path / "run.json", pruned(Convolutions, IMAGES))


@pytest.mark.parametrize("name", ["model.safetensors", "plan.json", "run.json"])
def test_a_missing_file(path, name):
    (path / name).unlink()
    with pytest.raises(
        CheckpointError, match=f"has no {name}: it is no checkpoint.*or not a whole"
    ):
        load(path, dense=Convolutions)


@pytest.mark.parametrize("name", ["model.safetensors", "plan.json", "run.json"])
def test_a_folder_in_the_place_of_a_file(path, name):
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        load(path, dense=Convolutions)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '"text"',
        "null",
        "{",
        '{"format": 1}',
        "[" * 100_000,
        '{"format": "x", "checksum": 1}',
        '{"format": NaN, "checksum": 1}',
        "9" * 5000,
    ],
)
def test_json_of_somebody_else(path, text):
    (path / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"run\.json (is no record of a run|has format)"):
        load(path, dense=Convolutions)


def test_a_newer_format(path):
    resealed(path, format=3)
    with pytest.raises(
        CheckpointError, match="format 3; .* newer version: upgrade torch-apoptosis"
    ):
        read_run(path)


def test_no_format(path):
    resealed(path, format=0)
    with pytest.raises(CheckpointError, match="format 0; .* no such format"):
        read_run(path)


def test_a_truncated_file(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=f"has {len(data) - 1:,} bytes and had {len(data):,}"):
        load(path, dense=Convolutions)


def test_a_changed_record(path):
    text = (path / "run.json").read_text()
    (path / "run.json").write_text(text.replace('"seed": 3', '"seed": 4'))
    with pytest.raises(CheckpointError, match="changed after it was saved: its content does not"):
        read_run(path)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "tensors": [
                {
                    "names": ["a"],
                    "shape": [2],
                    "dtype": "int3",
                    "requires_grad": True,
                    "strides": None,
                }
            ]
        },
        {
            "tensors": [
                {
                    "names": ["a"],
                    "shape": [2],
                    "dtype": "int8",
                    "requires_grad": True,
                    "strides": [10**12],
                }
            ]
        },
        {"tensors": 3},
        {"history": [{"step": 1}]},
        {"spent": [{"unknown": 1}]},
        {"files": {"plan.json": 3}},
        {"settings": 3},
    ],
    ids=str,
)
def test_a_record_that_nobody_has_written(path, changes):
    resealed(path, **changes)
    with pytest.raises(CheckpointError, match="is no record of a run"):
        load(path, dense=Convolutions)


def test_a_record_of_other_tensors(path):
    tensors = json.loads((path / "run.json").read_text())["tensors"]
    resealed(path, tensors=tensors[1:])
    with pytest.raises(CheckpointError, match="stands in the file of tensors alone.*not written"):
        load(path, dense=Convolutions)
    resealed(path, tensors=[tensors[0] | {"shape": [1]}, *tensors[1:]])
    with pytest.raises(CheckpointError, match="in the file of tensors, .* in run.json"):
        load(path, dense=Convolutions)


def test_example_inputs_that_cannot_be_made(tmp_path):
    path = save(tmp_path / "run", pruned(InCode, ROWS))
    for example, message in [
        ({"tensor": [10**12, 10**6], "dtype": "float32"}, "cannot be made here"),
        ({"tensor": [2, 4], "dtype": "float3"}, "no numbers of type 'float3'"),
        (["?"], "hold a"),
    ]:
        resealed(path, example=example)
        with pytest.raises(CheckpointError, match=message):
            load(path, dense=InCode)


def test_a_plan_of_another_network(path):
    with pytest.raises(
        CheckpointError,
        match=r"whose 'a.weight' has shape \(8, 3, 3, 3\); that of Wide has \(9, 3, 3, 3\)",
    ):
        load(path, dense=Wide)
    with pytest.raises(CheckpointError, match=r"'a.weight' .*; that of Counting has \(8, 4\)"):
        load(path, dense=Counting)


class Wide(Convolutions):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 9, 3), nn.BatchNorm2d(9), nn.Conv2d(9, 6, 3)


def test_a_network_with_more_or_fewer_tensors(path):
    more, fewer = Convolutions(), Convolutions()
    more.extra = nn.Linear(2, 2)
    fewer.head.bias = None
    with pytest.raises(CheckpointError, match=r"has 'extra.weight' of shape \(2, 2\)"):
        load(path, dense=more)
    with pytest.raises(
        CheckpointError, match=r"with 'head.bias' of shape \(4,\); Convolutions has"
    ):
        load(path, dense=fewer)


def test_the_small_network_in_the_place_of_the_dense_one(path):
    small = load(path, dense=Convolutions)
    with pytest.raises(CheckpointError, match="the size after the cut: give the dense network"):
        load(path, dense=small)


def test_a_plan_that_cannot_be_carried_out(path):
    data = json.loads((path / "plan.json").read_text())
    data["attributes"] = [{"module": "no.such", "name": "size", "place": None, "old": 2, "new": 1}]
    text = Plan.from_json(json.dumps(data)).to_json()
    (path / "plan.json").write_text(text)
    files = json.loads((path / "run.json").read_text())["files"]
    files["plan.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    resealed(path, files=files)
    with pytest.raises(CheckpointError, match="cannot be carried out on Convolutions.*'no.such'"):
        load(path, dense=Convolutions)


def test_dense_is_no_network(path):
    with pytest.raises(CheckpointError, match="`dense` is a str"):
        load(path, dense="Convolutions")
    with pytest.raises(CheckpointError, match="was called and gave a NoneType"):
        load(path, dense=lambda: None)


def test_errors_of_the_constructor_are_its_own(path):
    def broken():
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        load(path, dense=broken)


def test_a_lazy_network(path):
    lazy = Convolutions()
    lazy.head = nn.LazyLinear(4)
    with pytest.raises(CheckpointError, match="'head.weight' of Convolutions has no shape yet"):
        load(path, dense=lazy)


def test_home_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    outcome = pruned(Convolutions, IMAGES)
    assert save("~/runs/half", outcome) == tmp_path / "runs" / "half"
    load("~/runs/half", dense=Convolutions)
    assert read_run("~/runs/half").delivery == "module"


def test_a_home_that_nobody_has():
    with pytest.raises(CheckpointError, match="home directory. Give the whole path"):
        read_run("~nobody-of-that-name/run")


def test_a_link_to_itself(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "run")
    with pytest.raises(CheckpointError, match="no such folder"):
        load(tmp_path / "run", dense=Convolutions)
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "run", pruned(Convolutions, IMAGES))


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(CheckpointError, match="could not be written: .*Permission denied"):
        save(tmp_path / "locked" / "run", pruned(Convolutions, IMAGES))


def test_a_place_that_cannot_be(path):
    with pytest.raises(CheckpointError, match="could not be written: .*Give a place that may be"):
        save(path / "run.json" / "deeper", pruned(Convolutions, IMAGES))
    with pytest.raises(CheckpointError, match="could not be written: .*File name too long"):
        save(path.with_name("x" * 300), pruned(Convolutions, IMAGES))
