"""The network that `load` is given: checked to be the one a checkpoint was made from, and made ready to be rebuilt.

It gives code and whatever a state dict leaves out (buffers that are not persistent); its numbers do not matter, nor do
masks that it keeps. It is never changed: what must be different is different on a copy.
"""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from apoptosis.checkpoint.number_types import ALL_DTYPES
from apoptosis.checkpoint.record import SavedRun
from apoptosis.errors import CheckpointError
from apoptosis.masks import masks_of, release_
from apoptosis.structure import copy_with, model_tensors

__all__ = ["check_dense", "check_has_room", "in_saved_types", "with_numbers", "without_masks"]


SPARE = 2**20
"""Numbers that are read in any case: a few megabytes."""


def check_dense(dense: nn.Module, expected: Mapping[str, tuple[int, ...]], run: SavedRun) -> None:
    """Names and shapes of the dense network are those the checkpoint was made from, and no number will be missing.

    Raises:
        CheckpointError: it is another network.
    """
    _check_shapes(dense, expected, run)
    for name, tensor in model_tensors(dense).items():
        if tensor.is_meta and name not in run.shapes:
            raise CheckpointError(
                f"{name!r} is not saved with the network (a buffer that is not persistent, or a plain attribute), and "
                "on the meta device it has no numbers. Make the dense network on the CPU: "
                "`load(path, dense=make_network)`."
            )


def check_has_room(dense: nn.Module, run: SavedRun) -> None:
    """The record has about as many numbers as the network: they are read only then.

    A few more are let pass here: whoever looks at shapes says which tensor differs.

    Raises:
        CheckpointError: it has many more.
    """
    state = dense.state_dict(keep_vars=True).values()
    room = sum(t.numel() for t in state if isinstance(t, Tensor) and not is_lazy(t))
    asked = sum(prod(held.shape) for held in run.tensors)
    if asked > 2 * room + SPARE and not any(isinstance(t, Tensor) and is_lazy(t) for t in state):
        raise CheckpointError(
            f"The checkpoint is of a network with {asked:,} numbers; {type(dense).__name__} has {room:,}. Make the one "
            "it was pruned from."
        )


def without_masks(dense: nn.Module) -> nn.Module:
    """The dense network, or a copy that keeps no masks: they would be put on the saved numbers."""
    if all(masks_of(module) is None for module in dense.modules()):
        return dense
    plain = copy_with(dense, {})
    for module in plain.modules():
        release_(module)
    return plain


def in_saved_types(dense: nn.Module, run: SavedRun) -> nn.Module:
    """The dense network, or a copy of it where numbers of another type were saved."""
    saved = dict(run.other_dtypes) | run.dtypes
    changed: dict[int, Tensor] = {}
    for name, tensor in model_tensors(dense).items():
        dtype = ALL_DTYPES.get(saved.get(name, ""), tensor.dtype)
        if tensor.dtype != dtype and tensor.is_floating_point() and dtype.is_floating_point:
            new = tensor.detach().to(dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            changed[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
    return copy_with(dense, changed) if changed else dense


def with_numbers(dense: nn.Module) -> nn.Module:
    """A network on the meta device with numbers of no meaning: a program is tried before it is delivered."""
    generator = torch.Generator().manual_seed(0)
    made: dict[int, Tensor] = {}
    for tensor in model_tensors(dense).values():
        if tensor.is_meta:
            new = torch.rand(tensor.shape, generator=generator, device="cpu").to(tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
    return copy_with(dense, made) if made else dense


def _check_shapes(dense: nn.Module, expected: Mapping[str, tuple[int, ...]], run: SavedRun) -> None:
    found = {n: t for n, t in dense.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    name = type(dense).__name__
    other = "The checkpoint belongs to another network, or its code has changed: make the one it was pruned from."
    for tensor in [tensor for tensor in found if tensor in expected]:
        if is_lazy(found[tensor]):
            raise CheckpointError(
                f"{tensor!r} of {name} has no shape yet. Run it once before loading."
            )
        if (own := tuple(found[tensor].shape)) != expected[tensor]:
            cut_already = "This is the size after the cut: give the dense network."
            raise CheckpointError(
                f"The checkpoint was made from a network whose {tensor!r} has shape {expected[tensor]}; that of {name} "
                f"has {own}. {cut_already if own == run.shapes[tensor] else other}"
            )
    for tensor in [tensor for tensor in expected if tensor not in found]:
        raise CheckpointError(
            f"The checkpoint was made from a network with {tensor!r} of shape {expected[tensor]}; {name} has none. "
            f"{other}"
        )
    for tensor in [tensor for tensor in found if tensor not in expected]:
        raise CheckpointError(
            f"{name} has {tensor!r} of shape {tuple(found[tensor].shape)}; the network that the checkpoint was made "
            f"from has none. {other}"
        )
