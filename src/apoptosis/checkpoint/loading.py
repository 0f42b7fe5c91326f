"""`load` and `read_run`: what a checkpoint holds, once it is known to be what was saved.

Nothing is trusted before its checksum has been compared: `run.json` vouches for itself and for the two other files. Its
format number says whether the plan among them is a cut or masks. A header of `model.safetensors` that says anything is
never acted upon. Checksums are no signatures, so a record may still ask for anything: it gets no more numbers than the
network has that it is loaded into.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apoptosis.checkpoint.dense import check_has_room
from apoptosis.checkpoint.folders import find_folder, real_folder
from apoptosis.checkpoint.inputs import zeros_like_description
from apoptosis.checkpoint.kinds import KINDS, AnyPlan, Part, read_part
from apoptosis.checkpoint.rebuilding import rebuild
from apoptosis.checkpoint.record import SavedRun, parse_run
from apoptosis.checkpoint.weights import read_weights
from apoptosis.errors import CheckpointError
from apoptosis.modes import outside_inference_mode
from apoptosis.reading import RECORD, open_file, read_rest
from apoptosis.records import Outcome

__all__ = ["load", "load_outcome", "read_run"]

TRIES = 5
"""As often a checkpoint may be replaced by another process while it is being read."""

WHOLE = "model.safetensors, run.json, and plan.json or masks.safetensors"
"""What a checkpoint consists of."""


@dataclass(frozen=True)
class _Content:
    run: SavedRun
    part: Part
    weights: dict[str, Tensor]


@outside_inference_mode
def load(
    path: str | os.PathLike[str],
    dense: Callable[[], nn.Module] | nn.Module,
    *,
    example_inputs: Any = None,
) -> nn.Module:
    """The small network of a checkpoint, in eval mode, exactly as it was saved.

    Args:
        path: the folder that `save` has written.
        dense: makes the dense network, or is one; its numbers do not matter, and it is not changed. Made on the meta
            device (`with torch.device("meta")`) it takes no memory, if all its buffers are persistent.
        example_inputs: for a network delivered as a program, which is traced again: what to trace it on. Zeros of the
            recorded shapes unless given.

    Returns:
        A network of the dense one's class, or a program, as the plan says. A masked one keeps its masks.

    Raises:
        CheckpointError: this is no checkpoint, it is damaged, or it is one of another network.

    >>> import tempfile
    >>> from torch import nn, zeros
    >>> from apoptosis.checkpoint import save
    >>> from apoptosis.records import Outcome
    >>> from apoptosis.structure import cut, trace
    >>> def make():
    ...     return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = make()
    >>> plan = trace(net, zeros(1, 4)).plan({"0": [0, 2, 5]})
    >>> load(save(tempfile.mkdtemp(), Outcome(cut(net, plan), plan)), dense=make)[2]
    Linear(in_features=3, out_features=2, bias=True)
    """
    return _rebuilt(path, dense, example_inputs)[0]


@outside_inference_mode
def load_outcome(
    path: str | os.PathLike[str],
    dense: Callable[[], nn.Module] | nn.Module,
    *,
    example_inputs: Any = None,
) -> Outcome[AnyPlan]:
    """As `load`, with plan, history, what was spent and settings: to train the network on and save it again.

    Example inputs come back as zeros of their shapes unless given; None where they held what a checkpoint cannot keep.
    """
    model, content = _rebuilt(path, dense, example_inputs)
    if example_inputs is None:
        with suppress(CheckpointError):
            example_inputs = zeros_like_description(content.run.example, torch.device("cpu"))
    run = content.run
    return Outcome(model, content.part.plan, run.history, run.spent, run.settings, example_inputs)


def _rebuilt(
    path: str | os.PathLike[str], dense: Callable[[], nn.Module] | nn.Module, example_inputs: Any
) -> tuple[nn.Module, _Content]:
    known: list[nn.Module] = []

    def dense_for(run: SavedRun) -> None:
        if not known:  # a second try needs no second network
            known.append(_made(dense))
        check_has_room(known[0], run)

    content = _while_it_stays(real_folder(path), lambda folder: _read(folder, dense_for))
    made = known[0]
    on_meta = torch.get_default_device().type == "meta"  # meant for the dense network alone
    with torch.device("cpu") if on_meta else nullcontext():
        model = rebuild(made, content.part, content.run, content.weights, example_inputs)
    return model, content


def read_run(path: str | os.PathLike[str]) -> SavedRun:
    """What a checkpoint tells without its network: settings, history, what was spent, versions, shapes.

    Raises:
        CheckpointError: this is no checkpoint, or its record is damaged. The other files are not looked at.
    """
    return _while_it_stays(real_folder(path), _read_record)


def _while_it_stays(path: Path, read: Callable[[Path], Any]) -> Any:
    """Read a folder; once more if somebody has put another in its place meanwhile."""
    for tries_left in reversed(range(TRIES)):
        folder = find_folder(path)
        before = _identity(folder)
        try:
            return read(folder)
        except CheckpointError:
            if not tries_left or _identity(find_folder(path)) == before:
                raise
    raise AssertionError("the last try returns or raises")


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """Which folder it is, and since when it has its name: numbers of removed folders are given again."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _read(folder: Path, check_numbers: Callable[[SavedRun], None]) -> _Content:
    run = _read_record(folder)
    check_numbers(run)
    path = folder / KINDS[run.format].file
    with _opened(path) as stream:
        _check_unchanged(stream, path, run)
        try:
            stream.seek(0)
            data = _whole(stream, path)
        except OSError as error:
            raise CheckpointError(_why_unreadable(path, error)) from error
    part = read_part(data, run)
    path = folder / "model.safetensors"
    with _opened(path) as stream:
        _check_unchanged(stream, path, run)
        return _Content(run, part, read_weights(stream, run.tensors, part.kept))


def _read_record(folder: Path) -> SavedRun:
    if not folder.exists():
        raise CheckpointError(
            f"There is no checkpoint at {folder}: no such folder. Give the folder that `save` has written."
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file; a checkpoint is a folder with {WHOLE}. Give the folder."
        )
    path = folder / "run.json"
    with _opened(path) as stream:
        try:
            return parse_run(_whole(stream, path), path)
        except OSError as error:
            raise CheckpointError(_why_unreadable(path, error)) from error


def _opened(path: Path) -> BufferedReader:
    try:
        return open_file(path)
    except OSError as error:
        raise CheckpointError(_why_unreadable(path, error)) from error


def _whole(stream: BufferedReader, path: Path) -> bytes:
    """All of it, unless it is longer than a record or a plan can be; masks have one bit for each number."""
    return read_rest(stream, path, RECORD) if path.suffix == ".json" else stream.read()


def _check_unchanged(stream: BufferedReader, path: Path, run: SavedRun) -> None:
    expected = run.files.get(path.name)
    if expected is None:
        raise CheckpointError(f"run.json says nothing of {path}. Save the checkpoint again.")
    try:
        found = os.fstat(stream.fileno()).st_size
        digest = (
            hashlib.file_digest(stream, "sha256").hexdigest() if found == expected.bytes else ""
        )
    except OSError as error:
        raise CheckpointError(_why_unreadable(path, error)) from error
    if found != expected.bytes:
        raise CheckpointError(
            f"{path} has {found:,} bytes and had {expected.bytes:,} when it was saved: it was cut short or changed. "
            "Take another copy of the checkpoint, or save it again."
        )
    if digest != expected.sha256:
        raise CheckpointError(
            f"{path} was changed after it was saved: its checksum is {digest[:12]}… and was {expected.sha256[:12]}…. "
            "Take another copy of the checkpoint, or save it again."
        )


def _why_unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            f"{path.parent} has no {path.name}: it is no checkpoint of apoptosis, or not a whole one. A checkpoint is "
            f"a folder with {WHOLE}."
        )
    return f"{path} cannot be read: {error}. Give a checkpoint that may be read."


def _made(dense: Any) -> nn.Module:
    if isinstance(dense, nn.Module):
        return dense
    if callable(dense):
        with torch.random.fork_rng(devices=[]):  # weights drawn here are thrown away
            made = dense()
        if isinstance(made, nn.Module):
            return made
        raise CheckpointError(
            f"`dense` was called and gave a {type(made).__name__}. It must make the dense network, a torch.nn.Module."
        )
    raise CheckpointError(
        f"`dense` is a {type(dense).__name__}. Give the dense network, or a function without arguments that makes it."
    )
