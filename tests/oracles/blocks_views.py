"""Blocks that are random programs: views, permutations, cuts, joins and products of a few tensors, in any order.

Nobody writes such networks. They put the algebra of axes before equations that networks people write do not reach.
"""

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from oracles.random_choice import Block, Pick, Unfit, block

WIDTHS = (6, 8, 12, 12, 16, 18, 24, 24, 36)
LARGEST = 150


def factored(pick: Pick, number: int) -> list[int]:
    """The number as a product of one to three factors, sometimes with a 1 among them."""
    sizes: list[int] = []
    for _ in range(pick.of(0, 1, 1, 2)):
        divisors = [d for d in range(2, number) if number % d == 0]
        if not divisors:
            break
        sizes.append(pick.of(*divisors))
        number //= sizes[-1]
    sizes.append(number)
    pick.random.shuffle(sizes)
    if pick.coin(0.1):
        sizes.insert(pick.random.randrange(len(sizes) + 1), 1)
    return sizes


class _Views(Block):
    """Draws instructions while it runs them once; afterwards repeats them."""

    def __init__(self, shape, pick):
        super().__init__()
        self.inputs = nn.ModuleList(
            nn.Linear(shape[-1], pick.of(*WIDTHS), bias=pick.coin(0.7))
            for _ in range(pick.of(1, 2, 3))
        )
        self.own = nn.ParameterList()
        self.steps: list[tuple[str, tuple[Any, ...]]] = []
        pool = [torch.zeros(2, *shape[:-1], layer.out_features) for layer in self.inputs]
        for _ in range(pick.of(3, 5, 8)):
            name = pick.of(*_DRAW)
            step = _DRAW[name](pick, pool, self.own)
            if step is None:
                continue
            self.steps.append((name, step))
            pool = _APPLY[name](pool, self.own, *step)
        wide = sum(prod(x.shape[1:]) for x in pool)
        if not 0 < wide <= 4 * LARGEST:
            raise Unfit("too wide")
        self.out = nn.Linear(wide, pick.size(*shape))

    def extra_repr(self):
        return "\n".join(f"{name}{args}" for name, args in self.steps)

    def forward(self, x):
        pool = [layer(x) for layer in self.inputs]
        for name, args in self.steps:
            pool = _APPLY[name](pool, self.own, *args)
        return self.out(torch.cat([x.flatten(1) for x in pool], 1))


@block(2)
class Views(_Views):
    pass


@block(3)
class TokenViews(_Views):
    pass


def _any(pick, pool):
    return pick.random.randrange(len(pool))


def _dim(pick, x):
    return pick.random.randrange(1, x.ndim)


def _replaced(pool, place, *new):
    return [*pool[:place], *new, *pool[place + 1 :]]


def _draw_view(pick, pool, _own):
    place = _any(pick, pool)
    sizes = factored(pick, prod(pool[place].shape[1:]))
    if pick.coin(0.4):
        sizes[pick.random.randrange(len(sizes))] = -1
    return place, tuple(sizes)


def _view(pool, _own, place, sizes):
    x = pool[place]
    return _replaced(pool, place, x.reshape(x.shape[0], *sizes))


def _draw_permute(pick, pool, _own):
    place = _any(pick, pool)
    order = list(range(1, pool[place].ndim))
    pick.random.shuffle(order)
    return (place, (0, *order)) if len(order) > 1 else None


def _permute(pool, _own, place, order):
    return _replaced(pool, place, pool[place].permute(order))


def _draw_split(pick, pool, _own):
    place = _any(pick, pool)
    dim = _dim(pick, pool[place])
    size = pool[place].shape[dim]
    if size < 2 or len(pool) > 4:
        return None
    at = pick.random.randrange(1, size)
    return place, dim, (at, size - at)


def _split(pool, _own, place, dim, sizes):
    return _replaced(pool, place, *pool[place].split(sizes, dim))


def _draw_chunk(pick, pool, _own):
    place = _any(pick, pool)
    dim = _dim(pick, pool[place])
    return (place, dim, pick.of(2, 2, 3)) if pool[place].shape[dim] > 1 and len(pool) < 5 else None


def _chunk(pool, _own, place, dim, number):
    return _replaced(pool, place, *pool[place].chunk(number, dim))


def _draw_slice(pick, pool, _own):
    place = _any(pick, pool)
    dim = _dim(pick, pool[place])
    size = pool[place].shape[dim]
    if size < 3:
        return None
    start, stop = pick.of(None, 0, 1, -2, -size + 1), pick.of(None, -1, size, size - 1, size + 3)
    step = pick.of(1, 1, 1, 2, 3)
    index = slice(start, stop, step)
    return (place, dim, index) if len(range(size)[index]) else None


def _slice(pool, _own, place, dim, index):
    return _replaced(pool, place, pool[place][(slice(None),) * dim + (index,)])


def _pairs(pool, fits):
    return [(a, b) for a in range(len(pool)) for b in range(len(pool)) if fits(pool[a], pool[b])]


def _draw_two(pick, pool, _own):
    """Two tensors of one shape, or one with itself; else one is reshaped to the other."""
    same = _pairs(pool, lambda a, b: prod(a.shape[1:]) == prod(b.shape[1:]))
    others = [(a, b) for a, b in same if a != b]
    if not others and pick.coin(0.8):
        return None
    return (*pick.of(*(others or same)), pick.of("add", "add", "mul", "sub"))


def _two(pool, _own, a, b, name):
    x, y = pool[a], pool[b].reshape(pool[a].shape)
    new = getattr(torch, name)(x, y)
    return [*(p for i, p in enumerate(pool) if i not in (a, b)), new]


def _draw_cat(pick, pool, _own):
    found = [
        (a, b, d)
        for a, b in _pairs(pool, lambda x, y: x.ndim == y.ndim)
        for d in range(1, pool[a].ndim)
        if all(m == n or i == d for i, (m, n) in enumerate(zip(pool[a].shape, pool[b].shape, strict=True)))
    ]  # fmt: skip
    found = [own for own in found if own[0] != own[1]] or found
    return pick.of(*found) if found else None


def _cat(pool, _own, a, b, dim):
    new = torch.cat([pool[a], pool[b]], dim)
    return [*(p for i, p in enumerate(pool) if i not in (a, b)), new]


def _draw_act(pick, pool, _own):
    return _any(pick, pool), pick.of("relu", "sigmoid", "tanh", "exp", "square", "cos")


def _act(pool, _own, place, name):
    x = pool[place]
    return _replaced(pool, place, torch.exp(-(x**2)) if name == "exp" else getattr(torch, name)(x))


def _draw_repeat(pick, pool, _own):
    place = _any(pick, pool)
    if prod(pool[place].shape[1:]) > LARGEST // 3:
        return None
    return place, _dim(pick, pool[place]), pick.of(2, 3), pick.of("tile", "interleave", "expand")


def _repeat(pool, _own, place, dim, number, way):
    x = pool[place]
    if way == "interleave":
        return _replaced(pool, place, x.repeat_interleave(number, dim))
    if way == "tile":
        return _replaced(pool, place, x.repeat([number if d == dim else 1 for d in range(x.ndim)]))
    wide = x.unsqueeze(dim)
    sizes = [number if d == dim else -1 for d in range(wide.ndim)]
    return _replaced(pool, place, wide.expand(sizes))


def _draw_pad(pick, pool, _own):
    place = _any(pick, pool)
    back = pool[place].ndim - 1 - _dim(pick, pool[place])
    return place, (0, 0) * back + (pick.of(0, 1, 2), pick.of(0, 1, 2)), pick.of(0.0, 0.0, 1.0)


def _pad(pool, _own, place, amounts, value):
    return _replaced(pool, place, F.pad(pool[place], amounts, value=value))


def _draw_reduce(pick, pool, _own):
    place = _any(pick, pool)
    if pool[place].ndim < 3:
        return None
    return place, _dim(pick, pool[place]), pick.of("sum", "sum", "mean", "amax"), pick.coin()


def _reduce(pool, _own, place, dim, name, keep):
    return _replaced(pool, place, getattr(torch, name)(pool[place], dim, keepdim=keep))


def _draw_matmul(pick, pool, _own):
    def fits(a, b):
        if a.ndim != b.ndim or a.ndim < 3 or prod(a.shape[1:]) * b.shape[-1] > 20 * LARGEST:
            return False
        return a.shape[-1] == b.shape[-2] and a.shape[1:-2] == b.shape[1:-2]

    found = _pairs(pool, fits)
    if found:
        return (*pick.of(*found), False)
    rows = _pairs(pool, lambda a, b: fits(a, b.mT) if b.ndim > 2 else False)
    return (*pick.of(*rows), True) if rows else None


def _matmul(pool, _own, a, b, turned):
    new = pool[a] @ (pool[b].mT if turned else pool[b]) / 4
    return [*(p for i, p in enumerate(pool) if i not in (a, b)), new]


def _draw_linear(pick, pool, own):
    place = _any(pick, pool)
    own.append(nn.Parameter(torch.randn(pick.of(2, 3, 4, 6), pool[place].shape[-1]) / 2))
    return place, len(own) - 1


def _linear(pool, own, place, number):
    return _replaced(pool, place, F.linear(pool[place], own[number]))


def _draw_scale(pick, pool, own):
    """A parameter on some of the dimensions, 1 on the others."""
    place = _any(pick, pool)
    sizes = [n if pick.coin(0.6) else 1 for n in pool[place].shape[1:]]
    own.append(nn.Parameter(torch.randn(sizes)))
    return place, len(own) - 1, pick.of("add", "mul")


def _scale(pool, own, place, number, name):
    return _replaced(pool, place, getattr(torch, name)(pool[place], own[number]))


def _draw_norm(pick, pool, _own):
    place = _any(pick, pool)
    return (place,) if pick.coin(0.3) else None


def _norm(pool, _own, place):
    x = pool[place]
    return _replaced(pool, place, F.layer_norm(x, x.shape[-1:]))


def _draw_write(pick, pool, _own):
    """In-place work on a part of a tensor."""
    place = _any(pick, pool)
    dim = _dim(pick, pool[place])
    size = pool[place].shape[dim]
    return (place, dim, pick.random.randrange(size), pick.of("add", "mul", "zero")) if size > 1 else None  # fmt: skip


def _write(pool, _own, place, dim, at, name):
    x = pool[place].clone()
    part = x.narrow(dim, 0, at) if at else x
    if name == "add":
        part += 0.5
    elif name == "mul":
        part *= 2.0
    else:
        part.zero_()
    return _replaced(pool, place, x)


_DRAW = {
    "view": _draw_view,
    "permute": _draw_permute,
    "split": _draw_split,
    "chunk": _draw_chunk,
    "slice": _draw_slice,
    "two": _draw_two,
    "cat": _draw_cat,
    "act": _draw_act,
    "repeat": _draw_repeat,
    "pad": _draw_pad,
    "reduce": _draw_reduce,
    "matmul": _draw_matmul,
    "linear": _draw_linear,
    "scale": _draw_scale,
    "norm": _draw_norm,
    "write": _draw_write,
}
_APPLY = {
    "view": _view,
    "permute": _permute,
    "split": _split,
    "chunk": _chunk,
    "slice": _slice,
    "two": _two,
    "cat": _cat,
    "act": _act,
    "repeat": _repeat,
    "pad": _pad,
    "reduce": _reduce,
    "matmul": _matmul,
    "linear": _linear,
    "scale": _scale,
    "norm": _norm,
    "write": _write,
}
