import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from apoptosis.cli.weights import load_weights_
from apoptosis.errors import CheckpointError


def net(hidden: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight


@pytest.mark.parametrize("kind", ["safetensors", "pt", "state_dict", "model"])
def test_weights_are_loaded(tmp_path, kind):
    trained, path = net(), tmp_path / f"w.{'safetensors' if kind == 'safetensors' else 'pt'}"
    state = trained.state_dict()
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state if kind == "pt" else {kind: state, "epoch": 3}, path)
    model = net()
    load_weights_(model, path)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


def test_tied_weights_may_stand_in_a_file_once(tmp_path):
    weight = torch.randn(3, 3)
    save_file({"a.weight": weight}, tmp_path / "w.safetensors")
    model = Tied()
    load_weights_(model, tmp_path / "w.safetensors")
    torch.testing.assert_close(model.b.weight.data, weight)
    assert model.a.weight is model.b.weight


def refused(model, path, match):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=match):
        load_weights_(model, path)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_weights_of_another_model_are_refused_with_what_differs(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file(net(8).state_dict(), path)
    refused(net(), path, r"7 of another shape: 0.weight \(8, 4\) for \(6, 4\), .*, …")
    save_file({"0.weight": torch.zeros(6, 4), "other": torch.zeros(1)}, path)
    refused(net(), path, "7 missing: 0.bias, 1.weight, 1.bias, …; 1 unexpected: other")
    save_file({f"module.{name}": item for name, item in net().state_dict().items()}, path)
    refused(net(), path, "begin with 'module.'.*inner model's state_dict")


def test_a_pickle_of_more_than_weights_is_refused_and_not_run(tmp_path):
    path = tmp_path / "w.pt"
    torch.save(net(), path)
    refused(net(), path, "not a file of weights alone. .* torch.save")
    with pytest.raises(CheckpointError) as caught:
        load_weights_(net(), path)
    assert str(caught.value).endswith("It asks for torch.nn.modules.container.Sequential.")


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no weights at all", b"PK\x03\x04 half a zip"])
def test_files_of_something_else_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    refused(net(), tmp_path / name, "is no")


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old"])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_called_damaged(tmp_path, share, old):
    path = tmp_path / "w.pt"
    torch.save(nn.Linear(99, 99).state_dict(), path, _use_new_zipfile_serialization=not old)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    refused(net(), path, "w.pt is damaged, or is no file of torch's. Take another copy")


@pytest.mark.parametrize("content", [b"junk", b"", b"a,b,c\n1,2", b"tt.", b"{}", b"<html>"])
def test_bytes_that_are_no_weights_are_not_called_dangerous(tmp_path, content):
    (tmp_path / "w.pt").write_bytes(content)
    refused(net(), tmp_path / "w.pt", "w.pt is damaged, or is no file of torch's. Take another")
    with pytest.raises(CheckpointError) as caught:
        load_weights_(net(), tmp_path / "w.pt")
    assert "any code" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    def refusing(*_, **__):
        raise PermissionError(13, "Permission denied", "w.pt")

    (tmp_path / "w.pt").touch()
    monkeypatch.setattr(torch, "load", refusing)
    with pytest.raises(PermissionError, match="denied"):
        load_weights_(net(), tmp_path / "w.pt")


def test_a_file_without_tensors_is_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "w.pt")
    refused(net(), tmp_path / "w.pt", r"holds a dict with \['epoch'\] and no tensors by name")
    torch.save(torch.zeros(3), tmp_path / "w.pt")
    refused(net(), tmp_path / "w.pt", "holds a Tensor and no tensors by name")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    refused(net(), tmp_path / "none.pt", "does not exist")
    refused(net(), tmp_path, "is a folder")


def test_counters_of_batch_norms_may_be_missing(tmp_path):
    """As in files of older versions of torch, the public ones among them."""
    trained, model = net(), net()
    state = {n: t for n, t in trained.state_dict().items() if "num_batches" not in n}
    save_file(state, tmp_path / "w.safetensors")
    load_weights_(model, tmp_path / "w.safetensors")
    torch.testing.assert_close({n: model.state_dict()[n] for n in state}, state, rtol=0, atol=0)
