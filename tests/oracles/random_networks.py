"""Random networks for the structure room: real modules with Python code, built from blocks by a seed.

A blueprint names an input, blocks with a seed each, how each block is linked to what came before, and an output. The
same blueprint always gives the same network, and a block may be left out of one: so a failure can be made small.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from oracles import blocks_images, blocks_odd, blocks_tokens, blocks_vectors, blocks_views
from oracles.random_choice import BLOCKS, Pick, Unfit

__all__ = ["Blueprint", "Network", "Placed", "RandomNetwork", "build", "random_blueprint", "shrink"]

LINKS = ("plain", "plain", "plain", "plain", "residual", "cat", "mul", "twice", "older")
FAMILIES = (blocks_images, blocks_odd, blocks_tokens, blocks_vectors, blocks_views)
"""Importing them registers their blocks."""
OUTPUTS = ("head", "head", "head", "plain", "pair", "dict", "pooled")


@dataclass(frozen=True)
class Placed:
    """A block of a blueprint."""

    name: str
    seed: int
    link: str


@dataclass(frozen=True)
class Blueprint:
    """All there is to know about a network."""

    seed: int
    start: str
    blocks: tuple[Placed, ...]
    output: str

    def __str__(self) -> str:
        blocks = ", ".join(f"{b.name}@{b.seed}/{b.link}" for b in self.blocks)
        return f"seed {self.seed}: {self.start} → {blocks} → {self.output}"


class Network(nn.Module):
    """Blocks one after the other, some with a shortcut around them."""

    def __init__(self) -> None:
        super().__init__()
        self.table: nn.Embedding | None = None
        self.blocks = nn.ModuleList()
        self.links: list[str] = []
        self.output = "plain"
        self.head: nn.Module | None = None

    def forward(self, x: Tensor):
        if self.table is not None:
            x = self.table(x)
        seen = [x]
        for block, link in zip(self.blocks, self.links, strict=True):
            x = linked(block, link, x, seen)
            seen.append(x)
        if self.head is not None:
            if self.output == "pooled":
                x = x.flatten(1)
            elif x.ndim == 4:
                x = x.mean((2, 3))
            y = self.head(x)
        else:
            y = x
        if self.output == "pair":
            return y, seen[0].float()
        return {"out": y} if self.output == "dict" else y


def linked(block: nn.Module, link: str, x: Tensor, seen: list[Tensor]) -> Tensor:
    """What comes after a block."""
    y = block(x)
    channel = 1 if y.ndim in (2, 4) else -1
    if link == "twice" and y.shape == x.shape:
        y = block(y)
    elif link == "residual" and y.shape == x.shape:
        y = x + y
    elif link == "mul" and y.shape == x.shape:
        y = x * y
    elif link == "older":
        for old in reversed(seen[:-1]):
            if old.shape == y.shape:
                return y + old
    elif link == "cat" and y.ndim == x.ndim:
        shapes = [list(t.shape) for t in (x, y)]
        for shape in shapes:
            shape.pop(channel)
        if shapes[0] == shapes[1]:
            y = torch.cat([x, y], channel)
    return y


@dataclass(frozen=True, eq=False)
class RandomNetwork:
    """A network in eval mode and float64, and how to call it."""

    blueprint: Blueprint
    model: Network
    inputs: Callable[[int, int], Tensor]
    """Inputs from a batch size and a seed."""
    batch: int
    counted: bool
    """Whether torch's flop counter sees all of its products."""
    einsum: bool
    """Whether einsum is used, which torch computes in another way where sizes are 1."""


def fitted(block: nn.Module, link: str, x: Tensor, seen: list[Tensor]) -> Tensor:
    """As `linked`; a group norm of lone values, which torch refuses, does not fit."""
    try:
        return linked(block, link, x, seen)
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            raise Unfit(str(error)) from error
        raise


def random_blueprint(seed: int, *, longest: int = 5) -> Blueprint:
    """A blueprint that can be built."""
    pick = Pick(seed)
    length = min(pick.of(1, 1, 1, 2, 2, 2, 3, 4), longest)
    blueprint = Blueprint(
        seed, pick.of("image", "tokens", "words", "vector"), (), pick.of(*OUTPUTS)
    )
    names = sorted(BLOCKS)
    while len(blueprint.blocks) < length:
        name = pick.of(*names, *["Views", "TokenViews"] * 3)
        placed = Placed(name, pick.random.randrange(10**6), pick.of(*LINKS))
        longer = replace(blueprint, blocks=(*blueprint.blocks, placed))
        try:
            build(longer)
        except Unfit:
            continue
        blueprint = longer
    return blueprint


def build(blueprint: Blueprint) -> RandomNetwork:
    """The network of a blueprint; `Unfit` where a block cannot stand where it is."""
    pick = Pick(blueprint.seed)
    torch.manual_seed(blueprint.seed)
    batch = pick.of(1, 2, 2, 3, 3, 4)
    width = pick.of(3, 4, 5, 6)
    shape = {
        "image": (width, *pick.of((4, 4), (4, 6), (5, 5))),
        "tokens": (pick.of(3, 4, 6), width),
        "words": (pick.of(3, 4, 6),),
        "vector": (width,),
    }[blueprint.start]
    model = Network()
    if blueprint.start == "words":
        model.table = nn.Embedding(7, width)
    model.output = blueprint.output

    def inputs(size: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if blueprint.start == "words":
            return torch.randint(0, 7, (size, *shape), generator=generator)
        return torch.randn(size, *shape, generator=generator, dtype=torch.float64)

    x = inputs(batch, 0)
    counted, einsum = True, False
    with torch.no_grad():
        model = model.double().eval()
        x = x if model.table is None else model.table(x)
        seen = [x]
        for placed in blueprint.blocks:
            kind = BLOCKS[placed.name]
            if kind.takes != x.ndim:
                raise Unfit(f"{placed.name} takes {kind.takes} dimensions, not {x.ndim}")
            torch.manual_seed(placed.seed)
            block = kind(tuple(x.shape[1:]), Pick(placed.seed)).double().eval()
            _settle(block, placed.seed)
            x = fitted(block, placed.link, x, seen)
            seen.append(x)
            if not 0 < x.numel() <= 6000 * batch or not x.isfinite().all() or x.abs().max() > 1e6:
                raise Unfit("too large")
            model.blocks.append(block)
            model.links.append(placed.link)
            counted &= block.counted
            einsum |= "einsum" in inspect.getsource(kind)
        if blueprint.output != "plain":
            width = x.shape[1 if x.ndim == 4 else -1]
            if blueprint.output == "pooled":
                width = x[0].numel()
            model.head = nn.Linear(width, 2).double()
    return RandomNetwork(blueprint, model.eval(), inputs, batch, counted, einsum)


def shrink(blueprint: Blueprint, fails: Callable[[RandomNetwork], bool]) -> Blueprint:
    """A smaller blueprint that still fails: blocks left out, links made plain, the output simple."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(blueprint):
            try:
                still = fails(build(smaller))
            except Unfit:
                continue
            if still:
                blueprint, changed = smaller, True
                break
    return blueprint


def _smaller(blueprint: Blueprint):
    blocks = blueprint.blocks
    for place in range(len(blocks)):
        if len(blocks) > 1:
            yield replace(blueprint, blocks=(*blocks[:place], *blocks[place + 1 :]))
    for place, own in enumerate(blocks):
        if own.link != "plain":
            simple = replace(own, link="plain")
            yield replace(blueprint, blocks=(*blocks[:place], simple, *blocks[place + 1 :]))
    if blueprint.output != "head":
        yield replace(blueprint, output="head")


def _settle(block: nn.Module, seed: int) -> None:
    """Biases, scales and running statistics away from where they start; some parameters frozen."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        if not tensor.is_floating_point() or name.endswith(("mask", "cos", "sin")):
            continue
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
        if name.endswith("running_var"):
            tensor.copy_(noise + 0.5)
        elif tensor.ndim <= 1:
            tensor.add_(noise - 0.3)
    if seed % 3 == 0:
        for number, parameter in enumerate(block.parameters()):
            parameter.requires_grad_(number % 2 == 0)
