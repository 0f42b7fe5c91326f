"""Small networks with something to cut in each way there is, float64, the same in every run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles.building import built

__all__ = ["SMALL_CASES", "SmallCase", "hard_coded", "small_case"]

CLASSES = 3


class Residual(nn.Module):
    """A convolutional network with a residual stream; its channels are exact, for BatchNorm acts on each alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.ModuleList(ResidualBlock(6, 5) for _ in range(2))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class ResidualBlock(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, inner, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class FusedAttention(nn.Module):
    """As timm writes it: one projection for queries, keys and values; sizes as attributes."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class SeparateAttention(nn.Module):
    """A projection each; keys and values may have fewer heads, and the scores are written out."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim, self.repeats = width // heads, heads // kv_heads
        self.scale = self.head_dim**-0.5
        self.q = nn.Linear(width, heads * self.head_dim)
        self.k = nn.Linear(width, kv_heads * self.head_dim)
        self.v = nn.Linear(width, kv_heads * self.head_dim)
        self.o = nn.Linear(heads * self.head_dim, width)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        if self.repeats > 1:
            k, v = k.repeat_interleave(self.repeats, 1), v.repeat_interleave(self.repeats, 1)
        weights = torch.softmax(q @ k.transpose(-2, -1) * self.scale, -1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class GatedUnit(nn.Module):
    """One projection whose halves are a gate and what it lets through."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.both = nn.Linear(width, 2 * inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Experts(nn.Module):
    """Experts as stacked weights, mixed by a softmax."""

    def __init__(self, width: int, inner: int, num: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num)
        self.up = nn.Parameter(torch.randn(num, inner, width) / 2)
        self.down = nn.Parameter(torch.randn(num, width, inner) / 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.router(x), -1)
        hidden = F.gelu(torch.einsum("bld,ehd->bleh", x, self.up))
        return torch.einsum("bleh,edh,ble->bld", hidden, self.down, weights)


class Transformer(nn.Module):
    """Blocks with norms before, over tokens that are vectors."""

    def __init__(self, *parts: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in parts)
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return self.head(x.mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.inner = nn.Linear(6, 9)
        self.back = nn.Linear(9, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return self.head(x + self.back(F.gelu(self.inner(x))))


class HardCoded(nn.Module):
    """Code that no attribute can make run at another size."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 12)
        self.bn = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.5)
        self.b = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        y = self.drop(torch.relu(self.bn(self.a(x))))
        y = y.reshape(-1, 3, 4).transpose(1, 2).reshape(-1, 12)
        y = self.b(y)
        return y if shift is None else y + shift


@dataclass(frozen=True)
class SmallCase:
    """A network, inputs for it, and the delivery of cuts that keep to its ties."""

    id: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: int = 0
    delivery: str = "module"

    def model(self) -> nn.Module:
        """Made anew, in eval mode."""
        return built(self.make)

    def inputs(self, num: int = 2, *, seed: int = 0) -> Any:
        """A batch of that many."""
        generator = torch.Generator().manual_seed(seed)
        if self.words:
            return torch.randint(self.words, (num, *self.shape), generator=generator)
        return torch.randn(num, *self.shape, generator=generator, dtype=torch.float64)


def encoder(**options: Any) -> nn.Module:
    """torch's own encoder, as people use it."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **options)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(5, 8), stack, nn.Linear(8, CLASSES))


def hard_coded() -> nn.Module:
    """Delivered as a program."""
    return built(HardCoded)


SMALL_CASES = [
    SmallCase(
        "mlp",
        lambda: nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Sigmoid(), nn.Linear(6, CLASSES)
        ),
        (4,),
    ),
    SmallCase("residual", Residual, (2, 5, 5)),
    SmallCase(
        "depthwise",
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 1),
            nn.Conv2d(6, 6, 3, groups=6),
            nn.SiLU(),
            nn.Conv2d(6, 8, 3, groups=2),
            nn.GroupNorm(4, 8),
            nn.Flatten(),
            nn.Linear(8, CLASSES),
        ),
        (2, 5, 5),
    ),
    SmallCase("fused", lambda: Transformer(FusedAttention(8, 2), nn.Linear(8, 8)), (4, 5)),
    SmallCase("separate", lambda: Transformer(SeparateAttention(8, 2, 2)), (4, 5)),
    SmallCase("gqa", lambda: Transformer(SeparateAttention(8, 4, 2)), (3, 5)),
    SmallCase("glu", lambda: Transformer(GatedUnit(8, 6)), (4, 5)),
    SmallCase("experts", lambda: Transformer(Experts(8, 6, 3)), (4, 5)),
    SmallCase("recurrent", Recurrent, (4, 5)),
    SmallCase("tied", Tied, (4,), words=7),
    SmallCase("encoder", partial(encoder, norm_first=True), (4, 5)),
    SmallCase("hard coded", HardCoded, (4,), delivery="program"),
]


def small_case(id: str) -> SmallCase:
    """By its name."""
    return next(case for case in SMALL_CASES if case.id == id)
