"""Random small networks: blocks that keep (N, 4, 4, 4) images, then blocks that keep (N, 16, 4)."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from oracles.building import CLASSES, Net, built, images

__all__ = ["Architecture", "architectures"]

WIDTH = 4
ACTIVATIONS = (
    "relu",
    "gelu",
    "silu",
    "tanh",
    "hardswish",
    "softplus",
    "leaky_relu",
    "elu",
    "mish",
    "sigmoid",
)
IMAGE_NORMS = ("batch", "group", "instance", "layer", "plain")
TOKEN_NORMS = ("layer", "rms", "plain")

Block = tuple[Any, ...]  # a name and its settings; a composite block holds a tuple of blocks


@dataclass(frozen=True)
class Architecture:
    """A network as a value: what hypothesis draws, shrinks and prints."""

    image_blocks: tuple[Block, ...]
    token_blocks: tuple[Block, ...]
    seed: int

    def make_model(self) -> nn.Module:
        """The network in eval mode, float64."""

        def make() -> nn.Module:
            def forward(m: Net, x: Tensor) -> Tensor:
                x = m.body(m.stem(x))
                return m.head(m.tokens(x.flatten(2).transpose(1, 2)).mean(1))

            return Net(
                forward,
                stem=nn.Conv2d(2, WIDTH, 3, stride=2, padding=1),
                body=nn.Sequential(*map(image_block, self.image_blocks)),
                tokens=nn.Sequential(*map(token_block, self.token_blocks)),
                head=nn.Linear(WIDTH, CLASSES),
            )

        return built(make, seed=self.seed)

    def make_batch(self) -> tuple[Tensor, Tensor]:
        """Two images."""
        return images(2, 2, 8, seed=self.seed)


def image_block(block: Block) -> nn.Module:  # noqa: C901  one line per kind of block
    """A module that keeps (N, 4, 4, 4)."""
    match block:
        case ("conv", kernel, groups, bias):
            return nn.Conv2d(WIDTH, WIDTH, kernel, padding=kernel // 2, groups=groups, bias=bias)
        case ("up-down", pool):
            down = nn.MaxPool2d(2) if pool == "max" else nn.AvgPool2d(2)
            return nn.Sequential(down, nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2))
        case ("activation", name):
            return activation(name)
        case ("norm", "batch"):
            return nn.BatchNorm2d(WIDTH)
        case ("norm", "group"):
            return nn.GroupNorm(2, WIDTH)
        case ("norm", "instance"):
            return nn.InstanceNorm2d(WIDTH, affine=True)
        case ("norm", "layer"):
            return nn.LayerNorm([WIDTH, 4, 4])
        case ("norm", "plain"):
            return nn.GroupNorm(1, WIDTH, affine=False)
        case ("residual", blocks):
            inner = nn.Sequential(*map(image_block, blocks))
            return Net(lambda m, x: x + m.inner(x), inner=inner)
        case ("dense", blocks):
            inner = nn.Sequential(*map(image_block, blocks))
            return Net(
                lambda m, x: m.fuse(torch.cat([x, m.inner(x)], 1)),
                inner=inner,
                fuse=nn.Conv2d(2 * WIDTH, WIDTH, 1),
            )
        case ("gate",):
            return Net(
                lambda m, x: x * torch.sigmoid(m.gate(x.mean((2, 3), keepdim=True))),
                gate=nn.Conv2d(WIDTH, WIDTH, 1),
            )
    raise ValueError(block)


def token_block(block: Block) -> nn.Module:
    """A module that keeps (N, 16, 4)."""
    match block:
        case ("linear", bias):
            return nn.Linear(WIDTH, WIDTH, bias=bias)
        case ("activation", name):
            return activation(name)
        case ("norm", "layer"):
            return nn.LayerNorm(WIDTH)
        case ("norm", "rms"):
            return nn.RMSNorm(WIDTH, eps=1e-6)
        case ("norm", "plain"):
            return nn.LayerNorm(WIDTH, elementwise_affine=False)
        case ("attention", heads, causal, fused):
            return Attention(heads, causal=causal, fused=fused)
        case ("gated", name):
            return Net(
                lambda m, x: m.down(m.act(m.gate(x)) * m.up(x)),
                act=activation(name),
                gate=nn.Linear(WIDTH, 3),
                up=nn.Linear(WIDTH, 3, bias=False),
                down=nn.Linear(3, WIDTH),
            )
        case ("residual", blocks):
            return Net(lambda m, x: x + m.inner(x), inner=nn.Sequential(*map(token_block, blocks)))
    raise ValueError(block)


class Attention(nn.Module):
    """Self-attention with packed projections."""

    def __init__(self, heads: int, *, causal: bool, fused: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads, self.causal, self.fused = heads, causal, fused

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, D) → (N, T, D)."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.mT * q.shape[-1] ** -0.5
            if self.causal:
                hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, float("-inf"))
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


def activation(name: str) -> nn.Module:
    """The function of that name as a module."""
    return Net(lambda _, x: getattr(F, name)(x) if hasattr(F, name) else getattr(torch, name)(x))


def architectures() -> st.SearchStrategy[Architecture]:
    """Up to three image blocks and two token blocks."""
    act = st.tuples(st.just("activation"), st.sampled_from(ACTIVATIONS))
    image = st.one_of(
        st.tuples(
            st.just("conv"), st.sampled_from((1, 3)), st.sampled_from((1, 2, 4)), st.booleans()
        ),
        act,
        st.tuples(st.just("norm"), st.sampled_from(IMAGE_NORMS)),
        st.tuples(st.just("up-down"), st.sampled_from(("max", "mean"))),
        st.just(("gate",)),
    )
    token = st.one_of(
        st.tuples(st.just("linear"), st.booleans()),
        act,
        st.tuples(st.just("norm"), st.sampled_from(TOKEN_NORMS)),
        st.tuples(st.just("attention"), st.sampled_from((1, 2)), st.booleans(), st.booleans()),
        st.tuples(st.just("gated"), st.sampled_from(ACTIVATIONS)),
    )
    nested_image = image | st.tuples(
        st.sampled_from(("residual", "dense")), st.lists(image, min_size=1, max_size=3).map(tuple)
    )
    nested_token = token | st.tuples(
        st.just("residual"), st.lists(token, min_size=1, max_size=3).map(tuple)
    )
    return st.builds(
        Architecture,
        st.lists(nested_image, max_size=3).map(tuple),
        st.lists(nested_token, max_size=2).map(tuple),
        st.integers(0, 1000),
    )
