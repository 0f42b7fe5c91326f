"""What the blocks of random networks share: a source of choices, and the class they derive from.

Sizes are small and often coincide with one another: a rule that goes by equal sizes instead of by axes is found out.
"""

import random
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import nn

__all__ = ["BLOCKS", "Block", "Pick", "Unfit", "block"]

SIZES = (2, 3, 4, 4, 5, 6, 6, 8, 12)
ACTIVATIONS = ("relu", "gelu", "silu", "sigmoid", "tanh", "elu", "softplus", "cos", "identity")


class Unfit(Exception):  # noqa: N818 - an answer, no error
    """A block cannot stand where it was put."""


class Pick:
    """A seeded source of choices."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def coin(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def of(self, *options: Any) -> Any:
        return self.random.choice(options)

    def size(self, *near: int) -> int:
        """A width; with `near`, often one of those."""
        if near and self.coin(0.4):
            return self.random.choice(near)
        return self.random.choice(SIZES)

    def divisor(self, number: int, *, proper: bool = False) -> int:
        """A divisor above 1; `proper` ones are below the number too."""
        found = [d for d in range(2, number + (not proper)) if number % d == 0]
        if not found:
            raise Unfit(f"{number} has no such divisor")
        return self.random.choice(found)

    def act(self) -> "Act":
        return Act(self.random.choice(ACTIVATIONS))


class Act(nn.Module):
    """An activation by its name; some have f(0) ≠ 0, some work in place."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def extra_repr(self) -> str:
        return self.name

    def forward(self, x):
        match self.name:
            case "identity":
                return x
            case "relu":
                return F.relu(x)
            case "cos":
                return x.cos()
            case _:
                return getattr(F, self.name)(x)


class Block(nn.Module):
    """A part of a network, made for inputs of `shape` (without the batch)."""

    takes: ClassVar[int]
    """How many dimensions, batch included: 4 for images, 3 for tokens, 2 for vectors."""
    counted: bool = True
    """Whether torch's flop counter sees all of its products, and multiplies as written."""


BLOCKS: dict[str, type[Block]] = {}


def block(takes: int, *, counted: bool = True):
    """Register a block."""

    def register(cls: type[Block]) -> type[Block]:
        assert cls.__name__ not in BLOCKS, f"{cls.__name__} stands twice"
        cls.takes, cls.counted = takes, counted
        BLOCKS[cls.__name__] = cls
        return cls

    return register
