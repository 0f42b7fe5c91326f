"""Checkpoints as models and as weights of commands."""

import json

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune
from typer.testing import CliRunner

import apoptosis as ap
from apoptosis.checkpoint import read_run
from apoptosis.cli.app import app
from apoptosis.cli.sources import make_model
from apoptosis.cli.weights import load_weights_
from apoptosis.errors import CheckpointError, ConfigError

RUN = CliRunner()

SOURCE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))

def other():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

def both():
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(3)
    ]
    return batches, batches[:2]
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


def run(*words) -> dict:
    result = RUN.invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*words) -> str:
    result = RUN.invoke(app, [*map(str, words)])
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.fixture(scope="module")
def half(own, tmp_path_factory):
    out = tmp_path_factory.mktemp("half") / "half"
    words = ("prune", f"{own}:make", "--data", f"{own}:both", "--steps", 2)
    return run(*words, "--keep-params", 0.5, "--out", out), out


@pytest.fixture(scope="module")
def sparse(own, tmp_path_factory):
    out = tmp_path_factory.mktemp("sparse") / "sparse"
    words = ("prune", f"{own}:make", "--data", f"{own}:both", "--unstructured")
    return run(*words, "--keep", 0.5, "--out", out), out


def test_a_folder_names_its_network(half, own):
    _, out = half
    names: dict = {}
    exec(own.read_text(), names)
    named = make_model(str(out), [f"{own}:make"])
    x = torch.randn(5, 4)
    expected = ap.load(out, dense=names["make"])
    torch.testing.assert_close(named.model(x), expected(x), rtol=0, atol=0)
    assert named.name == f"{own}:make"
    shown = run("inspect", out, "--dense", f"{own}:make")
    assert [group["units"] for group in shown["groups"]] == [
        named.model[0].out_features,
        named.model[2].out_features,
    ]


def test_a_cut_of_a_cut_is_saved_as_one_of_the_dense_network(half, own, tmp_path):
    first, out = half
    words = (
        "prune",
        out,
        "--dense",
        f"{own}:make",
        "--data",
        f"{own}:both",
        "--steps",
        2,
        "--keep-params",
        0.5,
    )
    found = run(*words, "--out", tmp_path / "quarter")
    subject = read_run(tmp_path / "quarter").settings["subject"]
    assert (subject["model"], subject["checkpoint"]) == (f"{own}:make", str(out))
    for name, group in found["groups"].items():
        assert group["before"] == first["groups"][name]["after"], "shares are of what was given"
    names: dict = {}
    exec("\n".join(found["load"]), names)
    assert names["small"][0].out_features == found["groups"]["0"]["after"]
    assert found["evaluation"]["before"] == first["evaluation"]["after"]


def test_masks_of_a_cut_network_stand_on_the_cut(half, own, tmp_path):
    _, out = half
    words = (
        "prune",
        out,
        "--dense",
        f"{own}:make",
        "--data",
        f"{own}:both",
        "--unstructured",
        "--keep",
        0.5,
    )
    found = run(*words, "--out", tmp_path / "sparse")
    assert read_run(tmp_path / "sparse").settings["subject"]["model"] == str(out)
    names: dict = {}
    exec("\n".join(found["load"]), names)
    named = make_model(str(tmp_path / "sparse"), [f"{own}:make"])
    x = torch.randn(5, 4)
    torch.testing.assert_close(named.model(x), names["small"](x), rtol=0, atol=0)
    assert ap.masks_of(named.model) is not None


def test_masks_stay_and_further_ones_join_them(sparse, own, tmp_path):
    _, out = sparse
    words = (
        "prune",
        out,
        "--dense",
        f"{own}:make",
        "--data",
        f"{own}:both",
        "--unstructured",
        "--keep",
        0.2,
    )
    run(*words, "--out", tmp_path / "more")
    before = ap.masks_of(make_model(str(out), [f"{own}:make"]).model)
    after = ap.masks_of(make_model(str(tmp_path / "more"), [f"{own}:make"]).model)
    for name in before.masks:
        assert not bool((after.kept(name) & ~before.kept(name)).any())
    assert after.num_kept < before.num_kept


def test_units_of_a_masked_network_are_refused(sparse, own):
    said = refused(
        "prune", sparse[1], "--dense", f"{own}:make", "--data", f"{own}:both", "--keep-flops", 0.5
    )
    assert "saved without its masks. Prune units first" in said


def test_a_checkpoint_that_no_command_saved_is_refused_with_the_remedy(tmp_path):
    net = nn.Linear(4, 2)
    plan = ap.trace(net, torch.zeros(1, 4)).identity()
    ap.save(tmp_path / "python", ap.Outcome(net, plan))
    with pytest.raises(CheckpointError, match=r"does not say which model .* ap.load"):
        make_model(str(tmp_path / "python"))


def test_a_dense_network_is_saved_with_the_plan_that_keeps_everything(tmp_path):
    net = nn.Linear(4, 2)
    plan = ap.trace(net, torch.zeros(1, 4)).identity()
    ap.save(tmp_path / "dense", ap.Outcome(net, plan, example_inputs=torch.zeros(1, 4)))
    again = ap.load(tmp_path / "dense", dense=nn.Linear(4, 2))
    torch.testing.assert_close(again.weight, net.weight, rtol=0, atol=0)
    model = nn.Linear(4, 2)
    load_weights_(model, tmp_path / "dense")
    torch.testing.assert_close(model.weight, net.weight, rtol=0, atol=0)


def test_folders_that_are_none_are_told_apart(half, tmp_path):
    with pytest.raises(ConfigError, match=r"without run.json, so no checkpoint"):
        make_model(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no checkpoint .*hafl. Did you mean '.*/half'"):
        make_model(str(half[1].parent / "hafl"))


def test_weights_of_a_masked_checkpoint_keep_their_masks(sparse):
    data, out = sparse
    model = nn.Sequential(
        nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    )
    load_weights_(model, out)
    assert ap.masks_of(model).num_kept == data["spent"][0]["left"]


def test_weights_of_another_network_are_refused(half, own):
    with pytest.raises(CheckpointError, match=r"of .*mine.py:make has tensors of other names"):
        load_weights_(nn.Linear(4, 3), half[1])
    with pytest.raises(CheckpointError, match=r"part of a checkpoint .* --weights"):
        load_weights_(nn.Linear(4, 3), half[1] / "model.safetensors")
    words = ("score", f"{own}:other", "--data", f"{own}:both", "--weights", half[1])
    assert "Name the folder as the model instead" in refused(*words)


def test_masks_of_torchs_own_pruning_are_kept(tmp_path):
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    torch_prune.l1_unstructured(net[0], "weight", amount=10)
    torch_prune.random_unstructured(net[2], "bias", amount=1)
    torch.save(net.state_dict(), tmp_path / "pruned.pt")
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    load_weights_(model, tmp_path / "pruned.pt")
    x = torch.randn(5, 4)
    torch.testing.assert_close(model(x), net(x), rtol=0, atol=0)
    masks = ap.masks_of(model)
    assert {name: kept for name, (kept, _) in masks.counts().items()} == {
        "0.weight": 14,
        "2.bias": 2,
    }
    loss = model(x).square().sum()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loss.backward()
    optimizer.step()
    assert int(torch.count_nonzero(model[0].weight)) == 14


def test_the_lines_to_load_hold_for_every_name_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = 'a "b" \\c'
    found = run("train", "digits_cnn", "--data", "digits", "--epochs", 1, "--out", out)
    names: dict = {}
    exec("\n".join(found["load"]), names)
    assert isinstance(names["small"], nn.Module)


def test_the_nearest_checkpoint_is_named_as_it_would_be_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("runs/digits", "dense"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no checkpoint runs/digts\. Did you mean 'runs/digits'"):
        make_model("runs/digts")
    with pytest.raises(ConfigError, match="no model 'dens'. Did you mean 'dense'"):
        make_model("dens")


@pytest.mark.parametrize("command", ["train", "finetune", "prune"])
def test_a_place_with_detours_leaves_no_folder_on_the_way(own, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    words = [command, f"{own}:make", "--data", f"{own}:both", "--out", "./x/../y/"]
    run(*words, *(["--keep-params", "0.5", "--steps", "1"] if command == "prune" else []))
    assert [place.name for place in tmp_path.iterdir()] == ["y"]
