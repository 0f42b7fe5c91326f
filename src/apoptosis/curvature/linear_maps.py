"""Layers that are one linear map at every position, seen as matrices: y = W x + b, the same W and b everywhere.

For a linear layer a position is whatever its leading dimensions count (samples, tokens) and x the vector there. For a
convolution it is a place of the output and x the patch that the kernel covers, (channels, kernel) flattened. With g
groups of channels there are g maps, each with its own part of x and of y:

    x: (g, n, positions)      y: (g, m, positions)      W: (g, m, n)

A layer with a bias reads one more input that is always 1. transformers' `Conv1D` is a linear layer whose weight lies
turned, (inputs, outputs); it is known by its name, for the package may not be there.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

__all__ = [
    "FEWEST_PLACES",
    "add_",
    "as_inputs",
    "as_matrix",
    "as_outputs",
    "enough_places",
    "input_dim",
    "is_bearable",
    "is_linear_map",
    "is_product",
    "output_dim",
    "pairs",
]

CHUNK = 2**22
"""Most numbers of x at a time: 32 MB in float64, whatever the batch."""

FEWEST_PLACES, PLACES_PER_INPUT = 64, 0.25
"""Places of a sample that are enough for sums of products: neighbours say much the same, and samples are many."""

MOST_SIDE = 12_288
"""Of a square matrix: 1.2 GB in float64, and several are needed. A VGG's first linear layer reads 25,088 numbers."""

NEAR = 0.01
"""How far from W x + b a call may be, relative: TF32 and bfloat16 are within, another padding or a factor is not."""


def is_linear_map(module: nn.Module) -> bool:
    """Whether the module is one of these layers by its class; `is_product` tells whether it behaves as one."""
    return isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)) or _is_turned(module)


def output_dim(module: nn.Module) -> int:
    """The dimension of the weight that outputs run along."""
    return 1 if _is_turned(module) else 0


def input_dim(module: nn.Module) -> int:
    """The dimension of the weight that inputs run along: those of one group, for a convolution."""
    return 1 - output_dim(module)


def is_bearable(module: Any) -> bool:
    """Whether square matrices of what the layer reads, and of what it gives, are no larger than memory can bear."""
    _, outputs, inputs = as_matrix(module, module.weight).shape
    return max(outputs, inputs) <= MOST_SIDE


def as_matrix(module: Any, weight: Tensor) -> Tensor:
    """The layer's weight, or something of its shape, as (g, m, n)."""
    if _is_turned(module):
        return weight.t()[None]
    groups = module.groups if isinstance(module, _ConvNd) else 1
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def as_outputs(module: nn.Module, y: Tensor) -> Tensor:
    """What the layer gave, as (samples or positions, outputs, positions of a sample)."""
    if not isinstance(module, _ConvNd):
        return y.reshape(-1, y.shape[-1], 1)
    return y.reshape(-1, *y.shape[-1 - len(module.kernel_size) :]).flatten(2)


def as_inputs(module: Any, x: Tensor) -> Tensor:
    """What the layer read, as (samples or positions, inputs, …), in step with `as_outputs`."""
    inside = len(module.kernel_size) if isinstance(module, _ConvNd) else 0
    return x.reshape(-1, *x.shape[-1 - inside :])


def enough_places(module: Any) -> int:
    """How many places of a sample `pairs` takes if it may draw, where there are more."""
    return max(FEWEST_PLACES, int(PLACES_PER_INPUT * as_matrix(module, module.weight).shape[2]))


def pairs(
    module: Any,
    x: Tensor,
    *ys: Tensor,
    generator: torch.Generator | None = None,
    most: int | None = None,
) -> Iterator[tuple[Tensor, ...]]:
    """Inputs (g, n, positions) and outputs (g, m, positions) of each kind in float64, a chunk at a time.

    Args:
        module: the layer.
        x: what went into its call.
        *ys: what came out, what was wanted and the like, as `as_outputs` shapes it.
        generator: if given, of a convolution with more places than are needed only some are taken, drawn anew for each
            chunk.
        most: how many of them; `enough_places` unless given.
    """
    is_conv = isinstance(module, _ConvNd)
    x = as_inputs(module, x)
    groups = module.groups if is_conv else 1
    num_inputs = prod(module.kernel_size) * x.shape[1] if is_conv else x.shape[1]
    num_places = ys[0].shape[2]
    enough = most or enough_places(module)
    some_places = generator is not None and num_places > enough
    size = max(1, CHUNK // max(1, num_inputs * (enough if some_places else num_places)))
    for some, *outputs in zip(x.split(size), *(y.split(size) for y in ys), strict=True):
        chosen = None
        if some_places:
            chosen = torch.randperm(num_places, generator=generator)[:enough].to(x.device)
            outputs = [own[:, :, chosen] for own in outputs]  # noqa: PLW2901 - fewer of the same
        columns = _patches(module, some, chosen) if is_conv else some.t()[None].double()
        if module.bias is not None:
            columns = torch.cat([columns, columns.new_ones(groups, 1, columns.shape[2])], 1)
        shape = (groups, -1, columns.shape[2])
        yield columns, *(own.double().transpose(0, 1).reshape(shape) for own in outputs)


def is_product(module: Any, x: Tensor, y: Tensor) -> bool:
    """Whether a call gave W x + b. A forward of a subclass, or somebody's hook, may make something else of it."""
    matrix = as_matrix(module, module.weight).double()
    if isinstance(module, _ConvNd):
        sizes = _places(module, _padded(module, x))
        fits = list(y.shape[-len(sizes) :]) == sizes
        fits &= x.shape[-1 - len(sizes)] == module.groups * module.weight.shape[1]
    else:
        fits = x.shape[-1] == matrix.shape[2]
    if not fits:
        return False
    if module.bias is not None:
        matrix = torch.cat([matrix, module.bias.double().view(len(matrix), -1, 1)], 2)
    inputs, made = next(pairs(module, x, as_outputs(module, y)))
    return bool((matrix @ inputs - made).norm() <= NEAR * made.norm())


def add_(module: Any, change: Tensor) -> None:
    """Add (g, m, n), the bias's column last, to the weights where they are."""
    with torch.no_grad():
        if module.bias is not None:
            module.bias.copy_(module.bias.double() + change[..., -1].flatten())
            change = change[..., :-1]
        new = as_matrix(module, module.weight).double() + change
        module.weight.copy_(new[0].t() if _is_turned(module) else new.reshape(module.weight.shape))


def _is_turned(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and not isinstance(module, _ConvNd)


def _patches(conv: Any, x: Tensor, chosen: Tensor | None) -> Tensor:
    """What the kernel covers: (samples, channels, ...) becomes (g, n, positions), in float64, with one copy.

    `chosen` are places to look at, counted along the rows; all unless given.
    """
    x = _padded(conv, x)
    of_sample, of_channel, *inside = x.stride()
    places = _places(conv, x)
    between = [step * s for step, s in zip(inside, conv.stride, strict=True)]
    within = [step * d for step, d in zip(inside, conv.dilation, strict=True)]
    view = x.as_strided(
        (x.shape[1], *conv.kernel_size, len(x), *places),
        (of_channel, *within, of_sample, *between),
    )
    if chosen is not None:
        view = view[(..., *torch.unravel_index(chosen, tuple(places)))]
    copied = torch.empty(view.shape, dtype=torch.float64, device=x.device).copy_(view)
    return copied.view(conv.groups, -1, prod(view.shape[1 + len(places) :]))


def _padded(conv: Any, x: Tensor) -> Tensor:
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return F.pad(x, conv._reversed_padding_repeated_twice, mode=mode)


def _places(conv: Any, padded: Tensor) -> list[int]:
    """How often the kernel fits, along each side."""
    lengths = padded.shape[-len(conv.kernel_size) :]
    sides = zip(lengths, conv.kernel_size, conv.stride, conv.dilation, strict=True)
    return [(side - (k - 1) * d - 1) // s + 1 for side, k, s, d in sides]
