"""Blocks of random networks on images (n, c, h, w)."""

import torch
import torch.nn.functional as F
from torch import nn

from oracles.random_choice import Block, Pick, Unfit, block


def norm(pick: Pick, width: int) -> nn.Module:
    kind = pick.of("batch", "batch", "group", "instance", "none", "one")
    if kind == "group" and width > 1:
        return nn.GroupNorm(pick.divisor(width), width, affine=pick.coin(0.8))
    if kind == "one":
        return nn.GroupNorm(1, width)
    if kind == "instance":
        return nn.InstanceNorm2d(width, affine=pick.coin())
    return nn.BatchNorm2d(width, affine=pick.coin(0.8)) if kind == "batch" else nn.Identity()


@block(4)
class Conv(Block):
    def __init__(self, shape, pick):
        super().__init__()
        width, kernel = pick.size(*shape), pick.of(1, 3)
        self.conv = nn.Conv2d(shape[0], width, kernel, padding=kernel // 2, bias=pick.coin())
        self.norm, self.act = norm(pick, width), pick.act()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)))


@block(4)
class ResidualConv(Block):
    def __init__(self, shape, pick):
        super().__init__()
        width = pick.size(*shape)
        self.a = nn.Conv2d(shape[0], width, 3, padding=1, bias=pick.coin())
        self.norm, self.act = norm(pick, width), pick.act()
        self.b = nn.Conv2d(width, shape[0], 1)
        self.last = norm(pick, shape[0])

    def forward(self, x):
        return x + self.last(self.b(self.act(self.norm(self.a(x)))))


@block(4)
class Depthwise(Block):
    def __init__(self, shape, pick):
        super().__init__()
        multiplier = pick.of(1, 1, 2, 3)
        mid = shape[0] * multiplier
        self.depth = nn.Conv2d(shape[0], mid, 3, padding=1, groups=shape[0], bias=pick.coin())
        self.norm, self.act = norm(pick, mid), pick.act()
        self.point = nn.Conv2d(mid, pick.size(*shape), 1)

    def forward(self, x):
        return self.point(self.act(self.norm(self.depth(x))))


@block(4)
class GroupedConv(Block):
    def __init__(self, shape, pick):
        super().__init__()
        groups = pick.of(2, 2, 3, 4)
        mid, out = groups * pick.of(1, 2, 3), groups * pick.of(1, 2, 3)
        self.a = nn.Conv2d(shape[0], mid, 1)
        self.act = pick.act()
        self.b = nn.Conv2d(mid, out, 3, padding=1, groups=groups, bias=pick.coin())
        self.norm = norm(pick, out)
        self.c = nn.Conv2d(out, shape[0], 1) if pick.coin() else None

    def forward(self, x):
        h = self.norm(self.b(self.act(self.a(x))))
        return h if self.c is None else x + self.c(h)


@block(4)
class Transposed(Block):
    def __init__(self, shape, pick):
        super().__init__()
        groups = pick.of(1, 1, 2, 3)
        mid, out = groups * pick.of(1, 2, 3), groups * pick.of(1, 2)
        self.a = nn.Conv2d(shape[0], mid, 1)
        self.up = nn.ConvTranspose2d(mid, out, 2, stride=2, groups=groups, bias=pick.coin())
        self.act = pick.act()

    def forward(self, x):
        return F.avg_pool2d(self.act(self.up(self.a(x))), 2)


@block(4)
class SqueezeExcite(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.by_linear = pick.coin()
        mid = pick.size(*shape)
        self.a = nn.Linear(shape[0], mid) if self.by_linear else nn.Conv2d(shape[0], mid, 1)
        self.b = nn.Linear(mid, shape[0]) if self.by_linear else nn.Conv2d(mid, shape[0], 1)
        self.act, self.channels, self.hard = pick.act(), shape[0], pick.coin()

    def forward(self, x):
        if not self.by_linear:
            return x * self.b(self.act(self.a(x.mean((2, 3), keepdim=True)))).sigmoid()
        gate = self.b(self.act(self.a(F.adaptive_avg_pool2d(x, 1).flatten(1)))).sigmoid()
        if self.hard:
            return x * gate.view(-1, self.channels, 1, 1)
        return x * gate[:, :, None, None]


@block(4)
class Shuffle(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.groups = pick.divisor(shape[0], proper=True)
        self.way = pick.of("view", "torch", "rearranged")
        self.depth = nn.Conv2d(shape[0], shape[0], 3, padding=1, groups=self.groups)

    def forward(self, x):
        n, c, h, w = x.shape
        if self.way == "view":
            x = x.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(n, c, h, w)
        elif self.way == "torch":
            x = F.channel_shuffle(x, self.groups)
        else:
            x = x.reshape(n, -1, self.groups, h, w).permute(0, 2, 1, 3, 4).flatten(1, 2)
        return self.depth(x)


@block(4)
class Dense(Block):
    def __init__(self, shape, pick):
        super().__init__()
        width, growth = shape[0], pick.size(*shape)
        self.layers, self.norms = nn.ModuleList(), nn.ModuleList()
        for _ in range(pick.of(1, 2, 3)):
            self.norms.append(norm(pick, width))
            self.layers.append(nn.Conv2d(width, growth, pick.of(1, 3), padding="same"))
            width += growth
        self.act, self.first = pick.act(), pick.coin()

    def forward(self, x):
        for norm_, layer in zip(self.norms, self.layers, strict=True):
            new = layer(self.act(norm_(x)))
            x = torch.cat([new, x] if self.first else [x, new], 1)
        return x


@block(4)
class SplitUnit(Block):
    """ShuffleNetV2's unit: halves, one of them convolved, joined and shuffled."""

    def __init__(self, shape, pick):
        super().__init__()
        if shape[0] % 2:
            raise Unfit("odd")
        half = shape[0] // 2
        self.a, self.b = nn.Conv2d(half, half, 1), nn.Conv2d(half, half, 3, padding=1, groups=half)
        self.norm, self.act, self.way = norm(pick, half), pick.act(), pick.of(0, 1, 2)

    def forward(self, x):
        if self.way == 0:
            left, right = x.chunk(2, 1)
        elif self.way == 1:
            left, right = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        else:
            left, right = x.split(x.shape[1] // 2, dim=1)
        x = torch.cat([left, self.norm(self.b(self.act(self.a(right))))], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).flatten(1, 2)


@block(4)
class GatedConv(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.width, self.way = pick.size(*shape), pick.of("chunk", "slice", "glu", "sizes", "view")
        self.conv = nn.Conv2d(shape[0], 2 * self.width, 3, padding=1)
        self.norm = norm(pick, 2 * self.width)
        self.act = pick.act()

    def forward(self, x):
        x = self.norm(self.conv(x))
        if self.way == "glu":
            return F.glu(x, 1)
        if self.way == "chunk":
            a, b = x.chunk(2, dim=1)
        elif self.way == "slice":
            a, b = x[:, : self.width], x[:, -self.width :]
        elif self.way == "sizes":
            a, b = torch.split(x, [self.width, self.width], dim=1)
        else:
            a, b = x.view(x.shape[0], 2, self.width, *x.shape[2:]).unbind(1)
        return a * self.act(b)


@block(4)
class PixelShuffled(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 4 * pick.size(*shape), 1)
        self.way = pick.of("torch", "view", "unshuffle")

    def forward(self, x):
        x = self.conv(x)
        if self.way == "torch":
            return F.max_pool2d(F.pixel_shuffle(x, 2), 2)
        if self.way == "unshuffle":
            return F.pixel_unshuffle(F.interpolate(x, scale_factor=2), 2)
        n, c, h, w = x.shape
        x = x.view(n, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3)
        return F.avg_pool2d(x.reshape(n, c // 4, 2 * h, 2 * w), 2)


@block(4)
class PadChannels(Block):
    """The shortcut of CIFAR ResNets: channels of zeros before and after."""

    def __init__(self, shape, pick):
        super().__init__()
        self.before, self.after = pick.of(0, 1, 2), pick.of(1, 2, 3)
        self.conv = nn.Conv2d(shape[0], shape[0] + self.before + self.after, 3, padding=1)
        self.value, self.norm = pick.of(0.0, 0.0, 0.5), norm(pick, self.conv.out_channels)
        self.act = pick.act()

    def forward(self, x):
        wide = F.pad(x, (0, 0, 0, 0, self.before, self.after), value=self.value)
        return self.act(wide + self.norm(self.conv(x)))


@block(4)
class ChannelsLast(Block):
    """ConvNeXt's block: depthwise, then channels last."""

    def __init__(self, shape, pick):
        super().__init__()
        c, mid = shape[0], pick.size(*shape)
        self.depth = nn.Conv2d(c, c, 3, padding=1, groups=c)
        self.norm = nn.LayerNorm(c) if pick.coin(0.4) else nn.Identity()
        self.a, self.b, self.act = nn.Linear(c, mid), nn.Linear(mid, c), pick.act()
        self.scale = nn.Parameter(torch.ones(c))

    def forward(self, x):
        h = self.depth(x).permute(0, 2, 3, 1)
        return x + (self.scale * self.b(self.act(self.a(self.norm(h))))).permute(0, 3, 1, 2)


@block(4)
class NonLocal(Block):
    def __init__(self, shape, pick):
        super().__init__()
        c, mid = shape[0], pick.size(*shape)
        self.q, self.k = nn.Conv2d(c, mid, 1), nn.Conv2d(c, mid, 1)
        self.v, self.out = nn.Conv2d(c, mid, 1), nn.Conv2d(mid, c, 1)

    def forward(self, x):
        n, _, h, w = x.shape
        q, k, v = (f(x).flatten(2) for f in (self.q, self.k, self.v))
        seen = v @ (q.transpose(1, 2) @ k).softmax(-1).transpose(1, 2)
        return x + self.out(seen.reshape(n, -1, h, w))


@block(4)
class ChannelAttention(Block):
    """XCA and ECA: attention over channels, and a convolution along them."""

    def __init__(self, shape, pick):
        super().__init__()
        self.way = pick.of("xca", "eca", "mean", "max")
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.mix = nn.Conv2d(shape[0], shape[0], 1)

    def forward(self, x):
        x = self.mix(x)
        if self.way == "xca":
            flat = x.flatten(2)
            return ((flat @ flat.mT).softmax(-1) @ flat).view_as(x)
        if self.way == "eca":
            gate = self.conv(x.mean((2, 3)).unsqueeze(1)).sigmoid().squeeze(1)
            return x * gate[..., None, None]
        if self.way == "mean":
            return x * x.mean(1, keepdim=True)
        return x * x.amax(1, keepdim=True)


@block(4)
class Coordinates(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.register_buffer("grid", torch.randn(1, pick.of(1, 2), *shape[1:]))
        self.mix, self.act = nn.Conv2d(shape[0], pick.size(*shape), 1), pick.act()

    def forward(self, x):
        return torch.cat([self.act(self.mix(x)), self.grid.expand(x.shape[0], -1, -1, -1)], 1)


@block(4)
class Unfolded(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.mix = nn.Conv2d(shape[0], pick.size(*shape), 1)
        self.out = nn.Linear(self.mix.out_channels * 9, pick.size(*shape))

    def forward(self, x):
        n, _, h, w = x.shape
        patches = F.unfold(self.mix(x), 3, padding=1).transpose(1, 2)
        return self.out(patches).transpose(1, 2).reshape(n, -1, h, w)


@block(4)
class SpaceToDepth(Block):
    def __init__(self, shape, pick):
        super().__init__()
        if shape[1] % 2 or shape[2] % 2:
            raise Unfit("odd space")
        self.mix = nn.Conv2d(shape[0], pick.size(*shape), 1)
        self.first = pick.coin()

    def forward(self, x):
        x = self.mix(x)
        n, c, h, w = x.shape
        x = x.view(n, c, h // 2, 2, w // 2, 2)
        x = x.permute(0, 3, 5, 1, 2, 4) if self.first else x.permute(0, 1, 3, 5, 2, 4)
        return x.reshape(n, 4 * c, h // 2, w // 2)


@block(4)
class TwoSizes(Block):
    """One convolution used twice, on two sizes of the image, and a weight of its own used as conv and as linear."""

    def __init__(self, shape, pick):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], shape[0], 3, padding=1)
        self.weight = nn.Parameter(torch.randn(pick.size(*shape), shape[0]) / 3)
        self.act = pick.act()

    def forward(self, x):
        small = F.interpolate(self.conv(F.avg_pool2d(x, 2)), size=x.shape[2:])
        x = self.act(self.conv(x) + small)
        gate = F.linear(x.mean((2, 3)), self.weight).sigmoid()
        return F.conv2d(x, self.weight[:, :, None, None]) * gate[:, :, None, None]


@block(4)
class ToTokens(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.mix, self.way = nn.Conv2d(shape[0], pick.size(*shape), 1), pick.of(0, 1, 2, 3)

    def forward(self, x):
        x = self.mix(x)
        if self.way == 0:
            return x.flatten(2).transpose(1, 2)
        if self.way == 1:
            return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, x.shape[1])
        if self.way == 2:  # rows of the image become tokens
            return x.permute(0, 2, 1, 3).flatten(2)
        return x.permute(0, 2, 3, 1).flatten(2)


@block(4)
class ToVector(Block):
    def __init__(self, shape, pick):
        super().__init__()
        self.way = pick.of("mean", "flat", "last", "sum", "gram", "pool", "std")
        self.mix = nn.Conv2d(shape[0], pick.size(*shape), 1)
        self.act = pick.act()

    def forward(self, x):
        x = self.act(self.mix(x))
        match self.way:
            case "mean":
                return x.mean((2, 3))
            case "sum":
                return x.sum(dim=(-2, -1))
            case "flat":
                return x.flatten(1)
            case "last":
                return x.permute(0, 2, 3, 1).flatten(1)
            case "pool":
                return F.adaptive_max_pool2d(x, 2).flatten(1)
            case "std":
                return torch.cat([x.mean((2, 3)), x.var((2, 3))], 1)
            case _:
                flat = x.flatten(2)
                return (flat @ flat.transpose(1, 2)).flatten(1) / 9
