"""Small networks twice: as a module, and written out as a function with every operation marked (see
`frozen`).

What counts as a product, decided once (docs/method.md): weight × input of layers, γ × normalised
input of norms, left × right of a matrix or elementwise product. What does not: divisions, powers, a
tensor times itself, activations, softmax, normalisation, pooling; and everything inside a module
whose class name ends in `Norm`, except the product with its weight.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles.building import Net, built, images, rows, sequences, tokens
from oracles.frozen import Plain

__all__ = ["NETWORKS", "Written"]

P = dict[str, Tensor]
CLASSES = 3


@dataclass(frozen=True)
class Written:
    """A module, its batch, and the same network as a function of its parameters."""

    id: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Any]
    net: Callable[[P, Any, Plain], Tensor]
    ordered: bool = True  # parameters are named in the order of the forward, each used once


def linear(p: P, name: str, x: Tensor) -> Tensor:
    """Weight × input + bias."""
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def conv(p: P, name: str, x: Tensor, **options: Any) -> Tensor:
    """Weight × input + bias."""
    return F.conv2d(x, p[f"{name}.weight"], p.get(f"{name}.bias"), **options)


def affine(p: P, name: str, x: Tensor, dim: int = -1) -> Tensor:
    """γ × x + β along `dim`."""
    shape = [1] * x.dim()
    shape[dim] = -1
    y = p[f"{name}.weight"].view(shape) * x
    return y + p[f"{name}.bias"].view(shape) if f"{name}.bias" in p else y


def standardised(x: Tensor, dims: tuple[int, ...], eps: float = 1e-5) -> Tensor:
    """(x − μ)/σ over `dims`."""
    centred = x - x.mean(dims, keepdim=True)
    return centred / (centred.pow(2).mean(dims, keepdim=True) + eps).sqrt()


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x over its root mean square."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


# --- multilayer perceptrons ------------------------------------------------------------------------------------------


def mlp(activation: Callable[[Tensor], Tensor], *, bias: bool = True) -> tuple[Callable, Callable]:
    """Three layers with one activation between them."""

    def make() -> nn.Module:
        return Net(
            lambda m, x: m.c(activation(m.b(activation(m.a(x))))),
            a=nn.Linear(4, 5, bias=bias),
            b=nn.Linear(5, 4, bias=bias),
            c=nn.Linear(4, CLASSES, bias=bias),
        )

    def net(p: P, x: Tensor, ops: Plain) -> Tensor:
        x = ops.frozen(activation, linear(p, "a", x))
        return linear(p, "c", ops.frozen(activation, linear(p, "b", x)))

    return make, net


def between(
    module: Callable[[Net, Tensor], Tensor],
    net: Callable[[P, Tensor, Plain], Tensor],
    width: int = 4,
    **parts: Any,
) -> tuple[Callable, Callable]:
    """Linear → something of width 4 → linear, where the something is given both ways; parts by factory."""

    def make() -> nn.Module:
        made = {name: factory() for name, factory in parts.items()}
        return Net(
            lambda m, x: m.head(module(m, m.stem(x))),
            stem=nn.Linear(4, 4),
            **made,
            head=nn.Linear(width, CLASSES),
        )

    return make, lambda p, x, ops: linear(p, "head", net(p, linear(p, "stem", x), ops))


class HandWrittenNorm(nn.Module):
    """Root-mean-square normalisation as models write it themselves."""

    def __init__(self, width: int, *, square: str = "pow", order: str = "weight first") -> None:
        """`square` and `order` choose between the ways it is written."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.square, self.order = square, order

    def forward(self, x: Tensor) -> Tensor:
        """Weight × x / rms(x)."""
        squares = x.pow(2) if self.square == "pow" else x * x
        x = x * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)
        return self.weight * x if self.order == "weight first" else x * self.weight


def hand_norm_net(p: P, x: Tensor, ops: Plain) -> Tensor:
    """The whole module is one operation, except the product with its weight."""
    return p["norm.weight"] * ops.frozen(rms, x)


def swiglu_net(p: P, x: Tensor, ops: Plain) -> Tensor:
    """The down projection is the head; SiLU is frozen, gate × up counts."""
    gate, up = ops.frozen(F.silu, linear(p, "gate", x)), linear(p, "up", x)
    return ops.product(torch.mul, gate, up)


def inline_rms(_: Net, x: Tensor) -> Tensor:
    """The same normalisation outside any norm module."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def inline_rms_net(_: P, x: Tensor, ops: Plain) -> Tensor:
    """x × rsqrt(...) is a product of two things that depend on θ; the power and the root are frozen."""
    return ops.product(
        torch.mul, x, ops.frozen(lambda v: torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6), x)
    )


def only_frozen(f: Callable[[Tensor], Tensor]) -> Callable[[P, Tensor, Plain], Tensor]:
    """The something is one frozen operation."""
    return lambda _, x, ops: ops.frozen(f, x)


def halves(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    """The something takes the two halves of x."""
    return lambda _, x: f(*x.chunk(2, dim=-1))


# --- convolutions ----------------------------------------------------------------------------------------------------


def residual() -> nn.Module:
    """Conv, BatchNorm, ReLU with a shortcut around the second conv."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.bn1(m.conv1(x)))
        x = F.relu(x + m.bn2(m.conv2(x)))
        return m.head(x.mean((2, 3)))

    return Net(
        forward,
        conv1=nn.Conv2d(2, 3, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(3),
        conv2=nn.Conv2d(3, 3, 3, padding=1, bias=False),
        bn2=nn.BatchNorm2d(3),
        head=nn.Linear(3, CLASSES),
    )


def residual_net(p: P, x: Tensor, ops: Plain, *, stats: dict[str, Tensor] | None) -> Tensor:
    """`stats` of eval mode are constants; in train mode (None) the batch's own are part of the frozen normalisation."""

    def norm(name: str, v: Tensor) -> Tensor:
        if stats is None:
            return affine(p, name, ops.frozen(partial(standardised, dims=(0, 2, 3)), v), dim=1)
        mean, var = stats[f"{name}.running_mean"], stats[f"{name}.running_var"]
        return affine(
            p, name, (v - mean.view(1, -1, 1, 1)) / (var.view(1, -1, 1, 1) + 1e-5).sqrt(), dim=1
        )

    x = ops.frozen(F.relu, norm("bn1", conv(p, "conv1", x, padding=1)))
    x = ops.frozen(F.relu, x + norm("bn2", conv(p, "conv2", x, padding=1)))
    return linear(p, "head", x.mean((2, 3)))


def residual_eval_net(p: P, x: Tensor, ops: Plain) -> Tensor:
    """Eval mode, with the statistics that `built` gives the module."""
    return residual_net(p, x, ops, stats=dict(built(residual).named_buffers()))


def squeeze_excite() -> nn.Module:
    """A conv gated per channel by a small network of its own mean."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.conv(x))
        gate = torch.sigmoid(m.grow(F.relu(m.shrink(x.mean((2, 3), keepdim=True)))))
        return m.head((x * gate).flatten(2).mean(2))

    return Net(
        forward,
        conv=nn.Conv2d(2, 4, 3),
        shrink=nn.Conv2d(4, 2, 1),
        grow=nn.Conv2d(2, 4, 1),
        head=nn.Linear(4, CLASSES),
    )


def squeeze_excite_net(p: P, x: Tensor, ops: Plain) -> Tensor:
    """Channel × gate counts."""
    x = ops.frozen(F.relu, conv(p, "conv", x))
    gate = ops.frozen(F.relu, conv(p, "shrink", x.mean((2, 3), keepdim=True)))
    gate = ops.frozen(torch.sigmoid, conv(p, "grow", gate))
    return linear(p, "head", ops.product(torch.mul, x, gate).mean((2, 3)))


def up_and_down() -> nn.Module:
    """Depthwise conv, pointwise conv, max-pool, transposed conv."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.Conv2d(4, 3, 1),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(3, 2, 3, stride=2, output_padding=1),
        nn.ELU(),
        nn.Flatten(),
        nn.Linear(2 * 8 * 8, CLASSES),
    )


def up_and_down_net(p: P, x: Tensor, ops: Plain) -> Tensor:
    """Choosing a maximum is frozen: it is linear between ties."""
    x = ops.frozen(F.relu, conv(p, "0", x, padding=1, groups=2))
    x = ops.frozen(lambda v: F.max_pool2d(v, 2), conv(p, "2", x))
    x = F.conv_transpose2d(x, p["4.weight"], p["4.bias"], stride=2, output_padding=1)
    return linear(p, "7", ops.frozen(F.elu, x).flatten(1))


def channel_norms() -> nn.Module:
    """GroupNorm and an affine InstanceNorm."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 3, 1),
        nn.InstanceNorm2d(3, affine=True),
        nn.Flatten(),
        nn.Linear(3 * 4 * 4, CLASSES),
    )


def channel_norms_net(p: P, x: Tensor, ops: Plain) -> Tensor:
    """Normalisation frozen, affine counts."""

    def grouped(v: Tensor) -> Tensor:
        return standardised(v.unflatten(1, (2, 2)), (2, 3, 4)).flatten(1, 2)

    x = affine(p, "1", ops.frozen(grouped, conv(p, "0", x)), dim=1)
    x = conv(p, "3", ops.frozen(torch.tanh, x))
    return linear(
        p, "6", affine(p, "4", ops.frozen(partial(standardised, dims=(2, 3)), x), dim=1).flatten(1)
    )


# --- attention and embeddings ----------------------------------------------------------------------------------------

HEADS, WIDTH = 2, 6


def heads_apart(x: Tensor) -> Tensor:
    """(N, T, D) → (N, H, T, D/H)."""
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2)


def attention_net(q: Tensor, k: Tensor, v: Tensor, ops: Plain, *, causal: bool = False) -> Tensor:
    """Softmax frozen; queries × keys and weights × values count."""
    scale = 1 / math.sqrt(q.shape[-1])
    scores = ops.product(lambda a, b: a @ b.transpose(-2, -1) * scale, q, k)

    def weights(s: Tensor) -> Tensor:
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -math.inf)
        return s.softmax(-1)

    return ops.product(torch.matmul, ops.frozen(weights, scores), v)


def transformer(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> nn.Module:
    """One pre-norm block: attention and a GELU perceptron, both residual."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.norm1(x)
        q, k, v = (heads_apart(part(y)) for part in (m.q, m.k, m.v))
        x = x + m.out(attend(q, k, v).transpose(1, 2).flatten(2))
        x = x + m.down(F.gelu(m.up(m.norm2(x))))
        return m.head(x.mean(1))

    return Net(
        forward,
        norm1=nn.LayerNorm(WIDTH),
        q=nn.Linear(WIDTH, WIDTH),
        k=nn.Linear(WIDTH, WIDTH),
        v=nn.Linear(WIDTH, WIDTH),
        out=nn.Linear(WIDTH, WIDTH),
        norm2=nn.LayerNorm(WIDTH),
        up=nn.Linear(WIDTH, 4),
        down=nn.Linear(4, WIDTH),
        head=nn.Linear(WIDTH, CLASSES),
    )


def transformer_net(p: P, x: Tensor, ops: Plain, *, causal: bool = False) -> Tensor:
    """LayerNorm's normalisation, softmax and GELU frozen."""
    norm = partial(standardised, dims=(-1,))
    y = affine(p, "norm1", ops.frozen(norm, x))
    q, k, v = (heads_apart(linear(p, name, y)) for name in "qkv")
    x = x + linear(p, "out", attention_net(q, k, v, ops, causal=causal).transpose(1, 2).flatten(2))
    y = affine(p, "norm2", ops.frozen(norm, x))
    x = x + linear(p, "down", ops.frozen(F.gelu, linear(p, "up", y)))
    return linear(p, "head", x.mean(1))


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as matrix products and softmax."""
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as einsums and softmax."""
    scores = torch.einsum("nhqd,nhkd->nhqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("nhqk,nhkd->nhqd", F.softmax(scores, dim=-1), v)


def packed_attention() -> nn.Module:
    """torch's own multi-head attention, whose three projections are one parameter."""
    return Net(
        lambda m, x: m.head(m.attention(x, x, x, need_weights=False)[0].mean(1)),
        attention=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        head=nn.Linear(WIDTH, CLASSES),
    )


def packed_attention_net(p: P, x: Tensor, ops: Plain) -> Tensor:
    """The same, projections apart."""
    packed = x @ p["attention.in_proj_weight"].T + p["attention.in_proj_bias"]
    q, k, v = (heads_apart(part) for part in packed.chunk(3, dim=-1))
    x = attention_net(q, k, v, ops).transpose(1, 2).flatten(2)
    return linear(p, "head", linear(p, "attention.out_proj", x).mean(1))


def tied_embedding() -> nn.Module:
    """An embedding read by a layer and read again as the output layer."""
    return Net(
        lambda m, x: torch.tanh(m.mix(m.words(x).mean(1))) @ m.words.weight.T,
        words=nn.Embedding(7, 4),
        mix=nn.Linear(4, 4),
    )


def tied_embedding_net(p: P, x: Tensor, ops: Plain) -> Tensor:
    """Looking up is linear in the table; the table times the last activation counts."""
    x = ops.frozen(torch.tanh, linear(p, "mix", p["words.weight"][x].mean(1)))
    return x @ p["words.weight"].T


def autoencoder() -> nn.Module:
    """One matrix used forwards and transposed."""
    weight = nn.Parameter(torch.randn(4, 4) / 2)
    return Net(
        lambda m, x: m.head(F.linear(F.relu(F.linear(x, m.weight, m.bias)), m.weight.t())),
        weight=weight,
        bias=nn.Parameter(torch.zeros(4)),
        head=nn.Linear(4, CLASSES),
    )


def autoencoder_net(p: P, x: Tensor, ops: Plain) -> Tensor:
    """W × relu(W × x): a path with the same factor twice."""
    return linear(p, "head", ops.frozen(F.relu, x @ p["weight"].T + p["bias"]) @ p["weight"])


def _written(
    id: str, pair: tuple[Callable, Callable], batch: Callable[[], Any], **options: Any
) -> Written:
    make, net = pair
    train = options.pop("train", False)
    return Written(id, partial(built, make, train=train), batch, net, **options)


def _vectors() -> list[Written]:
    def case(id: str, pair: tuple[Callable, Callable], **options: Any) -> Written:
        return _written(id, pair, rows, **options)

    gate = {"gate": partial(nn.Linear, 4, 4), "up": partial(nn.Linear, 4, 4)}
    hand = partial(HandWrittenNorm, 4)
    return [
        case("mlp-relu", mlp(F.relu)),
        case("mlp-relu-bias-free", mlp(F.relu, bias=False)),
        case("mlp-gelu", mlp(F.gelu)),
        case("mlp-tanh", mlp(torch.tanh)),
        case("mlp-softplus", mlp(F.softplus)),
        case(
            "layer-norm",
            between(
                lambda m, x: m.norm(x),
                lambda p, x, ops: affine(
                    p, "norm", ops.frozen(partial(standardised, dims=(-1,)), x)
                ),
                norm=partial(nn.LayerNorm, 4),
            ),
        ),
        case(
            "rms-norm-module",
            between(lambda m, x: m.norm(x), hand_norm_net, norm=partial(nn.RMSNorm, 4, eps=1e-6)),
        ),
        case(
            "rms-norm-function",
            between(
                lambda m, x: F.rms_norm(x, (4,), m.weight, 1e-6),
                lambda p, x, ops: p["weight"] * ops.frozen(rms, x),
                weight=lambda: nn.Parameter(torch.ones(4)),
            ),
            ordered=False,
        ),
        case("hand-norm-pow", between(lambda m, x: m.norm(x), hand_norm_net, norm=hand)),
        case(
            "hand-norm-times-itself",
            between(
                lambda m, x: m.norm(x),
                hand_norm_net,
                norm=partial(hand, square="times", order="last"),
            ),
        ),
        case("rms-inline", between(inline_rms, inline_rms_net)),
        case("swiglu", between(lambda m, x: F.silu(m.gate(x)) * m.up(x), swiglu_net, **gate)),
        case(
            "glu",
            between(
                lambda m, x: F.glu(m.wide(x)),
                lambda p, x, ops: _glu_net(linear(p, "wide", x), ops),
                wide=partial(nn.Linear, 4, 8),
            ),
        ),
        case(
            "swish-by-hand",
            between(
                lambda _, x: x * torch.sigmoid(x),
                lambda _, x, ops: ops.product(torch.mul, x, ops.frozen(torch.sigmoid, x)),
            ),
        ),
        case("times-itself", between(lambda _, x: x * x, only_frozen(torch.square))),
        case("power", between(lambda _, x: x**3, only_frozen(lambda x: x**3))),
        case("square", between(lambda _, x: x.square(), only_frozen(torch.square))),
        case(
            "division",
            between(
                halves(lambda a, b: a / (2 + torch.tanh(b))),
                lambda _, x, ops: ops.frozen(lambda v: v[:, :2] / (2 + torch.tanh(v[:, 2:])), x),
                width=2,
            ),
        ),
        case(
            "product-of-halves",
            between(
                halves(torch.mul),
                lambda _, x, ops: ops.product(torch.mul, x[:, :2], x[:, 2:]),
                width=2,
            ),
        ),
        case(
            "outer",
            between(
                halves(lambda a, b: (a[:, :, None] * b[:, None, :]).flatten(1)),
                lambda _, x, ops: ops.product(
                    lambda a, b: torch.einsum("ni,nj->nij", a, b), x[:, :2], x[:, 2:]
                ).flatten(1),
            ),
        ),
        case(
            "detached-gate",
            between(lambda _, x: x * torch.sigmoid(x).detach(), _detached_gate_net()),
        ),
        case(
            "layer-scale",
            between(
                lambda m, x: x + m.scale * torch.tanh(x),
                lambda p, x, ops: x + p["scale"] * ops.frozen(torch.tanh, x),
                scale=lambda: nn.Parameter(torch.ones(4)),
            ),
            ordered=False,
        ),
        case(
            "prelu",
            between(
                lambda m, x: m.slope(x),
                lambda p, x, ops: (
                    ops.frozen(F.relu, x) - p["slope.weight"] * ops.frozen(F.relu, -x)
                ),
                slope=partial(nn.PReLU, 4),
            ),
        ),
        case(
            "addcmul",
            between(
                halves(lambda a, b: torch.addcmul(a, a, b, value=0.5)),
                lambda _, x, ops: x[:, :2] + 0.5 * ops.product(torch.mul, x[:, :2], x[:, 2:]),
                width=2,
            ),
        ),
        case(
            "tensordot",
            between(
                halves(
                    lambda a, b: torch.tensordot(a, b, dims=([0], [0])).flatten().expand(len(a), -1)
                ),
                lambda _, x, ops: ops.product(
                    lambda a, b: (a.T @ b).flatten(), x[:, :2], x[:, 2:]
                ).expand(len(x), -1),
            ),
        ),
        case(
            "einsum-of-three",
            between(
                lambda m, x: torch.einsum("ni,nj,ij->nj", x, m.other(x), m.form),
                lambda p, x, _: (x @ p["form"]) * linear(p, "other", x),
                other=partial(nn.Linear, 4, 4),
                form=lambda: nn.Parameter(torch.randn(4, 4)),
            ),
            ordered=False,
        ),
        case(
            "bilinear",
            between(
                lambda m, x: m.mix(torch.tanh(x), m.other(x)),
                lambda p, x, ops: (
                    torch.einsum(
                        "ni,oij,nj->no",
                        ops.frozen(torch.tanh, x),
                        p["mix.weight"],
                        linear(p, "other", x),
                    )
                    + p["mix.bias"]
                ),
                other=partial(nn.Linear, 4, 2),
                mix=partial(nn.Bilinear, 4, 2, 4),
            ),
            ordered=False,
        ),
        case(
            "baddbmm",
            between(
                lambda _, x: torch.baddbmm(
                    x.view(-1, 2, 2), x.tanh().view(-1, 2, 2), x.view(-1, 2, 2), beta=0.5
                ).flatten(1),
                lambda _, x, ops: (
                    0.5 * x
                    + ops.product(
                        torch.bmm, ops.frozen(torch.tanh, x).view(-1, 2, 2), x.view(-1, 2, 2)
                    ).flatten(1)
                ),
            ),
        ),
        case("autoencoder", (autoencoder, autoencoder_net), ordered=False),
        _written(
            "tied-embedding",
            (tied_embedding, tied_embedding_net),
            partial(tokens, 3),
            ordered=False,
        ),
    ]


def _glu_net(x: Tensor, ops: Plain) -> Tensor:
    return ops.product(torch.mul, x[:, :4], ops.frozen(torch.sigmoid, x[:, 4:]))


def _detached_gate_net() -> Callable[[P, Tensor, Plain], Tensor]:
    """The gate is a constant: what the recording run saw, as a frozen operation without derivative keeps it."""
    return lambda _, x, ops: x * ops.frozen(lambda v: torch.sigmoid(v).detach() + 0 * v, x)


def _images() -> list[Written]:
    def train_net(p: P, x: Tensor, ops: Plain) -> Tensor:
        return residual_net(p, x, ops, stats=None)

    return [
        _written("conv-bn-residual", (residual, residual_eval_net), images),
        _written("conv-bn-train", (residual, train_net), images, train=True),
        _written("squeeze-excite", (squeeze_excite, squeeze_excite_net), images),
        _written("depthwise-pool-transposed", (up_and_down, up_and_down_net), images),
        _written("group-and-instance-norm", (channel_norms, channel_norms_net), images),
    ]


def _attention() -> list[Written]:
    sdpa = F.scaled_dot_product_attention
    return [
        _written("attention-by-hand", (partial(transformer, by_hand), transformer_net), sequences),
        _written("attention-einsum", (partial(transformer, by_einsum), transformer_net), sequences),
        _written("attention-fused", (partial(transformer, sdpa), transformer_net), sequences),
        _written(
            "attention-causal",
            (
                partial(transformer, partial(sdpa, is_causal=True)),
                partial(transformer_net, causal=True),
            ),
            sequences,
        ),
        _written("multihead-attention", (packed_attention, packed_attention_net), sequences),
    ]


NETWORKS = [*_vectors(), *_images(), *_attention()]
