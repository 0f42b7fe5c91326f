"""Layers seen as matrices give what the layers give, and patches are those that plain loops cut out."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from apoptosis.curvature import linear_maps
from apoptosis.curvature.linear_maps import (
    add_,
    as_matrix,
    as_outputs,
    is_linear_map,
    is_product,
    pairs,
)
from oracles.building import built

LAYERS = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "tokens": (lambda: nn.Linear(5, 3), (4, 2, 3, 5)),
    "one vector": (lambda: nn.Linear(5, 3, bias=False), (5,)),
    "turned": (lambda: Conv1D(3, 5), (4, 2, 5)),
    "plain": (lambda: nn.Conv2d(2, 3, 3), (4, 2, 6, 5)),
    "stride": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 3), bias=False), (3, 2, 7, 8)),
    "padding": (lambda: nn.Conv2d(2, 3, 3, padding=(1, 2)), (3, 2, 4, 5)),
    "dilation": (lambda: nn.Conv2d(2, 3, 3, dilation=(2, 1), padding=1), (3, 2, 6, 5)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2), (3, 4, 6, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), (3, 4, 5, 5)),
    "same": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same"), (3, 2, 6, 5)),
    "valid": (lambda: nn.Conv2d(2, 3, 3, padding="valid"), (3, 2, 6, 5)),
    "reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (3, 2, 6, 5)),
    "circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (3, 2, 6, 5)),
    "one dimension": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (3, 4, 9)),
    "three": (lambda: nn.Conv3d(2, 4, (2, 3, 1), dilation=(1, 2, 1), groups=2), (2, 2, 4, 6, 3)),
    "no batch": (lambda: nn.Conv2d(2, 3, 3), (2, 6, 5)),
    "last in memory": (lambda: nn.Conv2d(2, 3, 3), (4, 2, 6, 5)),
}  # fmt: skip


def layer_and_input(name: str) -> tuple[nn.Module, Tensor]:
    make, shape = LAYERS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return built(make), x.contiguous(memory_format=torch.channels_last) if "memory" in name else x


def by_loops(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The patches of zero-padded images, number by number: (g, n + bias, positions)."""
    (ph, pw), (kh, kw), (sh, sw), (dh, dw) = (
        conv.padding,
        conv.kernel_size,
        conv.stride,
        conv.dilation,
    )
    big = torch.zeros(len(x), x.shape[1], x.shape[2] + 2 * ph, x.shape[3] + 2 * pw).double()
    big[:, :, ph : ph + x.shape[2], pw : pw + x.shape[3]] = x
    tops = range(0, big.shape[2] - dh * (kh - 1), sh)
    lefts = range(0, big.shape[3] - dw * (kw - 1), sw)
    width = x.shape[1] // conv.groups
    found = []
    for group in range(conv.groups):
        rows = [
            [
                big[n, c, top + dh * i, left + dw * j]
                for n, top, left in product(range(len(x)), tops, lefts)
            ]
            for c, i, j in product(range(group * width, (group + 1) * width), range(kh), range(kw))
        ]
        if conv.bias is not None:
            rows.append([torch.ones(()).double()] * len(rows[0]))
        found.append(torch.stack([torch.stack(row) for row in rows]))
    return torch.stack(found)


def whole(layer: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    columns, outputs = zip(*pairs(layer, x, as_outputs(layer, y)), strict=True)
    return torch.cat(columns, 2), torch.cat(outputs, 2)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("chunk", [1, 200, 2**22])
def test_the_matrix_times_the_inputs_is_what_the_layer_gives(name, chunk, monkeypatch):
    monkeypatch.setattr(linear_maps, "CHUNK", chunk)
    layer, x = layer_and_input(name)
    with torch.no_grad():
        columns, outputs = whole(layer, x, layer(x))
        matrix = as_matrix(layer, layer.weight)
        if layer.bias is not None:
            bias = layer.bias.view(len(matrix), -1, 1)
            matrix = torch.cat([matrix, bias], 2)
    torch.testing.assert_close(matrix @ columns, outputs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["plain", "stride", "padding", "dilation", "groups", "depthwise"])
def test_patches_are_those_of_plain_loops(name):
    conv, x = layer_and_input(name)
    with torch.no_grad():
        columns, _ = whole(conv, x, conv(x))
    assert torch.equal(columns, by_loops(conv, x))


def test_patches_of_another_stride_would_be_caught():
    conv, x = layer_and_input("stride")
    with torch.no_grad():
        columns, _ = whole(conv, x, conv(x))
    conv.stride = (3, 2)
    other = by_loops(conv, x)
    assert columns.shape != other.shape or not torch.equal(columns, other)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_added_to_the_matrix_is_added_to_the_outputs(name):
    layer, x = layer_and_input(name)
    with torch.no_grad():
        before = layer(x)
        columns, _ = whole(layer, x, before)
        change = torch.randn(*as_matrix(layer, layer.weight).shape[:2], columns.shape[1]).double()
        add_(layer, change)
        _, moved = whole(layer, x, layer(x) - before)
    torch.testing.assert_close(moved, change @ columns, rtol=1e-10, atol=1e-11)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_recognised_by_what_they_give(name):
    layer, x = layer_and_input(name)
    assert is_linear_map(layer)
    with torch.no_grad():
        y = layer(x)
        assert is_product(layer, x, y)
        assert not is_product(layer, x, 1.1 * y)
        assert not is_product(layer, x, torch.relu(y))


@pytest.mark.parametrize(
    "module", [nn.ConvTranspose2d(2, 2, 3), nn.Bilinear(2, 2, 2), nn.LayerNorm(2), nn.GRU(2, 2)]
)
def test_other_layers_are_none(module):
    assert not is_linear_map(module)


@pytest.mark.parametrize("groups", [1, 2])
def test_drawn_places_are_some_of_all_with_their_outputs(groups):
    conv = nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=groups).double()
    x = torch.randn(5, 4, 30, 28, dtype=torch.float64)
    y = as_outputs(conv, conv(x).detach())
    ((inputs, made),) = pairs(conv, x, y)
    ((some, theirs),) = pairs(conv, x, y, generator=torch.Generator().manual_seed(0))
    enough = linear_maps.FEWEST_PLACES
    assert some.shape[2] == theirs.shape[2] == 5 * enough < inputs.shape[2]
    whole = torch.cat([inputs, made], 1).permute(2, 0, 1).flatten(1)
    drawn = torch.cat([some, theirs], 1).permute(2, 0, 1).flatten(1)
    nearest = torch.cdist(drawn, whole).min(1)
    assert float(nearest.values.max()) < 1e-5  # cdist rounds; others are apart by far more
    assert len(nearest.indices.unique()) == 5 * enough


def test_few_places_are_all_taken():
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    y = as_outputs(conv, conv(x).detach())
    whole, some = (list(pairs(conv, x, y, generator=g)) for g in (None, torch.Generator()))
    for one, other in zip(whole, some, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
