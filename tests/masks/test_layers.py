"""Which weights may go: those of layers, by type and by name, and along which dimension they read their inputs."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune
from torch.nn.utils.parametrizations import weight_norm

from apoptosis.errors import ConfigError, ModelError
from apoptosis.masks import maskable
from apoptosis.models import MODELS
from oracles.library import define_torchvision_ops

CIFAR_RESNET20_WEIGHTS = 268_336
"""What the public unstructured pruners count as prunable of the narrow ResNet20 with padded shortcuts."""


@pytest.mark.parametrize(
    ("module", "dims"),
    [
        (nn.Linear(3, 4), {"weight": 1}),
        (nn.Bilinear(2, 3, 4), {"weight": 1}),
        (nn.Conv1d(4, 6, 3, groups=2), {"weight": 1}),
        (nn.Conv3d(2, 3, 1), {"weight": 1}),
        (nn.ConvTranspose2d(4, 6, 3), {"weight": 0}),
        (nn.LSTM(3, 5), {"weight_ih_l0": 1, "weight_hh_l0": 1}),
        (nn.GRUCell(3, 5), {"weight_ih": 1, "weight_hh": 1}),
        (nn.MultiheadAttention(4, 2), {"in_proj_weight": 1, "out_proj.weight": 1}),
        (
            nn.MultiheadAttention(4, 2, kdim=6, vdim=8),
            {"q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1, "out_proj.weight": 1},
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_weights_of_torchs_layers_may_go(module: nn.Module, dims: dict[str, int]) -> None:
    assert {name: layer.dim for name, layer in maskable(module).items()} == dims


def test_norms_embeddings_biases_and_positions_stay() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(1, 5, 4))
            self.tokens = nn.Embedding(7, 4)
            self.norm = nn.LayerNorm((5, 4))
            self.conv = nn.Conv1d(4, 4, 1)
            self.batch = nn.BatchNorm1d(4)

    assert list(maskable(Net())) == ["conv.weight"]
    for name in ("tokens.weight", "positions", "conv.bias", "norm.weight"):
        assert list(maskable(Net(), [name])) == [name]


def test_a_head_tied_to_its_embedding_stays_unless_it_is_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.tokens = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.tokens.weight

    assert list(maskable(Net())) == ["inner.weight"]
    (tied,) = maskable(Net(), ["head.weight"]).values()
    assert tied.names == ("tokens.weight", "head.weight")


def test_frozen_and_integer_parameters_stay() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].requires_grad_(requires_grad=False)
    assert list(maskable(net)) == ["1.weight"]


def test_a_linear_layer_of_transformers_reads_along_its_first_dimension() -> None:
    define_torchvision_ops()
    transformers = pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    assert maskable(Conv1D(6, 4))["weight"].dim == 0
    config = transformers.GPT2Config(
        n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    found = maskable(transformers.GPT2LMHeadModel(config))
    block = "transformer.h.0"
    inside = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert list(found) == [f"{block}.{name}.weight" for name in inside]
    assert {own.dim for own in found.values()} == {0}


@pytest.mark.parametrize("name", MODELS)
def test_named_networks_have_layers_to_prune(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name].make()
    layers = maskable(model)
    total = sum(p.numel() for p in model.parameters())
    assert sum(torch.Size(own.shape).numel() for own in layers.values()) > 0.9 * total


def test_the_narrow_resnet20_has_as_many_weights_as_others_count() -> None:
    layers = maskable(MODELS["resnet20_narrow"].make())
    count = sum(torch.Size(own.shape).numel() for own in layers.values())
    shortcuts = [name for name in layers if "shortcut" in name or "downsample" in name]
    counted = sum(torch.Size(layers[name].shape).numel() for name in shortcuts)
    assert count - counted == CIFAR_RESNET20_WEIGHTS


def test_patterns_choose_among_weights_and_leave_out() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.Flatten())
    assert list(maskable(net, ["0.*"])) == ["0.weight"]
    assert list(maskable(net, ["!0.*"])) == ["2.weight"]
    assert list(maskable(net, ["*", "0.bias"])) == ["0.weight", "0.bias", "2.weight"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["3.*"], "fits no trained weight"),
        (["!3.*"], "fits no trained weight"),
        (["1.*"], "fits no trained weight of a layer"),
        (["!*"], "is left to prune"),
        ("0.weight", "a list is meant"),
        ([0], "are texts"),
        (3, "is a list of patterns"),
    ],
)
def test_names_that_choose_nothing_are_refused(names: object, message: str) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    with pytest.raises(ConfigError, match=message):
        maskable(net, names)  # type: ignore[arg-type]


def test_weights_that_are_computed_at_each_call_are_not_offered() -> None:
    with pytest.raises(ConfigError, match="none"):
        maskable(weight_norm(nn.Linear(3, 3)))
    with pytest.raises(ModelError, match="import_masks"):
        maskable(torch_prune.random_unstructured(nn.Linear(3, 3), "weight", amount=2))
