"""Compare the outputs of two networks, on random weights and other inputs.

Random, because trained weights can hide a wrong cut behind dead units, and example inputs are often zeros.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from apoptosis.modes import in_eval_mode
from apoptosis.structure.arrangement import tensors_in
from apoptosis.structure.randomness import random_state_put_back
from apoptosis.structure.recording import Example
from apoptosis.structure.surgery import copy_with

__all__ = [
    "TOLERANCE",
    "as_double",
    "compare",
    "constant_noise",
    "distance",
    "randomised",
    "redrawn",
]

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
    """Greatest difference of two results over the greatest expected number, tensor by tensor.

    Infinities and NaN must stand in the same places, and are no numbers to measure by.
    """
    worst = 0.0
    tensors = [tensors_in(found), tensors_in(expected)]
    if len(tensors[0]) != len(tensors[1]):
        return inf
    for a, b in zip(*tensors, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return inf
        if not a.is_floating_point() and not a.is_complex():
            worst = max(worst, 0.0 if torch.equal(a, b) else inf)
        elif a.numel():
            worst = max(worst, _relative(a, b))
    return worst


def _relative(a: Tensor, b: Tensor) -> float:
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()):
        return inf
    rest, other = a[~finite], b[~finite]
    if not bool(((rest == other) | (rest.isnan() & other.isnan())).all()):
        return inf
    if not bool(finite.any()):
        return 0.0
    a, b = a[finite], b[finite]
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


@contextmanager
def constant_noise() -> Iterator[None]:
    """Inside, what is drawn at random is the same number everywhere, whatever its shape.

    A cut network draws fewer numbers, so by one seed each unit would get others than in the whole network.
    """
    with _ConstantNoise():
        yield


class _ConstantNoise(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if name in _DRAWN:
            for tensor in tensors_in(result):
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.fill_(0.5)
        elif name == "native_dropout":
            result[0].copy_(args[0])
        return result


_DRAWN = frozenset(
    {
        *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "rand"),
        *("rand_like", "randn", "randn_like", "random", "uniform"),
    }
)
"""Not attention and others that are tagged as random for the sake of an option."""


def randomised(
    model: nn.Module, generator: torch.Generator, dtype: torch.dtype | None = torch.float64
) -> nn.Module:
    """A copy in float64, or with another `dtype` or as it is (None), with random parameters and statistics.

    They are all different from each other and from zero.
    """
    twin = copy_with(model, {})
    twin = twin if dtype is None else twin.to(dtype)
    with torch.no_grad():
        for parameter in twin.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = max(prod(parameter.shape[1:]), 1) ** -0.5 if parameter.ndim > 1 else 0.3
            centre = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_((centre + scale * noise).to(parameter.device))
        for name, buffer in twin.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                noise = torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
                buffer.copy_((0.5 + noise).to(buffer.device))
    return twin


def as_double(example: Example) -> Example:
    """The example in float64 or complex128, where it has floating point at all."""

    def doubled(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(torch.complex128)
        return tensor.double() if tensor.is_floating_point() else tensor

    return example.map(doubled)


def redrawn(example: Example, generator: torch.Generator) -> Example:
    """Other numbers where they are real; token ids and masks stay."""

    def drawn(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return noise.to(tensor)

    return example.map(drawn)
