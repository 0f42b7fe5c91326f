"""Trained weights from a file into a model: every name and every shape must fit, and nothing in the file is run."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from apoptosis.cli.names import sentence
from apoptosis.errors import CheckpointError

__all__ = ["load_weights_"]

WRAPPERS = ("state_dict", "model")
"""Keys under which training scripts keep the weights beside other things."""


def load_weights_(model: nn.Module, path: Path) -> None:
    """Put the weights of a `.safetensors` file, or of one that torch wrote, into the model.

    Raises:
        CheckpointError: there is no such file, it holds other things than tensors, or they are of another model.
    """
    if (checkpoint := path if path.is_dir() else path.parent) and (
        checkpoint / "run.json"
    ).is_file():
        raise CheckpointError(
            f"{path} is a checkpoint of apoptosis, or part of one: a smaller network than the one it was made from. "
            "Let a function load it and name that function as the model, my_nets.py:small with "
            f"`def small(): return ap.load({str(checkpoint)!r}, dense=…)`."
        )
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise CheckpointError(
            f"The weights {path}: it {what}. Give a file .safetensors, or one that torch.save has written."
        )
    found = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    _check_fits(model, found, path)
    model.load_state_dict(found, strict=False)  # tied tensors may stand in a file under one name


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is no safetensors file, or a damaged one: {str(error)[:200]}. Take another copy of it."
        ) from error


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError, BadZipFile, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a file of weights alone. Other pickles can run any code when they are read, so it is "
            "refused. Where you trust it, write the weights anew: torch.save(model.state_dict(), "
            f"'weights.pt'). torch says: {_cause(error)}"
        ) from error
    for key in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not any(isinstance(v, Tensor) for v in found.values()):
        keys = list(found)[:4] if isinstance(found, Mapping) else []
        raise CheckpointError(
            f"{path} holds a {type(found).__name__}{f' with {keys}' if keys else ''} and no tensors by name. Give the "
            "file of model.state_dict()."
        )
    return dict(found)


def _check_fits(model: nn.Module, found: Mapping[str, Any], path: Path) -> None:
    own = model.state_dict(keep_vars=True)
    present = {id(own[name]) for name in found if name in own}
    missing = [name for name, item in own.items() if name not in found and id(item) not in present]
    unexpected = [name for name in found if name not in own]
    misfitting = [
        f"{name} {_shape(found[name])} for {_shape(item)}"
        for name, item in own.items()
        if name in found and _shape(found[name]) != _shape(item)
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", misfitting),
        )
        if names
    ]
    if problems:
        remedy = "Give the weights of this very model, or name the model they are of."
        prefix = _common_prefix(unexpected, missing)
        if prefix:
            remedy = f"Names in it begin with {prefix!r}, as a wrapper leaves them: save the inner model's state_dict."
        raise CheckpointError(
            f"The weights in {path} do not fit {type(model).__name__} ({len(own)} tensors). {'; '.join(problems)}. "
            f"{remedy}"
        )


def _common_prefix(unexpected: list[str], missing: list[str]) -> str:
    """What stands before every unexpected name, if without it they are the missing ones."""
    for prefix in ("module.", "_orig_mod.", "model."):
        if unexpected and {name.removeprefix(prefix) for name in unexpected} == set(missing):
            return prefix
    return ""


def _shape(item: Any) -> tuple[int, ...] | None:
    return tuple(item.shape) if isinstance(item, Tensor) else None


def _cause(error: Exception) -> str:
    """The first line of what torch says, without its colours and without its own advice to trust the file."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
    line = text.rpartition("WeightsUnpickler error: ")[2].strip().splitlines()[0]
    return sentence(re.split(r" (?=Please use |This file can still )", line)[0][:160])
