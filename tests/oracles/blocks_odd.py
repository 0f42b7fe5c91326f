"""Blocks of random networks that do what is rarely done: batch folded into other axes, filters made by the network,
windows, norms over everything, parametrised modules, states of recurrent cells."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from oracles.random_choice import Block, Unfit, block


@block(4)
class Windows(Block):
    """Swin: windows of 2 × 2 become a batch of their own; each head has a learnt bias."""

    def __init__(self, shape, pick):
        super().__init__()
        c, h, w = shape
        if h % 2 or w % 2:
            raise Unfit("odd space")
        self.heads, self.d, self.shift = pick.of(1, 2, 3), pick.of(2, 4), pick.coin()
        self.qkv = nn.Linear(c, 3 * self.heads * self.d)
        self.bias = nn.Parameter(torch.randn(self.heads, 4, 4))
        self.out, self.by_mask = nn.Linear(self.heads * self.d, c), pick.coin()

    def forward(self, x):
        n, c, h, w = x.shape
        y = x.permute(0, 2, 3, 1)
        if self.shift:
            y = torch.roll(y, (-1, -1), (1, 2))
        y = y.reshape(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        y = self.qkv(y).view(-1, 4, 3, self.heads, self.d).permute(2, 0, 3, 1, 4)
        q, k, v = y[0], y[1], y[2]
        if self.by_mask:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        else:
            y = ((q * self.d**-0.5) @ k.transpose(-2, -1) + self.bias).softmax(-1) @ v
        y = self.out(y.transpose(1, 2).flatten(2)).view(n, h // 2, w // 2, 2, 2, c)
        return x + y.permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w)


@block(4)
class DynamicFilters(Block):
    """Depthwise filters that depend on the input: batch and channels are the groups of one convolution."""

    def __init__(self, shape, pick):
        super().__init__()
        self.mix, self.act = nn.Conv2d(shape[0], pick.size(*shape), 1), pick.act()
        self.kernel = nn.Linear(shape[0], 9 * self.mix.out_channels)

    def forward(self, x):
        n, _, h, w = x.shape
        kernel = self.act(self.kernel(x.mean((2, 3)))).reshape(-1, 1, 3, 3)
        y = self.mix(x)
        c = y.shape[1]
        y = F.conv2d(y.reshape(1, n * c, h, w), kernel, padding=1, groups=n * c)
        return y.view(n, c, h, w)


@block(4)
class OddNorms(Block):
    """Norms over channels and space at once, over neighbouring channels, by hand."""

    def __init__(self, shape, pick):
        super().__init__()
        self.mix, self.act = nn.Conv2d(shape[0], pick.size(*shape), 1), pick.act()
        c = self.mix.out_channels
        self.way = pick.of("all", "response", "hand", "space", "prelu", "grn")
        self.norm = nn.LayerNorm([c, *shape[1:]])
        self.prelu = nn.PReLU(c)
        self.gain = nn.Parameter(torch.randn(1, c, 1, 1))

    def forward(self, x):
        x = self.act(self.mix(x))
        match self.way:
            case "all":
                return self.norm(x)
            case "response":
                return F.local_response_norm(x, 3)
            case "hand":
                mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
                return (x - mean) / (var + 1e-5).sqrt() * self.gain
            case "space":
                return F.layer_norm(x, x.shape[2:]) * self.gain
            case "prelu":
                return self.prelu(x - 0.1)
            case _:
                length = x.norm(p=2, dim=(2, 3), keepdim=True)
                return x * self.gain * (length / (length.mean(1, keepdim=True) + 1e-6)) + x


@block(4)
class UpAndDown(Block):
    """A small U-Net: down, up by a depthwise transposed convolution, and a shortcut across."""

    def __init__(self, shape, pick):
        super().__init__()
        if min(shape[1:]) < 4:
            raise Unfit("too small")
        a, b = pick.size(*shape), pick.size(*shape)
        self.a, self.b = nn.Conv2d(shape[0], a, 3, padding=1), nn.Conv2d(a, b, 2, stride=2)
        self.up = nn.ConvTranspose2d(b, b, 2, stride=2, groups=pick.of(1, b))
        self.joined, self.act = pick.coin(), pick.act()
        self.c = nn.Conv2d(a + b if self.joined else b, shape[0], 1)

    def forward(self, x):
        wide = self.act(self.a(x))
        y = self.act(self.up(self.b(wide)))
        y = F.interpolate(y, size=x.shape[2:], mode="bilinear")
        return self.c(torch.cat([wide, y], 1) if self.joined else y)


@block(3, counted=False)  # spectral norms are matrix times vector
class Parametrised(Block):
    """torch's own reparametrisations."""

    def __init__(self, shape, pick):
        super().__init__()
        wide = pick.size(*shape)
        self.a, self.b = nn.Linear(shape[-1], wide), nn.Linear(wide, pick.size(*shape))
        self.act, way = pick.act(), pick.of("weight", "rows", "spectral")
        if way == "weight":
            parametrizations.weight_norm(self.a)
            parametrizations.weight_norm(self.b, dim=1)
        elif way == "rows":
            parametrizations.weight_norm(self.a, dim=1)
        else:
            parametrizations.spectral_norm(self.a)

    def forward(self, x):
        return self.b(self.act(self.a(x)))


@block(3, counted=False)
class States(Block):
    """A recurrent cell that starts from states the network makes, and gives its last ones."""

    def __init__(self, shape, pick):
        super().__init__()
        wide, self.layers = pick.size(*shape), pick.of(1, 1, 2)
        self.start = nn.Linear(shape[-1], wide)
        self.cell = nn.GRU(shape[-1], wide, num_layers=self.layers, batch_first=True)
        self.way, self.out = pick.of("last", "both", "part"), nn.Linear(wide, shape[-1])

    def forward(self, x):
        h = torch.zeros(self.layers, x.shape[0], self.cell.hidden_size, dtype=x.dtype)
        first = torch.tanh(self.start(x.mean(1)))
        if self.way == "part":
            h[0] = first
        else:
            h = h + first
        y, last = self.cell(x, h)
        return self.out(y + last[-1].unsqueeze(1)) if self.way == "both" else x + self.out(y)


@block(3)
class SequenceFirst(Block):
    """(t, n, c) inside, batch and heads in one axis: how attention was written first."""

    def __init__(self, shape, pick):
        super().__init__()
        self.heads, self.d = pick.of(1, 2, 3), pick.of(2, 3, 4)
        inner = self.heads * self.d
        self.q, self.kv = nn.Linear(shape[-1], inner), nn.Linear(shape[-1], 2 * inner)
        self.out, self.scale = nn.Linear(inner, shape[-1]), self.d**-0.5

    def forward(self, x):
        y = x.transpose(0, 1)
        t, n, _ = y.shape
        k, v = self.kv(y).chunk(2, dim=-1)
        q, k, v = (
            z.contiguous().view(t, n * self.heads, self.d).transpose(0, 1)
            for z in (self.q(y) * self.scale, k, v)
        )
        y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        y = y.transpose(0, 1).contiguous().view(t, n, self.heads * self.d)
        return self.out(y).transpose(0, 1) + x


@block(3)
class Decoder(Block):
    """Cross-attention between two streams, in torch's modules or by hand; pools across channels."""

    def __init__(self, shape, pick):
        super().__init__()
        wide = 2 * pick.of(1, 2, 3)
        self.a, self.b = nn.Linear(shape[-1], wide), nn.Linear(shape[-1], pick.size(*shape))
        self.way = pick.of("torch", "layer", "pool", "cosine")
        self.cross = nn.MultiheadAttention(
            wide, 2, kdim=self.b.out_features, vdim=self.b.out_features, batch_first=True
        )
        self.layer = nn.TransformerDecoderLayer(wide, 2, 6, batch_first=True)
        self.memory = nn.Linear(self.b.out_features, wide)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        match self.way:
            case "torch":
                return a + self.cross(a, b, b, need_weights=False)[0]
            case "layer":
                return self.layer(a, self.memory(b))
            case "pool":
                return F.avg_pool1d(a, 2) * F.adaptive_avg_pool1d(b, 1)
            case _:
                return a * F.cosine_similarity(a, self.memory(b), dim=-1).unsqueeze(-1)


@block(2)
class Calls(Block):
    """Calls few people make: addmm, baddbmm, tensor_split, split by a number that does not divide, movedim."""

    def __init__(self, shape, pick):
        super().__init__()
        wide = pick.of(4, 5, 6, 7, 8)
        self.weight = nn.Parameter(torch.randn(shape[0], wide) / 2)
        self.bias, self.act = nn.Parameter(torch.randn(wide)), pick.act()
        self.way = pick.of("split", "tensor_split", "hsplit", "movedim", "unbind", "baddbmm", "t")
        self.counted = self.way != "t"  # a matrix times a vector
        self.size, self.second = pick.of(2, 3), nn.Parameter(torch.randn(wide, pick.size(*shape)))

    def forward(self, x):
        h = self.act(torch.addmm(self.bias, x, self.weight))
        match self.way:
            case "split":
                return torch.cat(h.split(self.size, 1)[::-1], 1)
            case "tensor_split":
                a, b = torch.tensor_split(h, 2, dim=1)
                return torch.cat([b, a * 2], 1)
            case "hsplit":
                a, b = torch.tensor_split(h, (self.size,), dim=-1)
                return torch.cat([b.relu(), a], 1)
            case "movedim":
                both = torch.stack([h, 2 * h.cos()], 1)
                return both.movedim(1, -1).reshape(x.shape[0], -1)
            case "unbind":
                a, b, *rest = h.unbind(1)
                return torch.stack([b, a, *rest], 1)
            case "baddbmm":
                both = h[:, None].expand(-1, 2, -1)
                own = self.second.expand(x.shape[0], -1, -1)
                return torch.baddbmm(both.mean(-1, keepdim=True), both, own).flatten(1)
            case _:
                return self.second.t().mv(h[0]) + (self.second.T @ h.T).T


@block(2)
class WeightViews(Block):
    """A weight kept in another shape than it is used in: factored, turned, cut, repeated, used twice."""

    def __init__(self, shape, pick):
        super().__init__()
        a, b = pick.of(2, 3, 4), pick.of(2, 3, 4)
        self.a, self.b, c = a, b, shape[0]
        self.way = pick.of(
            "factors", "turned", "swapped", "halves", "tiled", "kron", "flat", "both"
        )
        self.weight = nn.Parameter(torch.randn(*pick.of((a * b, c), (a, b * c), (a * b * c,))))
        self.small, self.act = nn.Parameter(torch.randn(a, b)), pick.act()
        self.out = nn.Linear(a * b, pick.size(*shape))

    def forward(self, x):
        a, b, c = self.a, self.b, x.shape[1]
        w = self.weight
        match self.way:
            case "factors":
                h = torch.einsum("nc,abc->nab", x, w.view(a, b, c)).flatten(1)
            case "turned":
                h = F.linear(x, w.reshape(a, b, c).transpose(0, 1).reshape(a * b, c))
            case "swapped":
                h = x @ w.reshape(c, a * b)
            case "halves":
                h = torch.cat([F.linear(x, half) for half in w.reshape(-1, c).split(a)], 1)
            case "tiled":
                h = F.linear(x, w.view(-1, c)) * self.small[:, :1].repeat(1, b).flatten()
            case "kron":
                h = F.linear(
                    x, w.view(-1, c) * torch.kron(self.small[:, 0], self.small[0])[:, None]
                )
            case "flat":
                h = F.linear(x, w.flatten()[: a * b * c].view(a * b, c), self.small.view(-1))
            case _:
                h = F.linear(x, w.view(-1, c)).view(-1, a, b)
                h = torch.einsum("nab,ac->nbc", h, self.small @ self.small.T).reshape(-1, a * b)
        return self.out(self.act(h))
