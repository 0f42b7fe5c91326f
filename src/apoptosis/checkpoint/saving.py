"""`save`: a pruned network and its history into a folder, all at once or not at all."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from apoptosis.checkpoint.folders import other_content, real_folder, replace_folder, sync_file
from apoptosis.checkpoint.inputs import describe
from apoptosis.checkpoint.kinds import AnyPlan, Part, part_of
from apoptosis.checkpoint.number_types import dtype_name
from apoptosis.checkpoint.programs import program_digest
from apoptosis.checkpoint.record import FileSum, SavedRun, present_versions, run_as_json
from apoptosis.checkpoint.weights import Held, num_bytes, write_weights
from apoptosis.errors import CheckpointError, ModelError, NonFiniteError
from apoptosis.reading import RECORD
from apoptosis.records import Outcome
from apoptosis.soundness import check_numbers
from apoptosis.structure import model_tensors

__all__ = ["save"]


def save(path: str | os.PathLike[str], outcome: Outcome[AnyPlan]) -> Path:
    """Write a checkpoint: a folder with `model.safetensors`, `plan.json` and `run.json`.

    Of a network whose single weights were removed, `masks.safetensors` stands in the place of `plan.json`, and only the
    weights that stay are written.

    A checkpoint that stands there already is replaced in one step: at every moment, and after any interruption, the
    folder is the whole old one or the whole new one.

    Args:
        path: the folder; `~` is the home folder, links stay links. A folder with other files in it is refused.
        outcome: what to save. It is not changed.

    Returns:
        The folder.

    Raises:
        CheckpointError: the outcome cannot be saved, or the folder not be written; what was there is as it was.

    >>> import tempfile
    >>> from torch import nn, zeros
    >>> from apoptosis.structure import cut, trace
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> plan = trace(net, zeros(1, 4)).plan({"0": [0, 2, 5]})
    >>> folder = save(tempfile.mkdtemp(), Outcome(cut(net, plan), plan, example_inputs=zeros(1, 4)))
    >>> sorted(file.name for file in folder.iterdir())
    ['model.safetensors', 'plan.json', 'run.json']
    """
    if not isinstance(outcome, Outcome):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise CheckpointError(
            f"A {type(outcome).__name__} was to be saved. A checkpoint also holds the plan that leads to the network: "
            "give what `prune`, `sparsify` or `load_outcome` returned, or Outcome(model, plan)."
        )
    target = real_folder(path)
    part = part_of(outcome.plan)
    tensors = part.tensors_of(outcome.model)
    try:
        check_numbers(outcome.model, real=False)
    except (ModelError, NonFiniteError) as error:
        raise CheckpointError(f"{error} Nothing was written.") from error
    plan = part.to_bytes()
    run = _described(outcome, part, tensors, plan)
    _check_can_be_read(target, {part.file: plan, "run.json": run_as_json(run).encode()})
    needed = num_bytes(tensors) + len(plan) + len(run_as_json(run))
    try:
        _check_may_be_replaced(target)
        replace_folder(target, lambda folder: _fill(folder, part, tensors, plan, run))
    except OSError as error:
        raise CheckpointError(_why_not_written(target, needed, error)) from error
    return Path(path).expanduser()


def _check_can_be_read(target: Path, files: dict[str, bytes]) -> None:
    """A record that `load` would take for a bomb is of no use."""
    for name, content in files.items():
        if name.endswith(".json") and len(content) > RECORD:
            raise CheckpointError(
                f"{target / name} would have {len(content):,} bytes, and at most {RECORD:,} are read again. Shorten "
                "settings or history: `dataclasses.replace(outcome, history=())`. Nothing was written."
            )


def _described(
    outcome: Outcome[AnyPlan], part: Part, tensors: dict[Held, Tensor], plan: bytes
) -> SavedRun:
    saved = {name for held in tensors for name in held.names}
    return SavedRun(
        settings=outcome.settings,
        history=outcome.history,
        spent=outcome.spent,
        versions=present_versions(),
        delivery=part.delivery,
        tensors=tuple(tensors),
        other_dtypes={
            name: dtype_name(tensor.dtype)
            for name, tensor in model_tensors(outcome.model).items()
            if name not in saved
        },
        extra_state=_extra_state(outcome.model),
        example=describe(outcome.example_inputs),
        program=program_digest(outcome.model),
        files={
            "model.safetensors": FileSum(num_bytes(tensors), "0" * 64),
            part.file: FileSum(len(plan), hashlib.sha256(plan).hexdigest()),
        },
        format=part.format,
    )


def _fill(
    folder: Path, part: Part, tensors: dict[Held, Tensor], plan: bytes, run: SavedRun
) -> None:
    written = write_weights(folder / "model.safetensors", tensors, part.kept)
    _write(folder / part.file, plan)
    sums = dict(run.files) | {"model.safetensors": FileSum(num_bytes(tensors), written)}
    _write(folder / "run.json", run_as_json(replace(run, files=sums)).encode())


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(data)
        sync_file(stream)


def _extra_state(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] != "_extra_state" or isinstance(value, Tensor):
            continue
        try:
            kept = json.loads(json.dumps(value, allow_nan=False))
            same = kept == value
        except (TypeError, ValueError, RecursionError):
            kept, same = None, False
        if not same:
            raise CheckpointError(
                f"Extra state {name!r} ({type(value).__name__}) is no plain JSON value, and checkpoints hold no "
                "pickles. Let `get_extra_state` give texts, numbers, lists and dicts with texts as keys, or hold "
                "tensors as buffers. Nothing was written."
            )
        found[name] = kept
    return found


def _check_may_be_replaced(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file; a checkpoint is a folder. Give another name.")
    if what := other_content(target):
        raise CheckpointError(
            f"{target} {what}: it is no checkpoint, and saving would remove what it holds. Give the name of a folder "
            "that does not exist yet, or of a checkpoint."
        )


def _why_not_written(target: Path, needed: int, error: OSError) -> str:
    kept = "What was there before is as it was, and nothing is left of the attempt."
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"{target} could not be written: {error}. {kept} Give a place that may be written to."
        )
    free = _or_none(lambda: shutil.disk_usage(target.parent).free)
    return (
        f"{target} could not be written: {error.strerror}. The checkpoint takes {needed:,} bytes"
        f"{'' if free is None else f'; {free:,} are free'}. {kept} Make room, or save elsewhere."
    )


def _or_none(ask: Callable[[], int]) -> int | None:
    try:
        return ask()
    except OSError:
        return None
