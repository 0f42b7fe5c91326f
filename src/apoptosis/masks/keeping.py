"""Masks that stay with a model: removed weights are zero and remain zero while it is trained, copied and reloaded.

Nothing is added to the model's state and nothing to its forward pass. A weight that is gone is an entry that is zero
and gets no gradient: the gradient is masked as it arrives, before anybody clips it or an optimiser sees it. Every
optimiser that treats entries one by one then leaves the weight, its momentum and its moments at zero, weight decay or
not. One that mixes entries (Muon), or that remembers the weights from before, is told by `mask_optimizer_`.

The masks go with `copy.deepcopy` and pickles of the model and of its parts; loading a state dict zeroes again what it
brings; after a cut, what is zero in a masked tensor stays zero. What writes to weights past their gradients
(`reset_parameters`, `weight.data = …`) brings them back until `mask_(model, masks_of(model))` is called; saving such a
network is refused.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from apoptosis.errors import ConfigError
from apoptosis.masks.plan import Mask, MaskPlan, check_fits, fingerprint
from apoptosis.modes import outside_inference_mode
from apoptosis.structure import copy_with
from apoptosis.turns import one_at_a_time

__all__ = ["mask", "mask_", "mask_optimizer_", "masks_of", "release_"]

AnyModel = TypeVar("AnyModel", bound=nn.Module)

_PLACE = "_kept_masks"


@outside_inference_mode
@one_at_a_time
def mask(model: AnyModel, masks: MaskPlan) -> AnyModel:
    """A copy whose removed weights are zero, and stay so; the given model is untouched.

    Raises:
        PlanMismatchError: the masks are for another model.

    >>> from apoptosis.masks import Mask, MaskPlan, identity_masks
    >>> net = nn.Linear(2, 2)
    >>> half = Mask.of(["weight"], torch.eye(2) > 0)
    >>> small = mask(net, MaskPlan({"weight": half}, identity_masks(net).fingerprint))
    >>> int((small.weight != 0).sum())
    2
    """
    check_fits(model, masks)
    return mask_(copy_with(model, {}), masks)


@outside_inference_mode
@one_at_a_time
def mask_(model: AnyModel, masks: MaskPlan) -> AnyModel:
    """Zero the removed weights where they are and keep them so, in the place of any masks of before.

    An optimiser that has trained the model already remembers momentum of these weights: tell it by `mask_optimizer_`.

    Raises:
        PlanMismatchError: the masks are for another model; it is as it was.
    """
    held = check_fits(model, masks)
    release_(model)
    own: dict[int, Mask] = {}
    for name, one in masks.masks.items():  # a tied weight may have been masked under several names
        place = id(held[name])
        own[place] = own[place].joined(one) if place in own else one
    for module in model.modules():
        parameters = module.named_parameters(recurse=False)
        kept = {name: _Kept(own[id(p)], p) for name, p in parameters if id(p) in own}
        if kept:
            keeper = _Keeper(kept)
            setattr(module, _PLACE, keeper)
            module.register_load_state_dict_post_hook(keeper)
    return model


def masks_of(model: nn.Module) -> MaskPlan | None:
    """The masks that a model keeps, its parts' included; none of parameters that were replaced by others since."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[str, Mask] = {}
    for kept in _kept(model):
        if kept.holds and (own := names.get(id(kept.weight))):
            found[own[0]] = replace(kept.mask, names=tuple(own))
    return MaskPlan(found, fingerprint(model)) if found else None


def release_(model: AnyModel) -> AnyModel:
    """Keep no masks any longer, of any part. What is zero stays so until it is trained."""
    for module in model.modules():
        keeper = vars(module).get(_PLACE)
        if isinstance(keeper, _Keeper):
            keeper.let_go()
            delattr(module, _PLACE)
            hooks = module._load_state_dict_post_hooks
            for number in [number for number, hook in hooks.items() if hook is keeper]:
                del hooks[number]
    return model


def mask_optimizer_(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Clear what an optimiser remembers of weights that are gone, now and after each of its steps.

    Needed for an optimiser that has trained the weights before they went, and for one that mixes the entries of a
    gradient (Muon). Others keep the masks by themselves. A copy of the optimiser is to be told again.

    Raises:
        ConfigError: the model keeps no masks, or the optimiser trains none of its masked weights.
    """
    num = len(list(_kept(model)))
    if not num:
        raise ConfigError(
            f"An optimiser was to keep the masks of {type(model).__name__}, which keeps none. Mask the model first: "
            "`mask_(model, masks)`."
        )
    clear = _Clear(model)
    if not clear.cleared(optimizer):
        raise ConfigError(
            f"The optimiser trains none of the {num} masked weights of {type(model).__name__}. Pass the model it was "
            "made for."
        )
    if clear not in optimizer._optimizer_step_post_hooks.values():
        optimizer.register_step_post_hook(clear)


class _Gone:
    """The removed entries of one weight, on whatever device they are asked for; called as a hook on its gradient.

    It holds no weight: torch does not collect a weight whose own hook holds it. One byte per weight, once it is used.
    """

    def __init__(self, own: Mask) -> None:
        self._mask = own
        self._gone: Tensor | None = None

    def __call__(self, weight: Tensor) -> None:
        if weight.grad is None:
            return
        if weight.grad.is_sparse:
            weight.grad = self._sparse(weight.grad.coalesce())
        else:
            self.zero_(weight.grad)

    def zero_(self, tensor: Tensor) -> None:
        with torch.no_grad():
            tensor.masked_fill_(self._on(tensor.device), 0)

    def _sparse(self, gradient: Tensor) -> Tensor:
        """Of an embedding with sparse gradients: the rows that came up."""
        gone = self._on(gradient.device)[tuple(gradient.indices())]
        values = gradient.values().masked_fill(gone, 0)
        return torch.sparse_coo_tensor(
            gradient.indices(), values, gradient.shape, check_invariants=False, is_coalesced=True
        )

    def _on(self, device: torch.device) -> Tensor:
        if self._gone is None or self._gone.device != device:
            self._gone = ~self._mask.kept().to(device)
        return self._gone


class _Kept:
    """One masked weight: zeroed once, its gradient whenever it arrives."""

    def __init__(self, own: Mask, weight: Tensor) -> None:
        self.mask, self.weight = own, weight
        self.gone = _Gone(own)
        self._hook = _first_hook(weight, self.gone)
        self.zero_()

    @property
    def holds(self) -> bool:
        """Whether gradients still pass by it: torch has ways to exchange what is behind a parameter."""
        return self.gone in (self.weight._post_accumulate_grad_hooks or {}).values()  # pyright: ignore[reportAttributeAccessIssue]

    def zero_(self) -> None:
        """Zero what is gone, and the gradient that has arrived already."""
        if not self.weight.is_meta:
            self.gone.zero_(self.weight)
            self.gone(self.weight)

    def let_go(self) -> None:
        """No longer."""
        self._hook.remove()


class _Keeper:
    """The masked weights of one module, by their names there. Copied and pickled along with it; its hook on loading."""

    def __init__(self, kept: dict[str, _Kept]) -> None:
        self.kept = kept

    def let_go(self) -> None:
        """Of all."""
        for kept in self.kept.values():
            kept.let_go()
        self.kept = {}

    def __call__(self, module: nn.Module, _: Any) -> None:
        """A state dict may have brought other numbers, or other tensors."""
        held = dict(module.named_parameters(recurse=False))
        for name, kept in self.kept.items():
            if name in held and held[name] is not kept.weight:
                # Assigned: the tensor may still be somebody else's, who wants it whole.
                held[name].data = held[name].data.clone()
                self.kept[name] = _Kept(kept.mask, held[name])
            else:
                kept.zero_()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Keeper":
        copied = {name: copy.deepcopy(kept.weight, memo) for name, kept in self.kept.items()}
        made = {name: _after_copying(self.kept[name], weight) for name, weight in copied.items()}
        return _Keeper({name: kept for name, kept in made.items() if kept is not None})

    def __getstate__(self) -> dict[str, Any]:
        return {name: (kept.mask, kept.weight) for name, kept in self.kept.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.kept = {name: _Kept(*own) for name, own in state.items()}


def _after_copying(kept: _Kept, weight: Tensor) -> _Kept | None:
    """The same of a copy. Of one that was cut on the way (`copy_with`), what is zero stays zero."""
    if weight is kept.weight:
        return None  # shared, and kept where it is
    if weight.shape == kept.mask.shape:
        return _Kept(kept.mask, weight)
    if weight.is_meta:
        return None
    return _Kept(Mask.of(kept.mask.names, weight.detach() != 0), weight)


@dataclass(frozen=True)
class _Clear:
    """A hook on an optimiser."""

    model: nn.Module

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.cleared(optimizer)

    def cleared(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimiser trains any weight that the model keeps masked by now."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        own = [kept for kept in _kept(self.model) if id(kept.weight) in trained]
        for kept in own:
            kept.gone.zero_(kept.weight)
            for item in optimizer.state.get(kept.weight, {}).values():
                if isinstance(item, Tensor) and item.shape == kept.weight.shape:
                    kept.gone.zero_(item)
        return bool(own)


def _kept(model: nn.Module) -> Iterator[_Kept]:
    for module in model.modules():
        if isinstance(keeper := vars(module).get(_PLACE), _Keeper):
            yield from keeper.kept.values()


def _first_hook(weight: Tensor, gone: _Gone) -> RemovableHandle:
    """A hook before those that are there: some step in theirs. A frozen weight gets one too: it may yet be trained."""
    trained = weight.requires_grad
    handle = weight.requires_grad_().register_post_accumulate_grad_hook(gone)
    weight.requires_grad_(trained)
    hooks: dict[int, Any] = weight._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    others = {number: hook for number, hook in hooks.items() if hook is not gone}
    hooks.clear()  # torch calls them in the order of insertion, whatever an OrderedDict says
    hooks.update({handle.id: gone} | others)
    return handle
