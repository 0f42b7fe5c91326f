"""Blocks of random networks on tokens (n, t, c)."""

import torch
import torch.nn.functional as F
from torch import nn

from oracles.random_choice import Block, Pick, Unfit, block


class HandRMS(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def norm(pick: Pick, width: int) -> nn.Module:
    kind = pick.of(nn.LayerNorm, nn.RMSNorm, HandRMS, None, None, None)
    return nn.Identity() if kind is None else kind(width)


@block(3)
class Mlp(Block):
    def __init__(self, shape, pick):
        super().__init__()
        mid, c = pick.size(*shape), shape[-1]
        self.norm, self.act = norm(pick, c), pick.act()
        self.a, self.b = nn.Linear(c, mid, bias=pick.coin()), nn.Linear(mid, c, bias=pick.coin())

    def forward(self, x):
        return x + self.b(self.act(self.a(self.norm(x))))


@block(3)
class Project(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.a, self.act = nn.Linear(shape[-1], pick.size(*shape)), pick.act()

    def forward(self, x):
        return self.act(self.a(x))


@block(3)
class Attention(Block):
    """Multi-head attention in the ways people write it."""

    def __init__(self, shape, pick):
        super().__init__()
        c = shape[-1]
        self.heads, self.head_dim = pick.of(1, 2, 2, 3, 4), pick.of(2, 2, 4, 6)
        self.way = pick.of("3hd", "chunk", "h3d", "separate", "split", "heads_last")
        self.core = pick.of("sdpa", "sdpa", "matmul", "einsum", "scaled")
        self.rotary, self.causal = pick.coin(0.3), pick.coin(0.3)
        inner = self.heads * self.head_dim
        self.inner = inner
        if self.way == "separate":
            self.q, self.k, self.v = (nn.Linear(c, inner, bias=pick.coin()) for _ in range(3))
        else:
            self.qkv = nn.Linear(c, 3 * inner, bias=pick.coin())
        self.out, self.norm = nn.Linear(inner, c), norm(pick, c)
        self.qk_norm = nn.LayerNorm(self.head_dim) if pick.coin(0.15) else None
        self.residual = pick.coin(0.7)

    def _heads(self, x):
        n, t, _ = x.shape
        h, d = self.heads, self.head_dim
        if self.way == "separate":
            return [f(x).view(n, t, h, d).transpose(1, 2) for f in (self.q, self.k, self.v)]
        qkv = self.qkv(x)
        if self.way == "3hd":
            return list(qkv.reshape(n, t, 3, h, d).permute(2, 0, 3, 1, 4))
        if self.way == "chunk":
            return [y.reshape(n, t, h, -1).transpose(1, 2) for y in qkv.chunk(3, dim=-1)]
        if self.way == "split":
            return [y.view(n, t, -1, d).transpose(1, 2) for y in qkv.split(self.inner, dim=-1)]
        if self.way == "heads_last":
            return [y.permute(0, 2, 1, 3) for y in qkv.view(n, t, h, d, 3).unbind(-1)]
        return list(qkv.view(n, t, h, 3 * d).transpose(1, 2).split(d, dim=-1))

    def forward(self, x):
        q, k, v = self._heads(self.norm(x))
        if self.qk_norm is not None:
            q, k = self.qk_norm(q), self.qk_norm(k)
        if self.rotary:
            q, k = rotated(q), rotated(k)
        if self.core == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        elif self.core == "scaled":
            y = F.scaled_dot_product_attention(q, k, v, scale=0.3)
        elif self.core == "matmul":
            y = (q @ k.transpose(-2, -1) / self.head_dim**0.5).softmax(-1) @ v
        else:
            weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
            y = torch.einsum("bhqk,bhkd->bhqd", weights, v)
        y = y.transpose(1, 2)
        y = self.out(y.flatten(2) if self.causal else y.reshape(*y.shape[:2], -1))
        return x + y if self.residual else y


def rotated(x):
    """Rotary embedding by rotate-half, with angles made on the fly."""
    t, d = x.shape[-2:]
    angle = torch.arange(t, dtype=x.dtype)[:, None] * torch.arange(1, d // 2 + 1, dtype=x.dtype)
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], -1) * sin


@block(3)
class GroupedQueries(Block):
    """Fewer keys and values than queries, repeated in four ways."""

    def __init__(self, shape, pick):
        super().__init__()
        c = shape[-1]
        self.kv, self.repeats, self.d = pick.of(1, 2, 3), pick.of(2, 3), pick.of(2, 4, 6)
        heads = self.kv * self.repeats
        self.way = pick.of("expand", "interleave", "gqa", "view", "repeat")
        self.core, self.table = pick.of("sdpa", "matmul"), pick.coin()
        self.q, self.k = nn.Linear(c, heads * self.d), nn.Linear(c, self.kv * self.d)
        self.v, self.out = nn.Linear(c, self.kv * self.d), nn.Linear(heads * self.d, c)
        angle = torch.arange(shape[0])[:, None] * torch.arange(1, self.d // 2 + 1)
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angle.sin()] * 2, -1), persistent=False)

    def _rotary(self, x):
        if not self.table:
            return x
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * self.cos + turned * self.sin

    def _repeated(self, x):
        n, h, t, d = x.shape
        if self.way == "expand":
            wide = x[:, :, None].expand(n, h, self.repeats, t, d)
            return wide.reshape(n, h * self.repeats, t, d)
        if self.way == "interleave":
            return x.repeat_interleave(self.repeats, dim=1)
        return x.repeat(1, self.repeats, 1, 1) if self.way == "repeat" else x

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = (f(x).view(n, t, -1, self.d).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self._rotary(q), self._rotary(k)
        if self.way == "view":
            q = q.reshape(n, self.kv, self.repeats, t, self.d)
            weights = (q @ k[:, :, None].mT * self.d**-0.5).softmax(-1)
            y = (weights @ v[:, :, None]).flatten(1, 2)
        elif self.way == "gqa":
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        else:
            k, v = self._repeated(k), self._repeated(v)
            if self.core == "sdpa":
                y = F.scaled_dot_product_attention(q, k, v)
            else:
                y = (q @ k.mT).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(n, t, -1))


@block(3)
class LinearAttention(Block):
    """φ(q) (φ(k)ᵀ v): exact only where φ(0) = 0."""

    def __init__(self, shape, pick):
        super().__init__()
        c, inner = shape[-1], pick.of(4, 6, 8)
        self.heads, self.kernel = pick.of(1, 2), pick.of("elu", "relu", "square", "softmax")
        self.q, self.k = nn.Linear(c, inner), nn.Linear(c, inner)
        self.v, self.out, self.normed = nn.Linear(c, inner), nn.Linear(inner, c), pick.coin()

    def _phi(self, x):
        match self.kernel:
            case "elu":
                return F.elu(x) + 1
            case "relu":
                return x.relu()
            case "square":
                return x * x
            case _:
                return x.softmax(-1)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = (
            f(x).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = self._phi(q), self._phi(k)
        y = q @ (k.transpose(-1, -2) @ v)
        if self.normed:
            y = y / (torch.einsum("bhtd,bhd->bht", q, k.sum(2))[..., None] + 1)
        return x + self.out(y.transpose(1, 2).flatten(2))


@block(3)
class Gated(Block):
    """SwiGLU, fused and not, halves in every order."""

    def __init__(self, shape, pick):
        super().__init__()
        c, self.width = shape[-1], pick.size(*shape)
        self.way = pick.of("two", "chunk", "slice", "negative", "sizes", "strided", "view", "glu")
        self.a = nn.Linear(c, self.width if self.way == "two" else 2 * self.width)
        self.b = nn.Linear(c, self.width) if self.way == "two" else None
        self.out, self.act = nn.Linear(self.width, c), pick.act()

    def forward(self, x):
        h = self.a(x)
        match self.way:
            case "two":
                a, b = h, self.b(x)
            case "chunk":
                a, b = h.chunk(2, -1)
            case "slice":
                a, b = h[..., : self.width], h[..., self.width :]
            case "negative":
                a, b = h[..., : -self.width], h[..., -self.width :]
            case "sizes":
                a, b = h.split_with_sizes([self.width, self.width], -1)
            case "strided":
                a, b = h[..., ::2], h[..., 1::2]
            case "view":
                a, b = h.unflatten(-1, (2, -1)).unbind(-2)
            case _:
                return self.out(F.glu(h, -1))
        return self.out(a * self.act(b))


@block(3)
class ConvTokens(Block):
    """A convolution along the tokens, channels in the middle meanwhile."""

    def __init__(self, shape, pick):
        super().__init__()
        c, mid = shape[-1], pick.size(*shape)
        self.a, self.b = nn.Linear(c, mid), nn.Linear(mid, c)
        self.conv = nn.Conv1d(mid, mid, 3, padding=1, groups=pick.of(1, mid))
        self.norm, self.act = nn.BatchNorm1d(mid) if pick.coin() else nn.Identity(), pick.act()

    def forward(self, x):
        h = self.act(self.norm(self.conv(self.a(x).transpose(1, 2))))
        return self.b(h.transpose(1, 2))


@block(3)
class TokenMixer(Block):
    """MLP-Mixer: a hidden layer across tokens."""

    def __init__(self, shape, pick):
        super().__init__()
        mid = pick.size(*shape)
        self.a, self.b = nn.Linear(shape[0], mid), nn.Linear(mid, shape[0])
        self.act, self.flip = pick.act(), pick.coin()

    def forward(self, x):
        if self.flip:
            h = self.act(torch.einsum("ntc,mt->nmc", x, self.a.weight))
            return x + torch.einsum("nmc,tm->ntc", h, self.b.weight)
        return x + self.b(self.act(self.a(x.transpose(1, 2)))).transpose(1, 2)


@block(3)
class Latents(Block):
    """Learnt queries look at the tokens; afterwards there are as many tokens as queries."""

    def __init__(self, shape, pick):
        super().__init__()
        c, mid = shape[-1], pick.size(*shape)
        self.queries = nn.Parameter(torch.randn(pick.size(*shape), mid))
        self.k, self.v = nn.Linear(c, mid), nn.Linear(c, pick.size(*shape))

    def forward(self, x):
        q = self.queries.expand(x.shape[0], -1, -1)
        return F.scaled_dot_product_attention(q, self.k(x), self.v(x))


@block(3)
class ClassToken(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, pick.of(1, 2), shape[-1]))
        self.place = nn.Parameter(torch.randn(self.token.shape[1] + shape[0], shape[-1]))
        self.first = pick.coin()

    def forward(self, x):
        token = self.token.expand(x.shape[0], -1, -1)
        return torch.cat([token, x] if self.first else [x, token], 1) + self.place


@block(3)
class TiedWeights(Block):
    """One matrix for the way in and the way out; or an encoder used twice."""

    def __init__(self, shape, pick):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(pick.size(*shape), shape[-1]) / 2)
        self.bias, self.act = nn.Parameter(torch.randn(self.weight.shape[0])), pick.act()
        self.way, self.again = pick.of("linear", "matmul", "einsum", "conv"), pick.coin(0.3)

    def _once(self, x):
        h = self.act(F.linear(x, self.weight, self.bias))
        if self.way == "linear":
            return F.linear(h, self.weight.t())
        if self.way == "einsum":
            return torch.einsum("ntm,mc->ntc", h, self.weight)
        if self.way == "conv":
            return F.conv1d(h.mT, self.weight.t().unsqueeze(-1)).mT
        return h @ self.weight

    def forward(self, x):
        x = self._once(x)
        return self._once(x) if self.again else x


@block(3)
class Reparametrised(Block):
    """Weights made of parameters: low rank, normalised, masked, stacked, scaled."""

    def __init__(self, shape, pick):
        super().__init__()
        c, mid = shape[-1], pick.size(*shape)
        self.way = pick.of("rank", "whole", "rows", "mask", "cat", "scaled", "softmax")
        self.weight = nn.Parameter(torch.randn(mid, c))
        self.left, self.right = nn.Parameter(torch.randn(mid, 2)), nn.Parameter(torch.randn(2, c))
        self.gain = nn.Parameter(torch.randn(mid, 1))
        self.register_buffer("mask", (torch.rand(mid, c) < 0.7).double())
        self.out, self.act = nn.Linear(mid, c), pick.act()

    def _made(self):
        w = self.weight
        match self.way:
            case "rank":
                return w + self.left @ self.right
            case "whole":
                return w / w.norm()
            case "rows":
                return self.gain * F.normalize(w, dim=1)
            case "mask":
                return w * self.mask
            case "cat":
                half = w.shape[0] // 2
                return torch.cat([w[half:], w[:half].abs()], 0)
            case "softmax":
                return w.softmax(-1)
            case _:
                return w * self.gain.exp()

    def forward(self, x):
        return self.out(self.act(F.linear(x, self._made())))


@block(3)
class InPlace(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.a, self.b = nn.Linear(shape[-1], pick.size(*shape)), nn.Linear(shape[-1], 3)
        self.b = nn.Linear(shape[-1], self.a.out_features)
        self.way = pick.of("acts", "part", "add", "masked", "view", "zeros", "copy")
        self.cut = pick.of(1, 2)

    def forward(self, x):
        h = self.a(x)
        match self.way:
            case "acts":
                return h.relu_().add_(1.0).mul_(0.5).sigmoid_()
            case "part":
                h[..., : self.cut] *= 2.0
                h[..., self.cut :] += 1.0
            case "add":
                h += self.b(x)
                h.clamp_(min=-1.0)
            case "masked":
                h.masked_fill_(self.b(x) > 0, 0.3)
            case "view":
                h.view(-1, h.shape[-1]).mul_(self.b(x).reshape(-1, h.shape[-1]))
            case "zeros":
                new = torch.zeros_like(h)
                new[..., self.cut :] = h[..., self.cut :]
                return new + self.b(x)
            case _:
                new = h.new_zeros(h.shape[0], h.shape[1], h.shape[2] + self.cut)
                new[..., : h.shape[2]] = h
                return new
        return h


@block(3)
class Repeats(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.a = nn.Linear(shape[-1], pick.size(*shape))
        self.times, self.way = pick.of(2, 3), pick.of("repeat", "interleave", "expand", "tokens")
        wide = self.a.out_features * (1 if self.way == "tokens" else self.times)
        self.norm = norm(pick, wide)
        self.b = nn.Linear(wide, pick.size(*shape))

    def forward(self, x):
        h = self.a(x)
        if self.way == "repeat":
            h = h.repeat(1, 1, self.times)
        elif self.way == "interleave":
            h = torch.repeat_interleave(h, self.times, dim=-1)
        elif self.way == "expand":
            h = h.unsqueeze(-1).expand(-1, -1, -1, self.times).flatten(2)
        else:
            h = h.repeat(1, self.times, 1)
        return self.b(self.norm(h))


@block(3)
class Outer(Block):
    def __init__(self, shape, pick):
        super().__init__()
        c = shape[-1]
        a, b = pick.of(2, 3, 4), pick.of(2, 3, 4)
        self.a, self.b = nn.Linear(c, a), nn.Linear(c, b)
        self.out, self.way = nn.Linear(a * b, c), pick.of("mul", "einsum", "matmul", "own")
        self.counted = self.way != "einsum"  # it sums over nothing
        if self.way == "own":
            self.out = nn.Linear(a * a, c)
        self.act = pick.act()

    def forward(self, x):
        a, b = self.a(x), self.act(self.b(x))
        match self.way:
            case "mul":
                both = a[..., :, None] * b[..., None, :]
            case "einsum":
                both = torch.einsum("nti,ntj->ntij", a, b)
            case "matmul":
                both = a.unsqueeze(-1) @ b.unsqueeze(-2)
            case _:
                both = a.unsqueeze(-1) * a.unsqueeze(-2)
        return x + self.out(both.flatten(2))


@block(3)
class HeadWeights(Block):
    """A matrix per head: stacked weights in einsum, bmm or a grouped convolution."""

    def __init__(self, shape, pick):
        super().__init__()
        self.heads = pick.of(2, 3, 4)
        d, e = pick.of(2, 3, 4), pick.of(2, 3, 4)
        self.a = nn.Linear(shape[-1], self.heads * d)
        self.weight = nn.Parameter(torch.randn(self.heads, d, e))
        self.way, self.act = pick.of("einsum", "matmul", "bmm"), pick.act()
        self.out = nn.Linear(self.heads * e, shape[-1])

    def forward(self, x):
        n, t, _ = x.shape
        h = self.act(self.a(x)).view(n, t, self.heads, -1)
        if self.way == "einsum":
            y = torch.einsum("nthd,hde->nthe", h, self.weight).flatten(2)
        elif self.way == "matmul":
            y = (h.unsqueeze(-2) @ self.weight).squeeze(-2).flatten(2)
        else:
            flat = h.permute(2, 0, 1, 3).reshape(self.heads, n * t, -1)
            y = torch.bmm(flat, self.weight).view(self.heads, n, t, -1)
            y = y.permute(1, 2, 0, 3).flatten(2)
        return x + self.out(y)


@block(3)
class Experts(Block):
    """A dense mixture: all experts run, a softmax mixes them."""

    def __init__(self, shape, pick):
        super().__init__()
        c, mid, self.num = shape[-1], pick.size(*shape), pick.of(2, 3)
        self.up = nn.Parameter(torch.randn(self.num, mid, c) / 2)
        self.down = nn.Parameter(torch.randn(self.num, c, mid) / 2)
        self.router, self.act = nn.Linear(c, self.num), pick.act()

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        h = self.act(torch.einsum("ntc,emc->ntem", x, self.up))
        y = torch.einsum("ntem,ecm->ntec", h, self.down)
        return x + (y * weights.unsqueeze(-1)).sum(2)


@block(3, counted=False)
class Recurrent(Block):
    def __init__(self, shape, pick):
        super().__init__()
        kind = pick.of(nn.LSTM, nn.GRU, nn.RNN)
        self.cell = kind(
            shape[-1],
            pick.size(*shape),
            num_layers=pick.of(1, 2),
            batch_first=True,
            bidirectional=pick.coin(),
        )

    def forward(self, x):
        return self.cell(x)[0]


@block(3)
class TorchAttention(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.a = nn.Linear(shape[-1], 2 * pick.of(2, 3))
        wide = self.a.out_features
        if pick.coin():
            self.core = nn.MultiheadAttention(wide, 2, batch_first=True)
        else:
            self.core = nn.TransformerEncoderLayer(wide, 2, 8, batch_first=True)

    def forward(self, x):
        x = self.a(x)
        if isinstance(self.core, nn.MultiheadAttention):
            return self.core(x, x, x, need_weights=False)[0]
        return self.core(x)


@block(3)
class ByPlace(Block):
    """Operations for which the order of channels matters: all must pin or follow."""

    def __init__(self, shape, pick):
        super().__init__()
        self.a = nn.Linear(shape[-1], pick.size(*shape))
        self.way = pick.of("flip", "roll", "cumsum", "softmax", "sort", "select", "index", "tri")
        self.b = nn.Linear(self.a.out_features, shape[-1])

    def forward(self, x):
        h = self.a(x)
        match self.way:
            case "flip":
                h = h.flip(-1)
            case "roll":
                h = torch.roll(h, 1, -1)
            case "cumsum":
                h = h.cumsum(-1)
            case "softmax":
                h = h.softmax(-1)
            case "sort":
                h = h.sort(-1).values
            case "select":
                h = h * h[..., 1:2] + h[..., 0].unsqueeze(-1)
            case "index":
                h = h[..., [1, 0] + list(range(2, h.shape[-1]))]
            case _:
                h = h * torch.ones(h.shape[-1], h.shape[-1], dtype=h.dtype).tril()[-1]
        return x + self.b(h)


@block(3)
class ToImage(Block):
    def __init__(self, shape, pick):
        super().__init__()
        t = shape[0]
        if t not in (4, 6, 9, 16):
            raise Unfit("no rectangle")
        self.height = {4: 2, 6: 2, 9: 3, 16: 4}[t]
        self.a, self.way = nn.Linear(shape[-1], pick.size(*shape)), pick.coin()

    def forward(self, x):
        x, high = self.a(x), self.height
        if self.way:
            return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], high, -1)
        return x.view(x.shape[0], high, -1, x.shape[-1]).permute(0, 3, 1, 2)


@block(3)
class TokensToVector(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.a, self.norm = nn.Linear(shape[-1], pick.size(*shape)), norm(pick, shape[-1])
        self.way = pick.of("mean", "flat", "first", "last", "pool", "gram", "max")
        self.score = nn.Linear(self.a.out_features, 1)

    def forward(self, x):
        x = self.a(self.norm(x))
        match self.way:
            case "mean":
                return x.mean(1)
            case "flat":
                return x.flatten(1)
            case "first":
                return x[:, 0]
            case "last":
                return x[:, -1, :]
            case "max":
                return x.max(1).values
            case "gram":
                return (x.mT @ x).flatten(1)
            case _:
                return (self.score(x).softmax(1).mT @ x).squeeze(1)
