"""Which layers belong together: blocks, modules that turn one tensor into another by several layers.

A block ends in one of its layers, its `end`: what becomes of that one's outputs (`targets`) is what the block gives. In
a residual network that is the last layer of a branch, and what it gives is the sum. Layers around the end, in the
smallest module that holds several, are the block's. Where nothing is added, the smallest modules that hold several
layers are blocks, and the last of these the end. A network that has no such parts is one block. Layers in no block
stand by themselves: stems, heads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from apoptosis.repair.reaching import Station
from apoptosis.repair.survey import Layer
from apoptosis.structure import Spot

__all__ = ["Block", "find_blocks", "within"]

MOST_LAYERS = 16
"""Of a block: what holds more is no part but a network."""


@dataclass(frozen=True, eq=False)
class Block:
    """A module by its path, and its layers in the order of their calls."""

    path: str
    layers: tuple[Layer, ...]

    @property
    def end(self) -> Layer:
        """Whose outputs are the block's."""
        return self.layers[-1]

    @property
    def station(self) -> Station:
        """Where to look at it: ahead of its call, with what its end will be added to if that is there by then."""
        spot = self.end.outlet and self.end.outlet.other
        return Station(self.path, self.path, None if self.spot_inside else spot, ahead=True)

    @property
    def spot_inside(self) -> Spot | None:
        """Where what its end is added to is seen, if that is only when it runs."""
        spot = self.end.outlet and self.end.outlet.other
        return spot if spot is not None and self.holds(spot.module) else None

    def holds(self, name: str) -> bool:
        """Whether a module or a tensor lies within it."""
        return name != self.path and (not self.path or name.startswith(f"{self.path}."))


def within(path: str, name: str) -> str:
    """The name of something in a module, seen from there.

    >>> within("layer1.0", "layer1.0.conv1.weight")
    'conv1.weight'
    """
    return name[len(path) + 1 :] if path else name


def find_blocks(
    layers: Sequence[Layer], can_hold: Callable[[str], bool]
) -> list[Block | tuple[Layer]]:
    """All layers in the order of their calls, alone or as blocks; `can_hold` tells which modules may be one."""
    stages: list[tuple[str | None, list[Layer]]] = []
    for layer in layers:
        stages.append((None, [layer]))
        if layer.outlet is not None and layer.outlet.other is not None:
            for around in _around(layer.path):
                inside = _inside(stages, around)
                if around and len(inside) > 1:
                    _join(stages, inside, around, can_hold)
                    break
    found = {around for layer in layers for around in _around(layer.path)}
    for around in sorted(found, key=lambda path: (-path.count("."), not path, path)):
        inside = _inside(stages, around)
        are_single = all(stages[place][0] is None for place in inside)
        is_whole = not around and len(inside) == len(stages)
        if len(inside) > 1 and are_single and (around or is_whole):
            _join(stages, inside, around, can_hold)
    return [(own[0],) if path is None else Block(path, tuple(own)) for path, own in stages]


def _join(
    stages: list[tuple[str | None, list[Layer]]],
    inside: list[int],
    around: str,
    can_hold: Callable[[str], bool],
) -> None:
    """Make one block of several stages, if they follow each other."""
    own = [layer for place in inside for layer in stages[place][1]]
    follow_each_other = inside[-1] - inside[0] == len(inside) - 1
    shown = own[-1].attention is None  # else the dense network shows it elsewhere
    if follow_each_other and shown and len(own) <= MOST_LAYERS and can_hold(around):
        stages[inside[0] : inside[-1] + 1] = [(around, own)]


def _inside(stages: list[tuple[str | None, list[Layer]]], around: str) -> list[int]:
    """Stages with layers in a module."""
    prefix = f"{around}." if around else ""
    return [
        place
        for place, (_, own) in enumerate(stages)
        if any(layer.path.startswith(prefix) for layer in own)
    ]


def _around(path: str) -> Iterator[str]:
    """Modules that hold a layer, the smallest first, the network itself last."""
    while path:
        path = path.rpartition(".")[0]
        yield path
