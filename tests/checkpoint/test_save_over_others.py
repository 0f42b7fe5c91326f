"""`save` replaces a checkpoint and nothing else, whatever files of a person are called."""

import json

import pytest
from torch import nn, zeros

from apoptosis.checkpoint import save
from apoptosis.errors import CheckpointError
from apoptosis.records import Outcome
from apoptosis.structure import cut, trace


@pytest.fixture
def outcome():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    plan = trace(net, zeros(1, 4)).plan({"0": [0, 2, 5]})
    return Outcome(cut(net, plan), plan, example_inputs=zeros(1, 4))


FOREIGN = {
    "another program's record": '{"loss": 0.1}',
    "a list": "[1, 2]",
    "no JSON": "run",
    "nothing": "",
    "a format": '{"format": 1}',
    "a deep one": "[" * 100_000,
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("others", [(), ("model.safetensors",), ("plan.json", "masks.safetensors")])
def test_a_folder_with_a_run_of_another_program_is_left_alone(tmp_path, outcome, name, others):
    (tmp_path / "run.json").write_text(FOREIGN[name])
    for other in others:
        (tmp_path / other).write_text("theirs")
    with pytest.raises(CheckpointError, match="it is no checkpoint.*Give the name"):
        save(tmp_path, outcome)
    assert (tmp_path / "run.json").read_text() == FOREIGN[name]
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", *others}


@pytest.mark.parametrize("there", [False, True])
def test_a_hidden_folder_of_a_person_is_neither_removed_nor_put_back(tmp_path, outcome, there):
    hidden = tmp_path / ".net.previous"
    hidden.mkdir()
    (hidden / "model.safetensors").write_text("theirs")
    if there:
        save(tmp_path / "net", outcome)
    save(tmp_path / "net", outcome)
    assert (hidden / "model.safetensors").read_text() == "theirs"
    assert json.loads((tmp_path / "net" / "run.json").read_text())["format"] == 1


def test_a_checkpoint_written_by_hand_anew_is_replaced(tmp_path, outcome):
    """However its record is spaced and ordered."""
    save(tmp_path / "net", outcome)
    path = tmp_path / "net" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    save(tmp_path / "net", outcome)
