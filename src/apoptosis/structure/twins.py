"""Whether two networks compute the same: random weights, other inputs, outputs compared.

Random, because trained weights can hide a wrong cut behind dead units, and example inputs are often zeros.
"""

from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.modes import in_eval_mode
from apoptosis.structure.arrangement import tensors_in
from apoptosis.structure.randomness import random_state_put_back
from apoptosis.structure.recording import Example
from apoptosis.structure.surgery import copy_with

__all__ = ["TOLERANCE", "as_double", "compare", "distance", "randomised", "redrawn"]

TOLERANCE = (
    1e-6  # relative; code that casts to float32 on its way leaves about 1e-7, a wrong cut a percent
)


def compare(a: nn.Module, b: nn.Module, examples: list[Example]) -> float:
    """The greatest relative distance of the outputs of two networks, in eval mode; the random state is put back."""
    with random_state_put_back(a), torch.no_grad(), in_eval_mode(a), in_eval_mode(b):
        worst = 0.0
        for example in examples:
            outputs: list[Any] = []
            for network in (a, b):
                torch.manual_seed(0)  # for dropout that is never off
                outputs.append(example.map(Tensor.clone).run(network))
            worst = max(worst, distance(*outputs))
        return worst


def distance(found: Any, expected: Any) -> float:
    """Greatest difference of two results over the greatest expected number, tensor by tensor."""
    worst = 0.0
    tensors = [tensors_in(found), tensors_in(expected)]
    if len(tensors[0]) != len(tensors[1]):
        return inf
    for a, b in zip(*tensors, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return inf
        if not a.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(a, b) else inf)
        elif a.numel():
            difference = (a - b).abs().max() / b.abs().max().clamp_min(1e-30)
            worst = max(worst, inf if difference.isnan() else float(difference))
    return worst


def randomised(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """A float64 copy whose parameters and statistics are all different from each other and from zero."""
    twin = copy_with(model, {}).double()
    with torch.no_grad():
        for parameter in twin.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3
            centre = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_((centre + scale * noise).to(parameter.device))
        for name, buffer in twin.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                noise = torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
                buffer.copy_((0.5 + noise).to(buffer.device))
    return twin


def as_double(example: Example) -> Example:
    """The example in float64, where it has floating point at all."""
    return example.map(lambda t: t.double() if t.is_floating_point() else t)


def redrawn(example: Example, generator: torch.Generator) -> Example:
    """Other numbers where they are real; token ids and masks stay."""

    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return noise.to(tensor)

    return example.map(drawn)
