"""Trained weights from a file into a model: every name and shape must fit, and nothing in the file is run."""

import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from apoptosis.checkpoint import load_outcome, read_run
from apoptosis.cli.names import sentence
from apoptosis.cli.origins import is_checkpoint
from apoptosis.cli.torch_masks import keep_masks_, without_torch_masks
from apoptosis.errors import CheckpointError
from apoptosis.masks import MaskPlan, mask_

__all__ = ["load_weights_"]

WRAPPERS = ("state_dict", "model")
"""Keys under which training scripts keep the weights beside other things."""
MOST_PER_NUMBER = 64
"""Bytes: training scripts keep averages and the optimiser's numbers beside the weights."""
COUNTERS = "num_batches_tracked"
"""Of batch norms: files of older versions of torch have none, and eval mode does not read them."""

FORBIDDEN = ("GLOBAL", "unrecognized function", "Can only build", "Can only create", "TorchScript")
"""Words by which torch names what would run code: classes and functions that are not on its list, and programs."""


def load_weights_(model: nn.Module, path: Path) -> None:
    """Put the weights of a `.safetensors` file, of one that torch wrote, or of a checkpoint into the model.

    Masks that come with them are kept: those of a checkpoint, and those of `torch.nn.utils.prune`.

    Raises:
        CheckpointError: there is no such file, it holds other things than tensors, or they are of another model.
    """
    path = path.expanduser()
    if is_checkpoint(path):
        _load_checkpoint_(model, path)
        return
    if is_checkpoint(path.parent):
        raise CheckpointError(
            f"{path} is part of a checkpoint of apoptosis. Give the folder: --weights {path.parent}"
        )
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise CheckpointError(
            f"The weights {path}: it {what}. Give a file .safetensors, or one that torch.save has written."
        )
    _check_size(path, sum(t.numel() for t in model.state_dict().values() if isinstance(t, Tensor)))
    found = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    found, masks = without_torch_masks(found)
    _check_fits(model, found, path)
    model.load_state_dict(found, strict=False)  # tied tensors may stand in a file under one name
    if masks:
        keep_masks_(model, masks)


def _check_size(path: Path, num: int) -> None:
    """What would be read is about as much as the model can take, also once it is unpacked."""
    size, most = path.stat().st_size, 2**28 + MOST_PER_NUMBER * num
    if zipfile.is_zipfile(path):
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as held:
            size = max(size, sum(member.file_size for member in held.infolist()))
    if size > most:
        raise CheckpointError(
            f"The weights {path} take {size:,} bytes, and the model has {num:,} numbers: at most {most:,} are read. "
            "Give the weights of this model alone."
        )


def _load_checkpoint_(model: nn.Module, path: Path) -> None:
    run = read_run(path)
    subject = run.settings.get("subject")
    of = f" of {subject['model']}" if isinstance(subject, dict) and "model" in subject else ""
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    if run.shapes != shapes:
        names = [n for n in {**shapes, **run.shapes} if shapes.get(n) != run.shapes.get(n)]
        raise CheckpointError(
            f"--weights {path}: the checkpoint{of} has tensors of other names or shapes than {type(model).__name__}: "
            f"{names[0]!r} is {run.shapes.get(names[0], 'not there')} in it and "
            f"{shapes.get(names[0], 'not there')} in the model. Name the folder as the model instead: it holds its "
            "network, however it was cut."
        )
    trained = load_outcome(path, model)
    model.load_state_dict(trained.model.state_dict())
    if isinstance(trained.plan, MaskPlan):
        mask_(model, trained.plan)


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
    except PermissionError:
        raise
    except (
        Exception
    ) as error:  # of damaged bytes its unpickler lets anything through: KeyError, struct.error, …
        raise CheckpointError(f"{path} {_why_refused(error)}") from error
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
    missing = [
        name
        for name, item in own.items()
        if name not in found and id(item) not in present and not name.endswith(COUNTERS)
    ]
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
        inner = {name.removeprefix(prefix) for name in unexpected}
        if missing and {name for name in inner if not name.endswith(COUNTERS)} == set(missing):
            return prefix
    return ""


def _shape(item: Any) -> tuple[int, ...] | None:
    return tuple(item.shape) if isinstance(item, Tensor) else None


def _why_refused(error: Exception) -> str:
    cause = _cause(error)
    if cause.startswith("It ") or any(words in cause for words in FORBIDDEN):
        return (
            "is not a file of weights alone. Other pickles can run any code when they are read, so it is refused. "
            "Where you trust it, write the weights anew: torch.save(model.state_dict(), 'weights.pt'). "
            f"{cause if cause.startswith('It ') else f'torch says: {cause}'}"
        )
    return f"is damaged, or is no file of torch's. Take another copy of it. torch says: {cause}"


def _cause(error: Exception) -> str:
    """The name that a file asks for, or the first line of what torch says; never its advice to trust the file."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip() or type(error).__name__
    if named := re.search(r"GLOBAL ([\w.]+)|(?:function|class|global|type) ([\w]+\.[\w.]+)", text):
        return f"It asks for {named[1] or named[2]}."
    line = text.rpartition("WeightsUnpickler error: ")[2].strip().splitlines()[0]
    if any(word in line for word in ("weights_only", "safe_globals", "torch.load")):  # its advice
        return "It holds more than weights."
    return sentence(line[:160])
