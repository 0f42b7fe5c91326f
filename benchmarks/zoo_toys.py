"""Small networks of the zoo, each for one thing that pruning tools stumble over."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

__all__ = ["TOYS"]

CLASSES = 5
WORDS = 23


class UNet(nn.Module):
    """Down, up by transposed convolutions, skips by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = _conv(3, 16), _conv(16, 24)
        self.middle = _conv(24, 32)
        self.up2 = nn.ConvTranspose2d(32, 24, 2, 2)
        self.merge2 = _conv(48, 24)
        self.up1 = nn.ConvTranspose2d(24, 16, 2, 2)
        self.merge1 = _conv(32, 16)
        self.head = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.merge2(torch.cat([self.up2(c), b], 1))
        return self.head(self.merge1(torch.cat([self.up1(b), a], 1)))


class SuperResolution(nn.Module):
    """Channels become pixels, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(3, 16), _conv(16, 24))
        self.up = nn.Sequential(nn.Conv2d(24, 64, 3, 1, 1), nn.PixelShuffle(2), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(16, 12, 3, 1, 1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.up(self.body(x)))


class GatedByChunk(nn.Module):
    """A gated layer cut in two by `chunk`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.both = nn.Linear(12, 16), nn.Linear(16, 64)
        self.last = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.both(F.gelu(self.first(x))).chunk(2, dim=-1)
        return self.last(value * torch.sigmoid(gate))


class GatedBySlice(nn.Module):
    """A gated layer cut in two by slices at a number that an attribute holds."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 32
        self.first, self.both = nn.Linear(12, 16), nn.Linear(16, 64)
        self.last = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        both = self.both(F.gelu(self.first(x)))
        return self.last(F.silu(both[..., : self.width]) * both[..., self.width :])


class SqueezeExcite(nn.Module):
    """A channel attention with `squeeze()` and `unsqueeze`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = _conv(3, 16), _conv(16, 24)
        self.squeeze, self.excite = nn.Linear(24, 6), nn.Linear(6, 24)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.stem(x))
        gate = self.excite(F.relu(self.squeeze(x.mean((2, 3)))))
        return self.head((x * torch.sigmoid(gate)[:, :, None, None]).mean((2, 3)))


class RMSNorm(nn.Module):
    """Written by hand, as in every language model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class CustomNorm(nn.Module):
    """Residual layers with the hand-written norm: the stream is inexact, what is inside the layers is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.norms = nn.ModuleList(RMSNorm(16) for _ in range(2))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


class TiedEmbedding(nn.Module):
    """The output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 24)
        self.inner = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24))
        self.head = nn.Linear(24, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.inner(x))


class UsedTwice(nn.Module):
    """One block, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv(3, 16)
        self.block = nn.Sequential(_conv(16, 24), nn.Conv2d(24, 16, 1))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.block(x)
        x = x + self.block(x)
        return self.head(x.mean((2, 3)))


class RawParameters(nn.Module):
    """Weights without modules."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(32, 12) / 4), nn.Parameter(torch.randn(32))
        self.w2 = nn.Parameter(torch.randn(32, 24) / 6)
        self.w3 = nn.Parameter(torch.randn(CLASSES, 24) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.relu(F.linear(x, self.w1, self.b1)) @ self.w2), self.w3)


class HardCodedReshapes(nn.Module):
    """Attention with the numbers written into the code."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 96), nn.Linear(32, 24)
        self.inner = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(n, t, 32))
        return self.head(x + self.inner(x))


class ChannelsLastFlatten(nn.Module):
    """Channels are the fastest axis of what is flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(3, 16), nn.MaxPool2d(2), _conv(16, 12))
        self.head = nn.Sequential(nn.Linear(4 * 4 * 12, 24), nn.ReLU(), nn.Linear(24, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).permute(0, 2, 3, 1).flatten(1))


class Frozen(nn.Module):
    """Everything but the head is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(3, 16), _conv(16, 24)).requires_grad_(False)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Recurrent(nn.Module):
    """Tokens, a recurrent layer, a head on every step."""

    def __init__(self, kind: Callable[..., nn.Module], layers: int, *, both: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.cells = kind(16, 24, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(48 if both else 24, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cells(self.embed(ids))[0])


class Encoder(nn.Module):
    """torch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


class EinsumAttention(nn.Module):
    """Attention in einsum, heads as a dimension of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 24)
        self.q, self.k, self.v = (nn.Parameter(torch.randn(24, 4, 8) / 5) for _ in range(3))
        self.out = nn.Parameter(torch.randn(4, 8, 24) / 5)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (torch.einsum("ntd,dhe->nhte", x, w) for w in (self.q, self.k, self.v))
        weights = torch.einsum("nhte,nhse->nhts", q, k).mul(8**-0.5).softmax(-1)
        y = torch.einsum("nhts,nhse->nhte", weights, v)
        return self.head(x + torch.einsum("nhte,hed->ntd", y, self.out))


class WeightNorm(nn.Module):
    """Weights as direction times length."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = weight_norm(nn.Linear(12, 32)), weight_norm(nn.Linear(32, 24))
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.b(F.relu(self.a(x)))))


class GroupNorms(nn.Module):
    """GroupNorm between the convolutions; inside the blocks a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.ReLU())
        self.inner = nn.Sequential(_conv(16, 32), nn.Conv2d(32, 16, 3, 1, 1))
        self.norm = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(self.norm(x + self.inner(x))).mean((2, 3)))


class HelperInTraining(nn.Module):
    """A second head that is run in training alone, as GoogLeNet's and Inception's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = _conv(3, 16), _conv(16, 24)
        self.head, self.helper = nn.Linear(24, CLASSES), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        result = self.head(self.body(x).mean((2, 3)))
        return result + 0.3 * self.helper(x.mean((2, 3))) if self.training else result


def _conv(width_in: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(width_in, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    )


def _vectors(width: int) -> Callable[[int], Any]:
    return lambda batch: torch.randn(batch, width, dtype=torch.float64)


def _sequences(width: int) -> Callable[[int], Any]:
    return lambda batch: torch.randn(batch, 7, width, dtype=torch.float64)


def _pictures(size: int) -> Callable[[int], Any]:
    return lambda batch: torch.randn(batch, 3, size, size, dtype=torch.float64)


def _tokens(batch: int) -> Tensor:
    return torch.randint(WORDS, (batch, 7))


TOYS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "U-Net": (UNet, _pictures(16)),
    "PixelShuffle": (SuperResolution, _pictures(8)),
    "GLU by chunk": (GatedByChunk, _vectors(12)),
    "GLU by slice": (GatedBySlice, _vectors(12)),
    "squeeze-excite": (SqueezeExcite, _pictures(8)),
    "custom RMSNorm": (CustomNorm, _vectors(12)),
    "tied embedding": (TiedEmbedding, _tokens),
    "block used twice": (UsedTwice, _pictures(8)),
    "raw parameters": (RawParameters, _vectors(12)),
    "hard-coded reshapes": (HardCodedReshapes, _sequences(24)),
    "channels-last flatten": (ChannelsLastFlatten, _pictures(8)),
    "frozen": (Frozen, _pictures(8)),
    "LSTM": (lambda: Recurrent(nn.LSTM, 1, both=False), _tokens),
    "LSTM 2 layers both ways": (lambda: Recurrent(nn.LSTM, 2, both=True), _tokens),
    "GRU": (lambda: Recurrent(nn.GRU, 1, both=False), _tokens),
    "nn.TransformerEncoder": (Encoder, _sequences(24)),
    "einsum attention": (EinsumAttention, _sequences(12)),
    "weight_norm": (WeightNorm, _vectors(12)),
    "GroupNorm": (GroupNorms, _pictures(8)),
    "helper in training": (HelperInTraining, _pictures(8)),
}
"""By name: how to make the network, and inputs for a batch of a given size."""
