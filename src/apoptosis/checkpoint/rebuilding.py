"""The small network again: the plan carried out on the dense one, and the saved numbers put in.

The dense network is brought to the number types of the checkpoint first, on a copy, so that a program is written for
them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.checkpoint.dense import check_dense, without_masks
from apoptosis.checkpoint.inputs import zeros_like_description
from apoptosis.checkpoint.kinds import Part
from apoptosis.checkpoint.record import SavedRun
from apoptosis.errors import ApoptosisError, CheckpointError, ModelError, NonFiniteError
from apoptosis.soundness import check_numbers
from apoptosis.structure import Example, Plan, copy_with, deliver_, model_tensors

__all__ = ["rebuild"]


def rebuild(
    dense: nn.Module,
    part: Part,
    run: SavedRun,
    weights: Mapping[str, Tensor],
    example_inputs: Any = None,
) -> nn.Module:
    """The network that was saved, in eval mode.

    Raises:
        CheckpointError: the dense network is another one than the checkpoint's.
    """
    check_dense(dense, part.dense_shapes(run), run)
    try:
        small = part.carry_out(without_masks(dense), run, example_inputs)
        made = copy_with(small, _replacements(small, run, weights)).eval()
        part.finish_(made)
        if isinstance(part.plan, Plan):
            deliver_(made, dense, _example(made, run, example_inputs))
    except CheckpointError:
        raise
    except ApoptosisError as error:
        raise CheckpointError(
            f"The plan of this checkpoint cannot be carried out on {type(dense).__name__}. {error}"
        ) from error
    try:
        check_numbers(made, "The saved network", real=False)
    except (ModelError, NonFiniteError) as error:
        raise CheckpointError(str(error)) from error
    _set_extra_state(made, run)
    return made


def _example(made: nn.Module, run: SavedRun, example_inputs: Any) -> Example | None:
    """What to call the network with, as far as that is known."""
    if example_inputs is not None:
        return Example.of(example_inputs)
    if run.example == {"value": None}:
        return None
    device = next((p.device for p in made.parameters()), torch.device("cpu"))
    try:
        return Example.of(zeros_like_description(run.example, device))
    except CheckpointError:  # something that only its user can make
        return None


def _replacements(
    small: nn.Module, run: SavedRun, weights: Mapping[str, Tensor]
) -> dict[int, Tensor]:
    """The saved tensors by the identity of those whose places they take."""
    held, made = model_tensors(small), dict[int, Tensor]()
    for own in run.tensors:
        places = [held[name] for name in own.names if name in held]
        _check_places(own.names, own.shape, places)
        value = weights[own.names[0]]
        if not places[0].is_meta:
            value = value.to(places[0].device)
        if isinstance(places[0], nn.Parameter):
            value = nn.Parameter(value, own.requires_grad)
        elif own.requires_grad:
            value.requires_grad_()
        for place in places:
            if id(place) in made:
                raise CheckpointError(
                    f"{own.names[0]!r} is one tensor with another in this network, and was one of its own when it was "
                    "saved. Give a dense network with the ties of the one that was pruned."
                )
        made |= {id(place): value for place in places}
    return made


def _check_places(names: tuple[str, ...], shape: tuple[int, ...], places: list[Tensor]) -> None:
    if len(places) < len(names):
        raise CheckpointError(
            f"The checkpoint has numbers for {names[0]!r}, for which the cut network has no place. Give the dense "
            "network that was pruned."
        )
    for name, place in zip(names, places, strict=True):
        if tuple(place.shape) != shape:
            raise CheckpointError(
                f"{name!r} has shape {shape} in the checkpoint; the plan makes it {tuple(place.shape)}. The network "
                "was saved with another plan than its own."
            )


def _set_extra_state(model: nn.Module, run: SavedRun) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    for key, value in run.extra_state.items():
        path = key.rpartition(".")[0]
        module = modules.get(path)
        if module is None or type(module).set_extra_state is nn.Module.set_extra_state:
            raise CheckpointError(
                f"The checkpoint has extra state for module {path!r}, and {type(module).__name__} takes none. Give the "
                "dense network that was pruned, with its `set_extra_state`."
            )
        module.set_extra_state(value)
