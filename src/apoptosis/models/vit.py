"""Vision transformers (Dosovitskiy et al., 2021), with parameters named as in timm.

    image ─ patch_embed ─ [cls_token | patches] + pos_embed ─ blocks ─ norm ─ first token ─ head ─ logits

    block:  x + proj(attention(norm1 x)),  then  x + fc2(gelu(fc1(norm2 x)))

Attention keeps three sizes apart: the number of heads h, the length of a query or key, and that of a value. One layer,
`qkv`, makes all of them, its rows being h·qk_dim + h·qk_dim + h·v_dim, and each size can be cut without the others.
Scores are multiplied by a `scale` that is held, not derived from the size at hand: a network with shorter queries then
computes what the full one would with the missing entries zero.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.errors import ConfigError
from apoptosis.models.weights import seeded

__all__ = [
    "Attention",
    "EncoderBlock",
    "MLPBlock",
    "PatchEmbed",
    "ViT",
    "ViTOptions",
    "cifar_vit",
    "vit",
    "vit_b16",
    "vit_tiny16",
]


@dataclass(frozen=True, kw_only=True)
class ViTOptions:
    """Sizes of a vision transformer, those of ViT-B/16 unless said."""

    image_size: int = 224
    patch_size: int = 16
    width: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_width: int | None = None
    """Of the hidden layers; four times `width` unless given."""
    num_classes: int = 1000

    def __post_init__(self) -> None:
        """Check what has to divide what."""
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"Images of {self.image_size} pixels do not fall into patches of {self.patch_size}. Choose a "
                "patch_size that divides image_size."
            )
        if self.width % self.num_heads:
            raise ConfigError(
                f"A width of {self.width} cannot be shared by {self.num_heads} heads. Choose num_heads that divides "
                "width."
            )

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class PatchEmbed(nn.Module):
    """One token per patch: a linear map of its pixels, written as a convolution."""

    def __init__(self, width: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """`(n, 3, h, w)` to `(n, patches, width)`."""
        return self.proj(images).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention with the sizes of the module docstring."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qk_dim = width // num_heads
        self.v_dim = width // num_heads
        self.scale = self.qk_dim**-0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`(n, tokens, width)` to the same."""
        n, length, _ = x.shape
        heads, qk, v = self.num_heads, self.qk_dim, self.v_dim
        queries, keys, values = self.qkv(x).split([heads * qk, heads * qk, heads * v], dim=-1)
        mixed = F.scaled_dot_product_attention(
            queries.view(n, length, heads, qk).transpose(1, 2),
            keys.view(n, length, heads, qk).transpose(1, 2),
            values.view(n, length, heads, v).transpose(1, 2),
            scale=self.scale,
        )
        return self.proj(mixed.transpose(1, 2).reshape(n, length, heads * v))


class MLPBlock(nn.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """`(n, tokens, width)` to the same."""
        return self.fc2(F.gelu(self.fc1(x)))


class EncoderBlock(nn.Module):
    """Attention and two linear layers, each behind a norm and added to the stream."""

    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLPBlock(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`(n, tokens, width)` to the same."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """The network of the module docstring."""

    def __init__(self, options: ViTOptions) -> None:
        super().__init__()
        width = options.width
        hidden = 4 * width if options.mlp_width is None else options.mlp_width
        self.patch_embed = PatchEmbed(width, options.patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + options.num_patches, width))
        self.blocks = nn.Sequential(
            *(EncoderBlock(width, options.num_heads, hidden) for _ in range(options.depth))
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, options.num_classes)
        _draw_weights_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(n, classes)` of images `(n, 3, image_size, image_size)`."""
        patches = self.patch_embed(images)
        first = self.cls_token.expand(len(patches), -1, -1)
        x = self.blocks(torch.cat([first, patches], dim=1) + self.pos_embed)
        return self.head(self.norm(x)[:, 0])


def _draw_weights_(model: ViT) -> None:
    """N(0, 0.02²) cut off at 2, as transformers commonly start; biases zero, patches as torch draws them."""
    nn.init.trunc_normal_(model.pos_embed, std=0.02)
    nn.init.normal_(model.cls_token, std=1e-6)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


def vit(options: ViTOptions | None = None, *, seed: int = 0) -> ViT:
    """A new vision transformer of those sizes; `seed` alone sets its weights.

    >>> sizes = ViTOptions(image_size=8, patch_size=4, width=12, depth=1, num_heads=3, num_classes=2)
    >>> sum(p.numel() for p in vit(sizes).parameters())
    2594
    """
    with seeded(seed):
        return ViT(options or ViTOptions())


def vit_b16(*, num_classes: int = 1000, seed: int = 0) -> ViT:
    """ViT-B/16 for 224×224 images: 12 blocks, width 768, 12 heads.

    >>> with torch.device("meta"):
    ...     sum(p.numel() for p in vit_b16().parameters())
    86567656
    """
    return vit(ViTOptions(num_classes=num_classes), seed=seed)


def vit_tiny16(*, num_classes: int = 1000, seed: int = 0) -> ViT:
    """ViT-tiny/16 for 224×224 images: 12 blocks, width 192, 3 heads.

    >>> with torch.device("meta"):
    ...     sum(p.numel() for p in vit_tiny16().parameters())
    5717416
    """
    return vit(ViTOptions(width=192, num_heads=3, num_classes=num_classes), seed=seed)


def cifar_vit(*, num_classes: int = 10, seed: int = 0) -> ViT:
    """A small transformer for 32×32 images: patches of 4×4, 6 blocks, width 192, 6 heads.

    >>> sum(p.numel() for p in cifar_vit().parameters())
    2693578
    """
    sizes = ViTOptions(
        image_size=32, patch_size=4, width=192, depth=6, num_heads=6, num_classes=num_classes
    )
    return vit(sizes, seed=seed)
