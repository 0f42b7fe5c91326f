"""Blocks of random networks on vectors (n, c)."""

import torch
import torch.nn.functional as F
from torch import nn

from oracles.random_choice import Block, Unfit, block


@block(2)
class Layer(Block):
    def __init__(self, shape, pick):
        super().__init__()
        width = pick.size(*shape)
        self.a = nn.Linear(shape[0], width, bias=pick.coin(0.7))
        kind = pick.of("none", "none", "batch", "layer", "group", "frozen")
        self.norm = nn.Identity()
        if kind in ("batch", "frozen"):
            self.norm = nn.BatchNorm1d(width, affine=pick.coin())
        elif kind == "layer":
            self.norm = nn.LayerNorm(width)
        elif kind == "group":
            self.norm = nn.GroupNorm(pick.divisor(width), width)
        self.act = pick.act()

    def forward(self, x):
        return self.act(self.norm(self.a(x)))


@block(2)
class Highway(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.a, self.gate = nn.Linear(shape[0], shape[0]), nn.Linear(shape[0], shape[0])
        self.act = pick.act()

    def forward(self, x):
        gate = self.gate(x).sigmoid()
        return gate * self.act(self.a(x)) + (1 - gate) * x


@block(2)
class UsedTwice(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.mid = nn.Linear(shape[0], shape[0])
        self.inner, self.act = nn.Linear(shape[0], pick.size(*shape)), pick.act()
        self.out = nn.Linear(self.inner.out_features, shape[0])

    def forward(self, x):
        for _ in range(2):
            x = self.mid(x) + self.out(self.act(self.inner(x)))
        return x


@block(2)
class Maxout(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.pieces, self.first, self.way = (
            pick.of(2, 3),
            pick.coin(),
            pick.of("max", "sum", "mean"),
        )
        self.a = nn.Linear(shape[0], self.pieces * pick.size(*shape))

    def forward(self, x):
        h = self.a(x)
        if self.first:
            h, dim = h.view(-1, self.pieces, h.shape[1] // self.pieces), 1
        else:
            h, dim = h.unflatten(1, (-1, self.pieces)), 2
        return h.amax(dim) if self.way == "max" else getattr(h, self.way)(dim)


@block(2)
class Factors(Block):
    """A vector as a matrix a·b: transposed, mixed along either side, multiplied with itself."""

    def __init__(self, shape, pick):
        super().__init__()
        self.a_size, self.b_size = pick.of(2, 3, 4), pick.of(2, 3, 4)
        self.a = nn.Linear(shape[0], self.a_size * self.b_size)
        self.way = pick.of("transpose", "left", "right", "gram", "other", "normal")
        out = self.a_size if self.way == "left" else self.b_size
        self.mix = nn.Linear(out, pick.size(*shape))
        self.act = pick.act()

    def forward(self, x):
        m = self.act(self.a(x)).view(x.shape[0], self.a_size, self.b_size)
        match self.way:
            case "transpose":
                return m.transpose(1, 2).flatten(1)
            case "left":
                return self.mix(m.transpose(1, 2)).flatten(1)
            case "right":
                return self.mix(m).flatten(1)
            case "gram":
                return (m @ m.transpose(1, 2)).flatten(1)
            case "other":
                return torch.einsum("nab,nac->nbc", m, m).reshape(x.shape[0], -1)
            case _:
                return F.normalize(m, dim=-1).flatten(1)


@block(2)
class Interactions(Block):
    """Fields of a recommender: dot products of all pairs."""

    def __init__(self, shape, pick):
        super().__init__()
        self.fields, self.d = pick.of(2, 3), pick.of(2, 3, 4)
        self.parts = nn.ModuleList(nn.Linear(shape[0], self.d) for _ in range(self.fields))
        self.bottom = nn.Linear(shape[0], self.d)

    def forward(self, x):
        rows = torch.stack([part(x) for part in self.parts], 1)
        pairs = torch.bmm(rows, rows.transpose(1, 2))
        return torch.cat([pairs.flatten(1), self.bottom(x)], dim=1)


@block(2)
class Pieces(Block):
    """Slices with strides and bounds from either end, joined again in another order."""

    def __init__(self, shape, pick):
        super().__init__()
        width = pick.of(4, 6, 8, 12)
        self.a, self.act = nn.Linear(shape[0], width), pick.act()
        self.way = pick.of("rotate", "strided", "negative", "middle", "three", "narrow", "overlap")
        self.cut = pick.of(1, 2, 3)

    def forward(self, x):
        h, k = self.act(self.a(x)), self.cut
        match self.way:
            case "rotate":
                return torch.cat([h[:, k:], h[:, :k]], 1)
            case "strided":
                return torch.cat([h[:, ::2] * h[:, 1::2], h[:, 1::2]], 1)
            case "negative":
                return h[:, :-k] + h[:, -1:]
            case "middle":
                return h[:, k:-1]
            case "three":
                a, b, c = h.split([k, 1, h.shape[1] - k - 1], 1)
                return torch.cat([c, a, b + c[:, :1], c], -1)
            case "narrow":
                return h.narrow(1, 1, 2) * h.narrow(1, 2, 2)
            case _:
                return h[:, :-k] * h[:, k:]


@block(2, counted=False)
class Bilinear(Block):
    def __init__(self, shape, pick):
        super().__init__()
        a, b = pick.size(*shape), pick.size(*shape)
        self.a, self.b = nn.Linear(shape[0], a), nn.Linear(shape[0], b)
        self.both, self.act = nn.Bilinear(a, b, pick.size(*shape)), pick.act()

    def forward(self, x):
        return self.both(self.act(self.a(x)), self.b(x))


@block(2, counted=False)
class ThreeInOne(Block):
    """CP and Tucker factors in one einsum."""

    def __init__(self, shape, pick):
        super().__init__()
        rank, wide = pick.of(2, 3, 4), pick.size(*shape)
        self.a, self.b = nn.Linear(shape[0], rank), nn.Linear(shape[0], wide)
        self.core = nn.Parameter(torch.randn(rank, wide, pick.size(*shape)))
        self.act = pick.act()

    def forward(self, x):
        return torch.einsum("nr,nw,rwo->no", self.a(x), self.act(self.b(x)), self.core)


@block(2)
class Joined(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Linear(shape[0], pick.size(*shape)) for _ in range(pick.of(2, 3))
        )
        self.act, self.own = pick.act(), pick.coin()
        wide = sum(p.out_features for p in self.parts) + (shape[0] if self.own else 0)
        self.norm = nn.BatchNorm1d(wide) if pick.coin() else nn.Identity()
        self.out = nn.Linear(wide, pick.size(*shape)) if pick.coin() else nn.Identity()

    def forward(self, x):
        new = [self.act(part(x)) for part in self.parts] + ([x] if self.own else [])
        return self.out(self.norm(torch.cat(new, -1)))


@block(2)
class Products(Block):
    """Products of activations, of which one may not be zero where the other is."""

    def __init__(self, shape, pick):
        super().__init__()
        wide = pick.size(*shape)
        self.a, self.b = nn.Linear(shape[0], wide), nn.Linear(shape[0], wide)
        self.f, self.g = pick.act(), pick.act()
        self.way = pick.of("dot", "sum", "norm", "softmax", "scaled", "mean")
        self.out = nn.Linear(wide, pick.size(*shape))

    def forward(self, x):
        a, b = self.f(self.a(x)), self.g(self.b(x))
        match self.way:
            case "dot":
                return self.out(a) * (a * b).sum(-1, keepdim=True)
            case "sum":
                return self.out(b) + a.sum(1, keepdim=True)
            case "norm":
                return self.out(a / (1 + b.norm(dim=1, keepdim=True)))
            case "softmax":
                return self.out(a * b.softmax(-1))
            case "scaled":
                return self.out(F.normalize(a, dim=-1) * b)
            case _:
                return self.out(a) + (a * b).mean(-1, keepdim=True)


@block(2)
class VectorToImage(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.c, self.side, self.last = pick.size(*shape), pick.of(2, 3), pick.coin()
        self.a = nn.Linear(shape[0], self.c * self.side**2)

    def forward(self, x):
        h = self.a(x)
        if self.last:
            return h.view(-1, self.side, self.side, self.c).permute(0, 3, 1, 2)
        return h.reshape(x.shape[0], self.c, self.side, self.side)


@block(2)
class VectorToTokens(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.t, self.c = pick.size(*shape), pick.size(*shape)
        self.a, self.first = nn.Linear(shape[0], self.t * self.c), pick.coin()

    def forward(self, x):
        h = self.a(x)
        return h.view(-1, self.t, self.c) if self.first else h.unflatten(-1, (self.c, -1)).mT


@block(2)
class Codes(Block):
    """Rows of a table by numbers that the input decides, and a table read by a fixed list."""

    def __init__(self, shape, pick):
        super().__init__()
        self.table = nn.Embedding(5, pick.size(*shape))
        self.a, self.way = nn.Linear(shape[0], self.table.embedding_dim), pick.coin()
        self.tie = pick.coin(0.4)

    def forward(self, x):
        numbers = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        if self.way:
            h = self.a(x) + self.table(numbers)
        else:
            h = self.a(x) * self.table.weight[numbers]
        return h @ self.table.weight.t() if self.tie else h


@block(2)
class Bag(Block):
    """Odd corners: constants, where, minimum, a buffer added, squeeze, stack."""

    def __init__(self, shape, pick):
        super().__init__()
        wide = pick.size(*shape)
        self.a, self.b = nn.Linear(shape[0], wide), nn.Linear(shape[0], wide)
        self.register_buffer("shift", torch.randn(wide))
        self.way = pick.of("where", "minimum", "buffer", "squeeze", "stack", "lerp", "ones", "one")
        if wide < 2:
            raise Unfit("too narrow")

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        match self.way:
            case "where":
                return torch.where(a > b, a, 0.5)
            case "minimum":
                return torch.minimum(a, b) - self.shift
            case "buffer":
                return (a + self.shift) * (b - self.shift).relu()
            case "squeeze":
                return (a[:, None] * b[:, None]).squeeze(1)
            case "stack":
                return torch.stack([a, b, a * b], -1).flatten(1)
            case "lerp":
                return torch.lerp(a, b, 0.3)
            case "ones":
                return torch.cat([a, torch.ones(x.shape[0], 2, dtype=x.dtype), b], 1)
            case _:
                return torch.cat([a, a.new_ones(x.shape[0], 1)], 1) ** 2
