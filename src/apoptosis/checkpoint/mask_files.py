"""Masks alone in a file, without a network: to make them once and use them elsewhere, or to hand them on.

The file is `MaskPlan.to_bytes`, the same that stands as `masks.safetensors` in a checkpoint; it vouches for itself.
"""

import os
from pathlib import Path

from apoptosis.checkpoint.files import write_file
from apoptosis.checkpoint.folders import MEMBERS, real_folder, sync_file
from apoptosis.errors import ApoptosisError, CheckpointError
from apoptosis.masks import MaskPlan
from apoptosis.reading import open_file

__all__ = ["load_masks", "save_masks"]


def save_masks(path: str | os.PathLike[str], masks: MaskPlan) -> Path:
    """Write masks to a file, in the place of one that stands there, all at once or not at all.

    Args:
        path: the file; `~` is the home folder, links stay links. Folders on the way are made.
        masks: `outcome.plan` of `sparsify`, or `masks_of(model)`.

    Returns:
        The file.

    Raises:
        CheckpointError: these are no masks, or the file cannot be written; what was there is as it was.

    >>> import tempfile
    >>> from torch import nn
    >>> from apoptosis.masks import identity_masks
    >>> load_masks(save_masks(f"{tempfile.mkdtemp()}/all.safetensors", identity_masks(nn.Linear(4, 2))))
    MaskPlan(1 tensor, 8 of 8 weights)
    """
    if not isinstance(masks, MaskPlan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(
            f"A {type(masks).__name__} was to be saved as masks. Give a MaskPlan: the plan that `sparsify` returned, "
            "or `masks_of(model)`."
        )
    target, data = real_folder(path), masks.to_bytes()
    if target.name in MEMBERS and (target.parent / "run.json").is_file():
        raise CheckpointError(
            f"{target} is part of a checkpoint, which would be damaged. Give another name, or save the outcome."
        )
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder; masks are one file. Give the name of a file.")
    try:
        write_file(target, lambda file: _write(file, data))
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error}. It takes {len(data):,} bytes. What was there before is as it "
            "was. Give a place that may be written to and has room."
        ) from error
    return Path(path).expanduser()


def load_masks(path: str | os.PathLike[str]) -> MaskPlan:
    """Read masks from a file of `save_masks`, or from the `masks.safetensors` of a checkpoint.

    Raises:
        CheckpointError: there is no such file, or it is something else, or damaged.
    """
    target = real_folder(path)
    try:
        with open_file(target) as stream:
            data = stream.read()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"There are no masks at {target}: no such file. Give the file that `save_masks` has written."
        ) from error
    except OSError as error:
        raise CheckpointError(_why_unreadable(target, error)) from error
    try:
        return MaskPlan.from_bytes(data)
    except ApoptosisError as error:
        raise CheckpointError(f"{target} cannot be read. {error}") from error


def _write(file: Path, data: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(data)
        sync_file(stream)


def _why_unreadable(target: Path, error: OSError) -> str:
    if not target.is_dir():
        return f"{target} cannot be read: {error}. Give a file that may be read."
    inside = target / "masks.safetensors"
    remedy = (
        f"Give {inside}." if inside.exists() else "Give the file that `save_masks` has written."
    )
    return f"{target} is a folder; masks are one file. {remedy}"
