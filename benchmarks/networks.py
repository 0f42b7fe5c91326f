"""The networks whose cost is measured, written plainly: ordinary modules, nothing that knows of curvature.

- `resnet32`: the CIFAR ResNet32, three stages of five blocks, widths 64/128/256, shortcuts of 1x1 convolution and norm;
- `vit-small`: six layers, dimension 192, three heads, 64 tokens (images of 32 pixels, patches of 4), mean pooling;
- `vit-b`: ViT-B/16 at 224 pixels: twelve layers, dimension 768, twelve heads, 196 tokens and a class token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["NETWORKS", "Network", "ResNet", "VisionTransformer", "settle"]


@dataclass(frozen=True)
class Network:
    """How to build a network, the images it takes, and the batch sizes it is measured with."""

    build: Callable[[], nn.Module]
    pixels: int
    num_classes: int
    cpu_batch: int
    cuda_batch: int


class Block(nn.Module):
    """Two 3x3 convolutions with norms, and a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Identity()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A CIFAR ResNet of 6·`blocks` + 2 layers."""

    def __init__(self, widths: tuple[int, ...], blocks: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        layers: list[nn.Module] = []
        width_in = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(Block(width_in, width, 2 if stage and not block else 1))
                width_in = width
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(width_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Attention(nn.Module):
    """Self-attention with one joint projection for queries, keys and values."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(samples, tokens, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(samples, tokens, dim))


class Layer(nn.Module):
    """A transformer layer with the norms in front."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@dataclass(frozen=True)
class Shape:
    """Sizes of a vision transformer."""

    pixels: int
    patch: int
    dim: int
    depth: int
    heads: int
    class_token: bool


class VisionTransformer(nn.Module):
    """Patches, learnt positions, `depth` layers, and a linear head on the class token or on the mean token."""

    def __init__(self, shape: Shape, num_classes: int) -> None:
        super().__init__()
        tokens = (shape.pixels // shape.patch) ** 2 + shape.class_token
        self.embed = nn.Conv2d(3, shape.dim, shape.patch, shape.patch)
        self.token = (
            nn.Parameter(torch.randn(1, 1, shape.dim) * 0.02) if shape.class_token else None
        )
        self.positions = nn.Parameter(torch.randn(1, tokens, shape.dim) * 0.02)
        self.layers = nn.Sequential(*(Layer(shape.dim, shape.heads) for _ in range(shape.depth)))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.norm(self.layers(x + self.positions))
        return self.head(x.mean(1) if self.token is None else x[:, 0])


def settle(model: nn.Module, x: Tensor) -> nn.Module:
    """Put the statistics of `x` into every BatchNorm, for activations of usual size; leave in eval mode."""
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            model.train()(x)
    for norm in norms:
        norm.momentum = 0.1
    return model.eval()


_SMALL = Shape(pixels=32, patch=4, dim=192, depth=6, heads=3, class_token=False)
_BASE = Shape(pixels=224, patch=16, dim=768, depth=12, heads=12, class_token=True)

NETWORKS: dict[str, Network] = {
    "resnet32": Network(lambda: ResNet((64, 128, 256), 5, 10), 32, 10, 32, 256),
    "vit-small": Network(lambda: VisionTransformer(_SMALL, 10), 32, 10, 64, 256),
    "vit-b": Network(lambda: VisionTransformer(_BASE, 1000), 224, 1000, 4, 64),
}
