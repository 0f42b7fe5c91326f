"""Carry out a plan: `cut` makes a new, smaller model, `zero` its twin of full size, `cut_optimizer` takes state along.

The given model is never touched. A copy is made by `copy.deepcopy` with the cut tensors put in the places of the old
ones beforehand, so ties stay ties, and what does not change is copied once.
"""

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from apoptosis.errors import ModelError, PlanMismatchError
from apoptosis.modes import in_eval_mode, outside_inference_mode
from apoptosis.structure.attributes import read_attribute, write_attribute_
from apoptosis.structure.basis import turned_digest
from apoptosis.structure.mirrors import refresh_sizes
from apoptosis.structure.multihead import CutAttention
from apoptosis.structure.plan import Plan, TensorCut, fingerprint_of
from apoptosis.structure.recording import model_tensors
from apoptosis.turns import one_at_a_time

__all__ = [
    "check_basis",
    "check_fits",
    "copy_with",
    "cut_module",
    "cut_optimizer",
    "cut_tensors",
    "like",
    "zero",
]

AnyModel = TypeVar("AnyModel", bound=nn.Module)


@outside_inference_mode
@one_at_a_time
def zero(model: AnyModel, plan: Plan) -> AnyModel:
    """A copy of full size in which every entry that the plan removes is zero.

    In eval mode it gives what the cut model gives, for every group that is exact.
    """
    held = check_fits(model, plan)
    made: dict[int, Tensor] = {}
    for cut in plan.tensors:
        tensor = held[cut.names[0]]
        new = tensor.detach().clone()
        if tensor.is_floating_point() or tensor.is_complex():
            for dim in cut.kept.keys() - set(cut.spared):
                gone = torch.ones(tensor.shape[dim], dtype=torch.bool, device=tensor.device)
                gone[torch.as_tensor(cut.kept[dim], device=tensor.device)] = False
                shape = [-1 if d == dim else 1 for d in range(tensor.ndim)]
                new.masked_fill_(gone.view(shape), 0)
        made[id(tensor)] = like(new, tensor)
    return copy_with(model, made)


def cut_module(model: AnyModel, plan: Plan) -> AnyModel:
    """A smaller copy of the same class: tensors sliced, attributes set."""
    small = copy_with(model, cut_tensors(check_fits(model, plan), plan))
    modules = dict(small.named_modules(remove_duplicate=False))
    for change in plan.attributes:
        write_attribute_(modules[change.attribute.module], change.attribute, change.new)
    # To read a parametrised weight is to compute it, and spectral_norm learns when it does so in train mode.
    with in_eval_mode(small):
        for module in small.modules():
            refresh_sizes(module)
    for shape in plan.attentions:
        CutAttention.become_(modules[shape.module], shape)  # type: ignore[arg-type]
    return small


def cut_tensors(held: dict[str, Tensor], plan: Plan) -> dict[int, Tensor]:
    """The sliced tensors, by the identity of those they replace."""
    made: dict[int, Tensor] = {}
    for cut in plan.tensors:
        tensor = held[cut.names[0]]
        new = tensor.detach()
        for dim, kept in cut.kept.items():
            new = new.index_select(dim, torch.as_tensor(kept, device=tensor.device))
        made[id(tensor)] = like(_laid_out(new, tensor), tensor)
    for scaling in plan.scalings:
        tensor = held[scaling.names[0]]
        new = made.setdefault(id(tensor), like(tensor.detach().clone(), tensor))
        with torch.no_grad():
            new[torch.as_tensor(scaling.rows, device=new.device)] *= scaling.factor
    return made


def _laid_out(new: Tensor, old: Tensor) -> Tensor:
    """In the memory format of another one: indexing gives the plain one, which convolutions would turn at each call."""
    for layout in (torch.channels_last, torch.channels_last_3d):
        fits = old.ndim == (4 if layout is torch.channels_last else 5)
        if fits and old.is_contiguous(memory_format=layout) and not old.is_contiguous():
            return new.contiguous(memory_format=layout)
    return new


def cut_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, small: nn.Module, plan: Plan
) -> torch.optim.Optimizer:
    """The optimiser of `model` for `small`: same class and options, state sliced along.

    State of a parameter's own shape (momentum, Adam's moments) is sliced as the parameter; factored state (rows or
    columns, with 1 for the rest) in the dimensions it has; counters are copied.

    Raises:
        PlanMismatchError: the optimiser is for another model, `small` is not what the plan makes of the model, or
            state cannot be cut along.
    """
    held, new = check_fits(model, plan), model_tensors(small)
    for cut in plan.tensors:
        _check_is_cut(new, cut)
    cuts = {id(held[cut.names[0]]): cut for cut in plan.tensors}
    known = {id(p): name for name, p in held.items()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = [tuple(p.shape) for p in given if id(p) not in known]
    if strangers:
        raise PlanMismatchError(
            f"The optimiser trains {len(strangers)} tensors that are not the model's, the first of shape "
            f"{strangers[0]}. Pass the model it was made for, before the cut."
        )
    memo: dict[int, Any] = {id(p): new[known[id(p)]] for p in given}
    made = copy.deepcopy(optimizer, memo)
    for parameter in given:
        state = optimizer.state.get(parameter)
        if state is None:
            continue
        target = new[known[id(parameter)]]
        cut = cuts.get(id(parameter))
        made.state[target] = {
            key: _cut_state(item, parameter, cut)
            if isinstance(item, Tensor)
            else copy.deepcopy(item)
            for key, item in state.items()
        }
    return made


def _check_is_cut(small: dict[str, Tensor], cut: TensorCut) -> None:
    for name in cut.names:
        if name not in small:
            raise PlanMismatchError(
                f"The plan cuts {name!r}, but the cut model has no {name!r}. Pass what `cut(model, plan)` gave."
            )
        if (found := tuple(small[name].shape)) != cut.new_shape:
            raise PlanMismatchError(
                f"{name!r} of the cut model has shape {found}; the plan makes it {cut.new_shape}. Pass what "
                "`cut(model, plan)` gave."
            )


def _cut_state(state: Tensor, parameter: Tensor, cut: TensorCut | None) -> Tensor:
    if cut is None or (state.ndim != parameter.ndim and state.numel() == 1):
        return state.detach().clone()
    for dim, kept in cut.kept.items():
        fits = state.ndim == parameter.ndim
        if fits and state.shape[dim] == parameter.shape[dim]:
            state = state.index_select(dim, torch.as_tensor(kept, device=state.device))
        elif not fits or state.shape[dim] != 1:
            raise PlanMismatchError(
                f"Optimiser state of shape {tuple(state.shape)} belongs to a parameter of shape "
                f"{tuple(parameter.shape)} and cannot be cut along. Make a new optimiser for the cut model."
            )
    return state.detach().clone()


@one_at_a_time
def copy_with(model: AnyModel, replacements: dict[int, Tensor]) -> AnyModel:
    """A deep copy in which some tensors, by identity, are others."""
    memo: dict[int, Any] = dict(replacements)
    held = model_tensors(model)
    for tensor in held.values():
        if not tensor.is_leaf:  # torch does not copy those; the next forward makes them anew
            memo.setdefault(id(tensor), tensor.detach().clone())
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise ModelError(
            f"The model cannot be copied ({type(error).__name__}: {error}), and the given one is never changed. Keep "
            "file handles, locks and other objects that `copy.deepcopy` refuses out of the model, or give the class a "
            "`__deepcopy__`."
        ) from error
    found = model_tensors(copied)
    for name, tensor in held.items():
        if id(tensor) in replacements and found.get(name) is not replacements[id(tensor)]:
            raise ModelError(
                f"A copy of {type(model).__name__} does not hold the tensor given for {name!r}. Scripted modules copy "
                "themselves in C++: take the module they were made from. A `__deepcopy__` must pass its memo on."
            )
    for module in copied.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants them in one piece
    return copied


def check_fits(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """The model's tensors by name, if they are those the plan was made for."""
    held = model_tensors(model)
    for cut in plan.tensors:
        missing = [name for name in cut.names if name not in held]
        if missing:
            raise PlanMismatchError(
                f"The plan cuts {missing[0]!r}, which {type(model).__name__} does not have. The plan was made for "
                "another model; make one with `trace(model, …).plan(…)`."
            )
        for name in cut.names:
            _check_shape(tuple(held[name].shape), name, cut)
        if len({id(held[name]) for name in cut.names}) > 1:
            raise PlanMismatchError(
                f"{' and '.join(cut.names)} were one tensor when the plan was made and are several now. Tie them "
                "again, or trace the model as it is."
            )
    _check_settings(model, held, plan)
    check_basis(held, plan)
    if not plan.tensors:
        _check_same(model, plan)
    return held


def check_basis(held: Mapping[str, Tensor], plan: Plan) -> None:
    """Refuse a network whose heads are not in the coordinates that the plan was made in.

    Raises:
        PlanMismatchError: its numbers are others there.
    """
    basis = plan.basis
    if basis is None:
        return
    own = {name: held[name] for name in basis.names if name in held}
    if any(tensor.is_meta for tensor in own.values()):
        return  # no numbers are cut
    if len(own) < len(basis.names) or turned_digest(own) != basis.digest:
        raise PlanMismatchError(
            "The plan was made after attention heads were turned (`align`), and counts on the numbers of "
            f"{basis.names[0]!r} and {len(basis.names) - 1} other tensors, which are others here. Use the network "
            "that it was made for: `outcome.dense`, or the model that `align_heads` gave. If that was only trained on "
            "since, `dataclasses.replace(plan, basis=None)` takes the plan for it all the same."
        )


def _check_same(model: nn.Module, plan: Plan) -> None:
    """A plan that cuts nothing names no tensor to tell another model by."""
    shapes = {
        name: tuple(item.shape)
        for name, item in model.state_dict(keep_vars=True).items()
        if isinstance(item, Tensor)
    }
    if fingerprint_of(shapes) != plan.fingerprint:
        raise PlanMismatchError(
            f"The plan keeps everything of another model than this {type(model).__name__}: names or shapes of its "
            "tensors differ. Make one with `trace(model, …)`."
        )


def _check_settings(model: nn.Module, held: dict[str, Tensor], plan: Plan) -> None:
    """What the plan sets beside tensors must be there: a plan read from a file may name anything."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for change in plan.attributes:
        where = change.attribute
        module = modules.get(where.module)
        if module is None or read_attribute(module, where) is None:
            raise PlanMismatchError(
                f"The plan sets the size {where.name!r} of module {where.module!r}, which {type(model).__name__} does "
                "not have. The plan was made for another model; make one with `trace(model, …).plan(…)`."
            )
    for shape in plan.attentions:
        if not isinstance(modules.get(shape.module), nn.MultiheadAttention):
            raise PlanMismatchError(
                f"The plan cuts attention in {shape.module!r}, where {type(model).__name__} has none. Trace this model "
                "and plan anew."
            )
    for scaling in plan.scalings:
        missing = [name for name in scaling.names if name not in held]
        if missing or scaling.rows.max(initial=0) >= held[scaling.names[0]].shape[0]:
            raise PlanMismatchError(
                f"The plan scales rows of {scaling.names[0]!r} that {type(model).__name__} does not have. Trace this "
                "model and plan anew."
            )


def _check_shape(found: tuple[int, ...], name: str, cut: TensorCut) -> None:
    if found == cut.shape:
        return
    if found == cut.new_shape:
        raise PlanMismatchError(
            f"{name!r} has shape {found} already, which is what the plan makes of {cut.shape}: it has been applied "
            "to this model. Cut the dense model, or plan anew with `structure.after(plan)`."
        )
    raise PlanMismatchError(
        f"The plan was made for {name!r} of shape {cut.shape}; this model's has {found}. Trace this model and plan "
        "anew."
    )


def like(new: Tensor, old: Tensor) -> Tensor:
    """A tensor in the role of another: parameter or not, trained or not."""
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new.requires_grad_(old.requires_grad and old.is_leaf)
