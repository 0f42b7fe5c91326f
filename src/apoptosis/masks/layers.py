"""Which weights may go one by one, and along which of their dimensions a layer reads its inputs.

Unless names say otherwise these are the weights of layers: trained floating-point parameters of two and more dimensions
that are called `…weight…`. Biases, norms, embeddings and positions stay: they are few, and each does much. Whoever
wants one of them gone names it in full.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.nn.utils import prune as torch_prune

from apoptosis.errors import ConfigError, ModelError

__all__ = ["Layer", "as_patterns", "check_not_scripted", "maskable"]

_LEFT_ALONE = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
_INPUTS_FIRST = (_ConvTransposeNd,)
_INPUTS_FIRST_NAMES = ("Conv1D",)
"""Of transformers' GPT-2, a linear layer with its weight turned; known by name, for the package may not be there."""


@dataclass(frozen=True)
class Layer:
    """A weight that may be masked: all its names, its shape, and the dimension its inputs run along."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dim: int


def maskable(model: nn.Module, names: Iterable[str] = ("*",)) -> dict[str, Layer]:
    """The weights that may go, by their first name.

    Args:
        model: any module.
        names: patterns of names; `!pattern` leaves out. Patterns choose among the weights of layers; a full name may be
            any trained floating-point parameter's, a bias too.

    Raises:
        ConfigError: a pattern fits nothing, or nothing is chosen.
        ModelError: weights have no shape yet, or are made anew at each call by `torch.nn.utils.prune`; or the model is
            scripted.

    >>> list(maskable(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))))
    ['0.weight']
    """
    patterns = as_patterns(names)
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")] or ["*"]
    unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    held = _trained(model)
    for given, pattern in [(p, p) for p in wanted] + [(f"!{p}", p) for p in unwanted]:
        if pattern != "*" and not any(_fits(own, pattern) for own in held):
            raise ConfigError(
                f"The pattern {given!r} fits no trained weight of a layer of {type(model).__name__}. There are "
                f"{_some([own[0][0] for own in held if _is_layer_weight(own)]) or 'none'}; biases, norms and "
                f"embeddings are named in full.{_frozen(model)}"
            )
    found: dict[str, Layer] = {}
    for own in held:
        chosen = any(_fits(own, pattern) for pattern in wanted)
        if chosen and not any(_fits(own, pattern) for pattern in unwanted):
            (first, holder), shape = (
                own[0],
                tuple(getattr(own[0][1], own[0][0].rpartition(".")[2]).shape),
            )
            found[first] = Layer(tuple(name for name, _ in own), shape, _input_dim(holder, shape))
    if not found:
        raise ConfigError(
            f"No weight of {type(model).__name__} is left to prune: names={list(patterns)!r}. Weights of layers that "
            f"are trained: {_some([own[0][0] for own in held if _is_layer_weight(own)]) or 'none'}.{_frozen(model)}"
        )
    return found


Places = list[tuple[str, nn.Module]]
"""Every name of one parameter, and the module that holds it there."""


def _trained(model: nn.Module) -> list[Places]:
    check_not_scripted(model)
    places: dict[int, Places] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        _check_not_pruned_by_torch(path, module)
        for name, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter):
                raise ModelError(
                    f"{f'{path}.{name}' if path else name!r} has no shape yet. Run the model once, so that it gets one."
                )
            if parameter.requires_grad and parameter.is_floating_point() and parameter.dim() > 0:
                whole = f"{path}.{name}" if path else name
                places.setdefault(id(parameter), []).append((whole, module))
    return list(places.values())


def _frozen(model: nn.Module) -> str:
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if not frozen:
        return ""
    return (
        f" Parameters with requires_grad=False are left alone, here {_some(frozen)}; turn it on where they may go: "
        "parameter.requires_grad_()."
    )


def _is_layer_weight(places: Places) -> bool:
    (name, holder), *_ = places
    shape = getattr(holder, name.rpartition(".")[2]).shape
    alone = any(isinstance(module, _LEFT_ALONE) for _, module in places)
    return len(shape) >= 2 and "weight" in name.rpartition(".")[2] and not alone


def _fits(places: Places, pattern: str) -> bool:
    if any(name == pattern for name, _ in places):
        return True
    return _is_layer_weight(places) and any(fnmatchcase(name, pattern) for name, _ in places)


def _input_dim(holder: nn.Module, shape: tuple[int, ...]) -> int:
    turned = isinstance(holder, _INPUTS_FIRST) or type(holder).__name__ in _INPUTS_FIRST_NAMES
    return 0 if turned or len(shape) < 2 else 1


def check_not_scripted(model: nn.Module) -> None:
    """Refuse a scripted model: its parameters are made anew whenever somebody looks.

    Raises:
        ModelError: it is one.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"{type(model).__name__} is scripted, and its weights cannot be masked. Take the module it was made from."
        )


def as_patterns(names: Any) -> tuple[str, ...]:
    """Patterns of names as they are meant.

    Raises:
        ConfigError: they are none.
    """
    if isinstance(names, str):
        raise ConfigError(f"names={names!r} is one text; a list is meant: names=[{names!r}].")
    if not isinstance(names, Iterable) or isinstance(names, Mapping):
        raise ConfigError(
            f"names={names!r} was asked for; it is a list of patterns: names=['!fc.*']."
        )
    found = tuple(names)
    if not all(isinstance(name, str) for name in found):
        raise ConfigError(f"names={found!r} was asked for; patterns of names are texts.")
    return found


def _check_not_pruned_by_torch(path: str, module: nn.Module) -> None:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, torch_prune.BasePruningMethod):
            raise ModelError(
                f"{path or type(module).__name__!r} was pruned by torch.nn.utils.prune, which makes its weight anew at "
                "each call. Take the masks over first: `model = import_masks(model)`."
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
