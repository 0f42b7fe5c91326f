"""2:4 masks as torch's semi-structured tensors, which NVIDIA GPUs from Ampere on multiply with sparse tensor cores.

Only `nn.Linear` has kernels for them; convolutions keep their zeros and their speed. Whether a layer gains depends on
its shape and batch: benchmarks/semi_structured.py measures it.
"""

from typing import TypeVar

import torch
from torch import nn
from torch.sparse import to_sparse_semi_structured

from apoptosis.errors import ConfigError, ModelError
from apoptosis.masks.keeping import masks_of, release_
from apoptosis.masks.pattern import Pattern
from apoptosis.structure import copy_with

__all__ = ["semi_structured"]

AnyModel = TypeVar("AnyModel", bound=nn.Module)

TWO_OF_FOUR = Pattern(2, 4)
_MULTIPLES = {torch.float16: (32, 64), torch.bfloat16: (32, 64)}
"""Rows and columns of a weight must be multiples of these."""


def semi_structured(model: AnyModel) -> AnyModel:
    """A copy for inference in which 2:4 masked linear weights are compressed; the given one is untouched.

    Raises:
        ConfigError: the model keeps no 2:4 masks of linear layers.
        ModelError: it is not on a CUDA device, not in 16 bits, or no layer has a size that the kernels take.
    """
    masks = masks_of(model)
    own = {} if masks is None else masks.masks
    linear = {
        f"{path}.weight" if path else "weight": module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    chosen = {
        name: linear[name] for name, m in own.items() if name in linear and m.fits(TWO_OF_FOUR, 1)
    }
    if not chosen:
        found = f"its masks are of {', '.join(list(own)[:3])}" if own else "it keeps none"
        raise ConfigError(
            f"{type(model).__name__} keeps no 2:4 masks of nn.Linear, which alone has kernels ({found}). Where it has "
            'such layers, make them: sparsify(model, batches, Sparsity(pattern="2:4")).'
        )
    for name, module in chosen.items():
        weight = module.weight
        if not weight.is_cuda or weight.dtype not in _MULTIPLES:
            raise ModelError(
                f"{name!r} is {weight.dtype} on {weight.device}; semi-structured tensors are float16 or bfloat16 on a "
                'CUDA device. Convert first: model.to("cuda", torch.float16).'
            )
    fits = [name for name, module in chosen.items() if _fits(module.weight)]
    if not fits:
        name, module = next(iter(chosen.items()))
        raise ModelError(
            f"No 2:4 layer has a size that the kernels take: {name!r} is {tuple(module.weight.shape)}; rows and "
            f"columns must be multiples of {' and '.join(map(str, _MULTIPLES[module.weight.dtype]))}."
        )
    fast = release_(copy_with(model, {})).eval().requires_grad_(requires_grad=False)
    modules = dict(fast.named_modules())
    for name in fits:
        module = modules[name.rpartition(".")[0]]
        assert isinstance(module, nn.Linear), "chosen among linear layers"
        compressed = to_sparse_semi_structured(module.weight.detach())
        module.weight = nn.Parameter(compressed, requires_grad=False)
    return fast


def _fits(weight: torch.Tensor) -> bool:
    return all(
        size % unit == 0 for size, unit in zip(weight.shape, _MULTIPLES[weight.dtype], strict=True)
    )
