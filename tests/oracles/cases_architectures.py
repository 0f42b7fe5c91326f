"""Tiny networks of every family: perceptrons, convolutional ones, attention, embeddings, recurrent ones."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apoptosis.task import Task
from oracles.building import CLASSES, Net, images, rows, sequences, tokens
from oracles.case import Case, case

__all__ = ["ARCHITECTURE_CASES"]

WIDTH, HEADS = 8, 4


def conv_norm(inputs: int, outputs: int, **options: Any) -> nn.Sequential:
    """Conv, BatchNorm, ReLU in place."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, **options),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def vgg() -> nn.Module:
    """Convs and pools in a row, then layers with dropout."""
    return nn.Sequential(
        conv_norm(2, 3),
        nn.MaxPool2d(2),
        conv_norm(3, 4),
        conv_norm(4, 4),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(4, 5),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(5, CLASSES),
    )


def resnet() -> nn.Module:
    """A residual block with a strided projection shortcut."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = m.bn2(m.conv2(m.first(x)))
        y += m.shortcut(x)
        return m.head(F.adaptive_avg_pool2d(F.relu(y, inplace=True), 1).flatten(1))

    return Net(
        forward,
        stem=conv_norm(2, 3),
        first=conv_norm(3, 4, stride=2),
        conv2=nn.Conv2d(4, 4, 3, padding=1, bias=False),
        bn2=nn.BatchNorm2d(4),
        shortcut=nn.Sequential(nn.Conv2d(3, 4, 1, stride=2, bias=False), nn.BatchNorm2d(4)),
        head=nn.Linear(4, CLASSES),
    )


def densenet() -> nn.Module:
    """Norm, ReLU, conv on everything before, concatenated."""

    def forward(m: Net, x: Tensor) -> Tensor:
        features = [m.stem(x)]
        for norm, conv in zip(m.norms, m.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)))))
        return m.head(F.avg_pool2d(torch.cat(features, 1), 6).flatten(1))

    return Net(
        forward,
        stem=nn.Conv2d(2, 2, 3, padding=1),
        norms=nn.ModuleList(nn.BatchNorm2d(2 + 2 * i) for i in range(3)),
        convs=nn.ModuleList(nn.Conv2d(2 + 2 * i, 2, 3, padding=1, bias=False) for i in range(3)),
        head=nn.Linear(8, CLASSES),
    )


def mobilenet() -> nn.Module:
    """Inverted residual with depthwise conv, squeeze-excite and hard-swish."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = F.hardswish(m.norm(m.expand(x)), inplace=True)
        y = F.hardswish(m.depth(y))
        y = y * F.hardsigmoid(m.grow(F.relu(m.shrink(F.adaptive_avg_pool2d(y, 1)))))
        x = x + m.project(y)
        return m.head(x.mean([2, 3]))

    return Net(
        forward,
        stem=nn.Conv2d(2, 3, 3, stride=2),
        expand=nn.Conv2d(3, 4, 1, bias=False),
        norm=nn.BatchNorm2d(4),
        depth=nn.Conv2d(4, 4, 3, padding=1, groups=4),
        shrink=nn.Conv2d(4, 2, 1),
        grow=nn.Conv2d(2, 4, 1),
        project=nn.Conv2d(4, 3, 1),
        head=nn.Linear(3, CLASSES),
    )


def unet() -> nn.Module:
    """Down, up by a transposed conv, and a skip between."""

    def forward(m: Net, x: Tensor) -> Tensor:
        high = F.leaky_relu(m.enter(x), 0.1)
        low = F.relu(m.down(high))
        return m.leave(torch.cat([high, m.up(low)], 1)).mean((2, 3))

    return Net(
        forward,
        enter=nn.Conv2d(2, 3, 3, padding=1),
        down=nn.Conv2d(3, 4, 2, stride=2),
        up=nn.ConvTranspose2d(4, 3, 2, stride=2),
        leave=nn.Conv2d(6, CLASSES, 3, padding=1),
    )


def mixer() -> nn.Module:
    """Mixing over tokens by a transpose, then over channels."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = x + m.tokens(m.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + m.channels(m.norm2(x))
        return m.head(x.mean(1))

    return Net(
        forward,
        norm1=nn.LayerNorm(6),
        tokens=nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4)),
        norm2=nn.LayerNorm(6),
        channels=nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6)),
        head=nn.Linear(6, CLASSES),
    )


def attention(
    *, groups: int = HEADS, mask: str = "none", rope: bool = False, einsum: bool = False
) -> nn.Module:
    """One attention layer; `groups` key and value heads serve the queries' heads."""
    size = WIDTH // HEADS

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.enter(x)
        q = m.q(x).unflatten(2, (HEADS, size)).transpose(1, 2)
        k = m.k(x).unflatten(2, (groups, size)).transpose(1, 2)
        v = m.v(x).unflatten(2, (groups, size)).transpose(1, 2)
        if rope:
            q, k = rotate(q), rotate(k)
        if einsum:
            weights = torch.einsum("b h i d, b h j d -> b h i j", q, k).mul(size**-0.5).softmax(-1)
            y = torch.einsum("bhij,bhjd->bhid", weights, v)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, **masks(x, mask), enable_gqa=groups != HEADS
            )
        return m.head((x + m.out(y.transpose(1, 2).flatten(2))).mean(1))

    return Net(
        forward,
        enter=nn.Linear(6, WIDTH),
        q=nn.Linear(WIDTH, WIDTH),
        k=nn.Linear(WIDTH, groups * size),
        v=nn.Linear(WIDTH, groups * size, bias=False),
        out=nn.Linear(WIDTH, WIDTH),
        head=nn.Linear(WIDTH, CLASSES),
    )


def masks(x: Tensor, kind: str) -> dict[str, Any]:
    """Keyword arguments of fused attention."""
    length = x.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool).tril() | torch.eye(
        length, dtype=torch.bool
    ).flip(0)
    return {
        "none": {},
        "causal": {"is_causal": True},
        "scaled": {"scale": 0.3},
        "boolean": {"attn_mask": allowed},
        "float": {"attn_mask": torch.where(allowed, 0.3, -1.0).to(x.dtype)},
        "learned": {"attn_mask": x[:, None, :, :length]},
    }[kind]


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding by halves."""
    length, size = x.shape[-2:]
    angles = torch.arange(length, dtype=x.dtype)[:, None] * 100 ** -(
        torch.arange(0, size, 2, dtype=x.dtype) / size
    )
    angles = torch.cat([angles, angles], -1)
    left, right = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-right, left), -1) * angles.sin()


def relative_bias() -> nn.Module:
    """Attention with a learned table of position biases, as Swin writes it."""

    def forward(m: Net, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = m.qkv(x).reshape(len(x), length, 3, 2, 3).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * 3**-0.5) @ k.transpose(-2, -1)
        positions = torch.arange(length)[:, None] - torch.arange(length)[None, :] + length - 1
        scores = scores + m.table[positions.view(-1)].view(length, length, 2).permute(
            2, 0, 1
        ).contiguous().unsqueeze(0)
        return m.head((scores.softmax(-1) @ v).transpose(1, 2).reshape(len(x), length, 6).mean(1))

    return Net(
        forward,
        qkv=nn.Linear(6, 18),
        table=nn.Parameter(torch.randn(7, 2)),
        head=nn.Linear(6, CLASSES),
    )


def cosine_attention() -> nn.Module:
    """Attention on normalised queries and keys with a learned temperature."""

    def forward(m: Net, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        scale = torch.clamp(m.temperature, max=math.log(100)).exp()
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * scale).softmax(-1)
        return m.head((weights @ v).mean(1))

    return Net(
        forward,
        qkv=nn.Linear(6, 18),
        temperature=nn.Parameter(torch.zeros(1, 1)),
        head=nn.Linear(6, CLASSES),
    )


def torch_attention(**options: Any) -> nn.Module:
    """nn.MultiheadAttention; options of its call by `call`."""
    call = options.pop("call", {})
    cross = options.pop("cross", None)

    def forward(m: Net, x: Tensor) -> Tensor:
        memory = x if cross is None else m.memory(x)
        y, weights = m.attention(x, memory, memory, **call)
        y = y if weights is None else y + weights.mean()
        return m.head(y.mean(1))

    attention = nn.MultiheadAttention(6, 2, batch_first=True, **options)
    parts = {} if cross is None else {"memory": nn.Linear(6, cross)}
    return Net(forward, **parts, attention=attention, head=nn.Linear(6, CLASSES))


def encoder(**options: Any) -> nn.Module:
    """nn.TransformerEncoderLayer between two layers."""
    layer = nn.TransformerEncoderLayer(6, 2, 5, batch_first=True, **options)
    return Net(lambda m, x: m.head(m.layer(x).mean(1)), layer=layer, head=nn.Linear(6, CLASSES))


def seq2seq() -> nn.Module:
    """nn.TransformerDecoderLayer on top of an encoder layer."""
    return Net(
        lambda m, x: m.head(m.decoder(x[:, :3], m.encoder(x)).mean(1)),
        encoder=nn.TransformerEncoderLayer(6, 2, 4, batch_first=True, dropout=0.0),
        decoder=nn.TransformerDecoderLayer(6, 2, 3, batch_first=True, dropout=0.0),
        head=nn.Linear(6, CLASSES),
    )


def vit() -> nn.Module:
    """Patches by a strided conv, class token, positions, one pre-norm block."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.positions
        y = m.norm1(x)
        q, k, v = m.qkv(y).reshape(len(x), -1, 3, 2, 3).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + m.gamma * m.out(y)
        x = x + m.down(F.gelu(m.up(m.norm2(x))))
        return m.head(x[:, 0])

    return Net(
        forward,
        patch=nn.Conv2d(2, 6, 3, stride=3),
        token=nn.Parameter(torch.zeros(1, 1, 6)),
        positions=nn.Parameter(torch.randn(1, 5, 6)),
        norm1=nn.LayerNorm(6),
        qkv=nn.Linear(6, 18),
        out=nn.Linear(6, 6),
        gamma=nn.Parameter(torch.ones(6)),
        norm2=nn.LayerNorm(6),
        up=nn.Linear(6, 5),
        down=nn.Linear(5, 6),
        head=nn.Linear(6, CLASSES),
    )


def language_model(*, tied: bool = True) -> nn.Module:
    """Token and position embeddings, one causal block, the output layer tied to the embedding."""

    def forward(m: Net, input_ids: Tensor) -> Tensor:
        x = m.words(input_ids) + m.places(torch.arange(input_ids.shape[1]))
        q, k, v = m.qkv(m.norm(x)).split(6, dim=2)
        x = x + m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return m.read(x)

    net = Net(
        forward,
        words=nn.Embedding(7, 6),
        places=nn.Embedding(5, 6),
        norm=nn.LayerNorm(6),
        qkv=nn.Linear(6, 18),
        out=nn.Linear(6, 6),
        read=nn.Linear(6, 7, bias=False),
    )
    if tied:
        net.read.weight = net.words.weight
    return net


def experts() -> nn.Module:
    """A mixture of experts: the two likeliest serve a token, their results gathered by index."""

    def forward(m: Net, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(F.softmax(m.gate(x), dim=1), 2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for i, expert in enumerate(m.experts):
            token, slot = torch.where(chosen == i)
            y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return m.head(y)

    return Net(
        forward,
        gate=nn.Linear(4, 3),
        experts=nn.ModuleList(
            nn.Sequential(nn.Linear(4, 3), nn.SiLU(), nn.Linear(3, 4)) for _ in range(3)
        ),
        head=nn.Linear(4, CLASSES),
    )


def recurrent(layer: nn.Module, width: int = 4) -> nn.Module:
    """A recurrent layer read at its last step."""
    return Net(
        lambda m, x: m.head(m.layer(m.enter(x))[0][:, -1]),
        enter=nn.Linear(6, 3),
        layer=layer,
        head=nn.Linear(width, CLASSES),
    )


def cells() -> nn.Module:
    """Recurrent cells stepped by hand."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 3)
        g = x.new_zeros(len(x), 3)
        for step in x.unbind(1):
            h, c = m.lstm(step, (h, c))
            g = m.gru(h, g)
        return m.head(g)

    return Net(forward, lstm=nn.LSTMCell(6, 3), gru=nn.GRUCell(3, 3), head=nn.Linear(3, CLASSES))


def bag(mode: str, *, weighted: bool = False) -> nn.Module:
    """An EmbeddingBag under a layer."""

    def forward(m: Net, ids: Tensor) -> Tensor:
        weights = m.importance[ids] if weighted else None
        return m.head(torch.tanh(m.words(ids, per_sample_weights=weights)))

    parts = {"importance": nn.Parameter(torch.randn(7))} if weighted else {}
    return Net(forward, words=nn.EmbeddingBag(7, 4, mode=mode), **parts, head=nn.Linear(4, CLASSES))


def embedding(**options: Any) -> nn.Module:
    """Embeddings averaged under two layers."""
    return Net(
        lambda m, ids: m.head(torch.tanh(m.mix(m.words(ids))).mean(1)),
        words=nn.Embedding(7, 4, **options),
        mix=nn.Linear(4, 4),
        head=nn.Linear(4, CLASSES),
    )


def bilinear() -> nn.Module:
    """nn.Bilinear of two layers."""
    return Net(
        lambda m, x: m.mix(torch.tanh(m.left(x)), m.right(x)),
        left=nn.Linear(4, 3),
        right=nn.Linear(4, 2),
        mix=nn.Bilinear(3, 2, CLASSES),
    )


def _vision() -> list[Case]:
    return [
        case("vgg", vgg, images),
        case("resnet", resnet, images),
        case("resnet-train", resnet, images, train=True, splits=False),
        case("densenet", densenet, images),
        case(
            "mobilenet", mobilenet, images, brute_force=False
        ),  # no double backward of hardsigmoid
        case("unet", unet, images),
        case("mixer", mixer, sequences),
        case("vit", vit, images),
    ]


def _attentions() -> list[Case]:
    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    padded = torch.tensor([[False] * 3 + [True]] * 3)
    return [
        *(
            case(f"attention-{mask}", partial(attention, mask=mask), sequences)
            for mask in ("none", "causal", "scaled", "boolean", "float", "learned")
        ),
        case("attention-gqa", partial(attention, groups=2), sequences),
        case("attention-gqa-causal", partial(attention, groups=1, mask="causal"), sequences),
        case("attention-rope", partial(attention, rope=True), sequences),
        case("attention-einsum", partial(attention, einsum=True), sequences),
        case("attention-relative-bias", relative_bias, sequences),
        case("attention-cosine", cosine_attention, sequences),
        case("multihead", partial(torch_attention, call={"need_weights": False}), sequences),
        case("multihead-weights", torch_attention, sequences),
        case("multihead-causal", partial(torch_attention, call={"attn_mask": causal}), sequences),
        case(
            "multihead-bias-kv",
            partial(torch_attention, add_bias_kv=True, add_zero_attn=True),
            sequences,
        ),
        case("multihead-cross", partial(torch_attention, cross=5, kdim=5, vdim=5), sequences),
        case(
            "multihead-padded",
            partial(torch_attention, call={"key_padding_mask": padded}),
            sequences,
            splits=False,
        ),
        case("encoder-layer", partial(encoder, dropout=0.0), sequences),
        case(
            "encoder-layer-pre-norm",
            partial(encoder, norm_first=True, activation="gelu"),
            sequences,
        ),
        case("encoder-layer-train", partial(encoder, dropout=0.0), sequences, train=True),
        case("encoder-decoder", seq2seq, sequences),
    ]


def _languages() -> list[Case]:
    def texts() -> Tensor:
        return tokens(3)[0]

    return [
        case("language-model-tied", language_model, texts, task=Task.language_model()),
        case(
            "language-model-untied",
            partial(language_model, tied=False),
            texts,
            task=Task.language_model(),
        ),
        case("experts", experts, partial(rows, 6)),
        case("embedding", embedding, tokens),
        # the row of `padding_idx` is zero and has no gradient; a direction that moves it is torch's own ambiguity
        case("embedding-padding", partial(embedding, padding_idx=2), tokens, any_direction=False),
        # torch has no double backward of EmbeddingBag
        case("embedding-bag-mean", partial(bag, "mean"), tokens, brute_force=False),
        case("embedding-bag-sum", partial(bag, "sum"), tokens, brute_force=False),
        case("embedding-bag-max", partial(bag, "max"), tokens, brute_force=False),
        case(
            "embedding-bag-weighted", partial(bag, "sum", weighted=True), tokens, brute_force=False
        ),
        case("bilinear", bilinear, rows),
    ]


def _recurrent() -> list[Case]:
    return [
        case("lstm", lambda: recurrent(nn.LSTM(3, 4, batch_first=True)), sequences),
        case(
            "lstm-two-ways",
            lambda: recurrent(nn.LSTM(3, 2, 2, batch_first=True, bidirectional=True)),
            sequences,
        ),
        case("gru", lambda: recurrent(nn.GRU(3, 4, batch_first=True)), sequences),
        case("rnn-tanh", lambda: recurrent(nn.RNN(3, 4, batch_first=True)), sequences),
        case(
            "rnn-relu",
            lambda: recurrent(nn.RNN(3, 4, batch_first=True, nonlinearity="relu")),
            sequences,
        ),
        case("recurrent-cells", cells, sequences),
    ]


ARCHITECTURE_CASES = [*_vision(), *_attentions(), *_languages(), *_recurrent()]
