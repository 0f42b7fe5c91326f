"""The small network again: the plan carried out on the dense one, and the saved numbers put in.

The dense network gives code and whatever a state dict leaves out (buffers that are not persistent); its numbers do not
matter. It is brought to the number types of the checkpoint first, on a copy, so that a program is written for them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from apoptosis.checkpoint.inputs import zeros_like_description
from apoptosis.checkpoint.record import SavedRun, present_versions
from apoptosis.checkpoint.saving import program_digest
from apoptosis.errors import ApoptosisError, CheckpointError
from apoptosis.structure import Plan, copy_with, cut, model_tensors

__all__ = ["rebuild"]


def rebuild(
    dense: nn.Module,
    plan: Plan,
    run: SavedRun,
    weights: Mapping[str, Tensor],
    example_inputs: Any = None,
) -> nn.Module:
    """The network that was saved, in eval mode.

    Raises:
        CheckpointError: the dense network is another one than the checkpoint's.
    """
    _check_dense(dense, plan, run)
    _check_no_number_is_missing(dense, run)
    try:
        if plan.delivery == "module":
            small = cut(_in_saved_types(dense, run), plan)
        else:
            small = _program(dense, plan, run, example_inputs)
        made = copy_with(small, _replacements(small, run, weights)).eval()
    except CheckpointError:
        raise
    except ApoptosisError as error:
        raise CheckpointError(
            f"The plan of this checkpoint cannot be carried out on {type(dense).__name__}. {error}"
        ) from error
    _set_extra_state(made, run)
    return made


def _check_dense(dense: nn.Module, plan: Plan, run: SavedRun) -> None:
    """Names and shapes of the dense network are those the checkpoint was made from."""
    cuts = {name: cut for cut in plan.tensors for name in cut.names}
    expected = {n: cuts[n].shape if n in cuts else shape for n, shape in run.shapes.items()}
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


def _check_no_number_is_missing(dense: nn.Module, run: SavedRun) -> None:
    for name, tensor in model_tensors(dense).items():
        if tensor.is_meta and name not in run.shapes:
            raise CheckpointError(
                f"{name!r} is not saved with the network (a buffer that is not persistent, or a plain attribute), and "
                "on the meta device it has no numbers. Make the dense network on the CPU: "
                "`load(path, dense=make_network)`."
            )


def _in_saved_types(dense: nn.Module, run: SavedRun) -> nn.Module:
    """The dense network, or a copy of it where numbers of another type were saved."""
    saved = dict(run.other_dtypes) | run.dtypes
    changed: dict[int, Tensor] = {}
    for name, tensor in model_tensors(dense).items():
        dtype = getattr(torch, saved.get(name, ""), tensor.dtype)
        if tensor.dtype != dtype and tensor.is_floating_point() and dtype.is_floating_point:
            new = tensor.detach().to(dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            changed[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
    return copy_with(dense, changed) if changed else dense


def _program(dense: nn.Module, plan: Plan, run: SavedRun, example_inputs: Any) -> nn.Module:
    """The program whose operations are those that were saved, if one of the ways to trace it leads there."""
    example = _example(dense, run) if example_inputs is None else example_inputs
    first: nn.Module | None = None
    failure: ApoptosisError | None = None
    for candidate in _candidates(dense, run):
        try:
            made = cut(candidate, plan, example_inputs=example)
        except ApoptosisError as error:
            failure = failure or error
            continue
        if program_digest(made) == run.program:
            return made
        first = first or made
    if first is None:
        assert failure is not None, "a candidate that gives no program has failed"
        raise failure
    # Other versions may write the same network with other operations.
    here = present_versions()
    if all(run.versions.get(name) == here[name] for name in ("torch", "apoptosis")):
        traced_on = "zeros" if example_inputs is None else "these `example_inputs`"
        raise CheckpointError(
            f"The network was delivered as a program, and traced again on {traced_on} it does other operations than it "
            f"did. Its code has changed, or {type(dense).__name__} chooses its way by values: give the dense network "
            "with the weights it was pruned with, and `example_inputs` as they were passed to `trace`."
        )
    return first


def _candidates(dense: nn.Module, run: SavedRun) -> Iterator[nn.Module]:
    """Numbers may have changed their type before the trace or after it."""
    dense = _with_numbers(dense)
    yield (cast := _in_saved_types(dense, run))
    if cast is not dense:
        yield dense


def _with_numbers(dense: nn.Module) -> nn.Module:
    """A network on the meta device with numbers of no meaning: a program is tried before it is delivered."""
    generator = torch.Generator().manual_seed(0)
    made: dict[int, Tensor] = {}
    for tensor in model_tensors(dense).values():
        if tensor.is_meta:
            new = torch.rand(tensor.shape, generator=generator, device="cpu").to(tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
    return copy_with(dense, made) if made else dense


def _example(dense: nn.Module, run: SavedRun) -> Any:
    if run.example == {"value": None}:
        raise CheckpointError(
            "The network was delivered as a program and saved without example inputs. Pass `example_inputs` to `load`, "
            "as they were passed to `trace`."
        )
    device = next((p.device for p in dense.parameters() if not p.is_meta), torch.device("cpu"))
    return zeros_like_description(run.example, device)


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
