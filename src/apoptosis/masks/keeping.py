"""Masks that stay with a model: removed weights are zero and remain zero while it is trained, copied and reloaded.

Nothing is added to the model's state and nothing to its forward pass. A weight that is gone is an entry that is zero
and gets no gradient: the gradient is masked as it arrives, before anybody clips it or an optimiser sees it. Every
optimiser that treats entries one by one then leaves the weight, its momentum and its moments at zero, weight decay or
not. One that mixes entries (Muon) is told by `mask_optimizer_`.

The masks go with `copy.deepcopy` and pickles of the model. Loading a state dict zeroes again what it brings. A
parameter that is replaced by another one has no masks until `mask_` is called again.
"""

import copy
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from apoptosis.errors import ConfigError
from apoptosis.masks.plan import Mask, MaskPlan, check_fits
from apoptosis.structure import copy_with

__all__ = ["mask", "mask_", "mask_optimizer_", "masks_of", "release_"]

AnyModel = TypeVar("AnyModel", bound=nn.Module)

_PLACE = "_kept_masks"


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


def mask_(model: AnyModel, masks: MaskPlan) -> AnyModel:
    """Zero the removed weights where they are and keep them so, in the place of any masks of before.

    Raises:
        PlanMismatchError: the masks are for another model; it is as it was.
    """
    held = check_fits(model, masks)
    release_(model)
    keeper = _Keeper(masks, {name: held[name] for name in masks.masks})
    setattr(model, _PLACE, keeper)
    for path, module in model.named_modules():
        own = {
            name.rpartition(".")[2]: name for name in masks.masks if name.rpartition(".")[0] == path
        }
        if own:
            module.register_load_state_dict_post_hook(_Reload(keeper, own))
    return model


def masks_of(model: nn.Module) -> MaskPlan | None:
    """The masks that a model keeps; none if a masked parameter was replaced by another since."""
    keeper = getattr(model, _PLACE, None)
    if not isinstance(keeper, _Keeper):
        return None
    held = dict(model.named_parameters(remove_duplicate=False))
    same = all(held.get(name) is weight for name, weight in keeper.weights.items())
    return keeper.masks if same else None


def release_(model: AnyModel) -> AnyModel:
    """Keep no masks any longer. What is zero stays so until it is trained."""
    keeper = getattr(model, _PLACE, None)
    if isinstance(keeper, _Keeper):
        keeper.let_go()
        delattr(model, _PLACE)
        for module in model.modules():
            hooks = module._load_state_dict_post_hooks
            for number, hook in list(hooks.items()):
                if isinstance(hook, _Reload) and hook.keeper is keeper:
                    del hooks[number]
    return model


def mask_optimizer_(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Clear what an optimiser remembers of weights that are gone, now and after each of its steps.

    Needed for an optimiser that has trained the weights before they went, and for one that mixes the entries of a
    gradient (Muon). Others keep the masks by themselves.

    Raises:
        ConfigError: the model keeps no masks, or the optimiser trains none of its masked weights.
    """
    keeper = getattr(model, _PLACE, None)
    if not isinstance(keeper, _Keeper):
        raise ConfigError(
            f"An optimiser was to keep the masks of {type(model).__name__}, which keeps none. Mask the model first: "
            "`mask_(model, masks)`."
        )
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(weight) in trained for weight in keeper.weights.values()):
        raise ConfigError(
            f"The optimiser trains none of the {len(keeper.weights)} masked weights of {type(model).__name__}. Pass "
            "the model it was made for."
        )

    def clear(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        now = getattr(model, _PLACE, None)  # masks may have been replaced since, or released
        if isinstance(now, _Keeper):
            now.clear_(optimizer, trained)

    clear(optimizer)
    optimizer.register_step_post_hook(clear)


class _Gone:
    """The removed entries of one weight, on whatever device they are asked for; called as a hook on its gradient.

    It holds no weight: torch does not collect a weight whose own hook holds it.
    """

    def __init__(self, own: Mask) -> None:
        self._mask = own
        self._gone: Tensor | None = None

    def __call__(self, weight: Tensor) -> None:
        if weight.grad is not None:
            if weight.grad.is_sparse:
                weight.grad = weight.grad.to_dense()
            self.zero_(weight.grad)

    def zero_(self, tensor: Tensor) -> None:
        if self._gone is None or self._gone.device != tensor.device:
            self._gone = ~self._mask.kept().to(tensor.device)
        with torch.no_grad():
            tensor.masked_fill_(self._gone, 0)


class _Keeper:
    """Zeroes weights once, and their gradients whenever they arrive. Copied and pickled along with its model."""

    def __init__(self, masks: MaskPlan | None, weights: dict[str, Tensor]) -> None:
        self.masks = masks
        self._take(weights)

    def let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.weights, self.gone, self._hooks = {}, {}, []

    def clear_(self, optimizer: torch.optim.Optimizer, trained: Set[int]) -> None:
        """Zero removed weights and what the optimiser remembers of them."""
        for name, weight in self.weights.items():
            if id(weight) in trained:
                own = optimizer.state.get(weight, {}).values()
                for item in (weight, *own):
                    if isinstance(item, Tensor) and item.shape == weight.shape:
                        self.gone[name].zero_(item)

    def take_again(self, weights: dict[str, Tensor]) -> None:
        """Of some weights, which may be other tensors by now."""
        weights = self.weights | {
            name: own for name, own in weights.items() if name in self.weights
        }
        self.let_go()
        self._take(weights)

    def _take(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.gone = {name: _Gone(self._masks[name]) for name in weights}
        self._hooks = [_hooked(weight, self.gone[name]) for name, weight in weights.items()]
        for name, weight in weights.items():
            if not weight.is_meta:
                self.gone[name].zero_(weight)

    @property
    def _masks(self) -> Mapping[str, Mask]:
        return {} if self.masks is None else self.masks.masks

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Keeper":
        weights = {name: copy.deepcopy(weight, memo) for name, weight in self.weights.items()}
        # A cut on the way (`copy_with`) makes another network, which these masks are not for.
        fits = all(weight.shape == self._masks[name].shape for name, weight in weights.items())
        own = {n: weight for n, weight in weights.items() if weight is not self.weights[n]}
        return _Keeper(self.masks, own) if fits else _Keeper(None, {})

    def __getstate__(self) -> dict[str, Any]:
        return {"masks": self.masks, "weights": self.weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


@dataclass(frozen=True)
class _Reload:
    """A hook on a module that holds masked weights: a state dict may bring other numbers, or other tensors."""

    keeper: _Keeper
    own: dict[str, str]
    """Names of its parameters in the model, by their names here."""

    def __call__(self, module: nn.Module, _: Any) -> None:
        held = dict(module.named_parameters(recurse=False))
        self.keeper.take_again(
            {whole: held[name] for name, whole in self.own.items() if name in held}
        )


def _hooked(weight: Tensor, gone: _Gone) -> RemovableHandle:
    """A frozen weight gets its hook too: it may be trained later."""
    trained = weight.requires_grad
    handle = weight.requires_grad_().register_post_accumulate_grad_hook(gone)
    weight.requires_grad_(trained)
    return handle
