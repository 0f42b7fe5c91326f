"""`run.json`: everything about a saved run that is neither a tensor nor the plan.

It is the file that vouches for the others: their lengths and checksums stand in it, and one of its own content.
So whatever is read from a checkpoint is what was written, or is refused before anybody acts on it. A format number
comes first; a checkpoint of a format this version does not know is refused in words. Format 1 is that of networks whose
units were cut, format 2 that of masked ones: the first is written as it ever was, so that old versions read it.
"""

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from apoptosis import __version__
from apoptosis.checkpoint.number_types import DTYPES
from apoptosis.checkpoint.weights import Held, fills_memory
from apoptosis.errors import CheckpointError
from apoptosis.records import ScoreSummary, Spending, StepRecord

__all__ = [
    "CUT",
    "MASKED",
    "FileSum",
    "SavedRun",
    "parse_run",
    "present_versions",
    "run_as_json",
    "same_versions",
    "read_step",
    "step_as_json",
]

CUT, MASKED = 1, 2
"""Format numbers."""


@dataclass(frozen=True)
class FileSum:
    """What a file must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What a checkpoint tells without the network: what was asked, what happened, what it holds."""

    settings: Mapping[str, Any]
    history: tuple[StepRecord, ...]
    spent: tuple[Spending, ...]
    versions: Mapping[str, str]
    """Of apoptosis, torch and Python, when it was saved."""
    delivery: str
    """"module" or "program", as the plan's; "masks" where single weights were removed."""
    tensors: tuple[Held, ...]
    """Parameters and persistent buffers of the small network; tied names together."""
    other_dtypes: Mapping[str, str]
    """Number types of tensors that are not saved: buffers that are not persistent, and plain attributes."""
    extra_state: Mapping[str, Any]
    """What modules keep besides tensors (`get_extra_state`)."""
    example: Any
    """Form of the example inputs, as `inputs.describe` gives it."""
    program: str | None
    """Digest of the rewritten program, where there is one."""
    files: Mapping[str, FileSum]
    format: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every saved tensor, by every name."""
        return {name: held.shape for held in self.tensors for name in held.names}

    @property
    def dtypes(self) -> dict[str, str]:
        """Of every saved tensor, by every name."""
        return {name: held.dtype for held in self.tensors for name in held.names}

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Names that are one tensor."""
        return tuple(held.names for held in self.tensors if len(held.names) > 1)


def present_versions() -> dict[str, str]:
    """Versions that a checkpoint is written with."""
    python = platform.python_version()
    return {"apoptosis": __version__, "torch": str(torch.__version__), "python": python}


def same_versions(run: SavedRun) -> bool:
    """Whether a network is traced here as it was then."""
    here = present_versions()
    return all(run.versions.get(name) == here[name] for name in ("torch", "apoptosis"))


def run_as_json(run: SavedRun) -> str:
    """The text of `run.json`.

    Raises:
        CheckpointError: settings hold something that is no JSON.
    """
    content: dict[str, Any] = {
        "format": run.format,
        "versions": dict(run.versions),
        "delivery": run.delivery,
        "settings": _checked_settings(run.settings),
        "spent": [asdict(line) for line in run.spent],
        "history": [step_as_json(step) for step in run.history],
        "example": run.example,
        "program": run.program,
        "extra_state": dict(run.extra_state),
        "other_dtypes": dict(run.other_dtypes),
        "tensors": [_held_as_json(held, run.format) for held in run.tensors],
        "files": {name: asdict(own) for name, own in run.files.items()},
    }
    return json.dumps({"checksum": _checksum(content)} | content, indent=1, allow_nan=False) + "\n"


def parse_run(data: bytes, path: Path) -> SavedRun:
    """Read `run.json` back.

    Raises:
        CheckpointError: it is something else, of a later format, or changed.
    """
    try:
        content = json.loads(data.decode())
        number, checksum = content["format"], content.pop("checksum")
        later = number > MASKED and type(number) is int
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no record of a run ({type(error).__name__}: {str(error)[:120]}). Either this is no checkpoint "
            "of apoptosis, or the file was cut short or changed: take another copy of it."
        ) from error
    if type(number) is not int or number not in (CUT, MASKED):
        newer = "it was written by a newer version: upgrade torch-apoptosis"
        unknown = "there is no such format: the file was changed. Take another copy of it"
        raise CheckpointError(
            f"{path} has format {str(number)[:20]}; this version reads formats {CUT} and {MASKED}, and "
            f"{newer if later else unknown}."
        )
    try:
        changed = checksum != _checksum(content)
    except (TypeError, ValueError, RecursionError):  # numbers that JSON has not: NaN
        changed = True
    if changed:
        raise CheckpointError(
            f"{path} was changed after it was saved: its content does not give its checksum. Take another copy of "
            "the checkpoint, or save it again."
        )
    try:
        return _read(content)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no record of a run: {type(error).__name__}: {str(error)[:120]}. Save the checkpoint again."
        ) from error


def _checksum(content: Mapping[str, Any]) -> str:
    """Of the content, however it is spaced and ordered."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in settings.items():
        try:
            json.dumps({name: value}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"Setting {name!r} is {str(value)[:60]!r} ({type(value).__name__}), which is no plain JSON value "
                f"({error}). Replace it: `dataclasses.replace(outcome, settings=…)`. Nothing was written."
            ) from error
    return json.loads(json.dumps(dict(settings)))


def step_as_json(step: StepRecord) -> dict[str, Any]:
    """Plain values; `read_step` reads them."""
    scores = {
        group: [_number(n) for n in (own.lowest, own.median, own.highest)]
        for group, own in step.scores.items()
    }
    return {
        "step": int(step.step),
        "loss": None if step.loss is None else _number(step.loss),
        "count": int(step.count),
        "scores": scores,
        "removed": {group: int(num) for group, num in step.removed.items()},
        "left": {group: int(num) for group, num in step.left.items()},
        "macs": None if step.macs is None else int(step.macs),
        "params": int(step.params),
        "seconds": _number(step.seconds),
    }


def _held_as_json(held: Held, number: int) -> dict[str, Any]:
    data = asdict(held)
    if number == CUT:  # old versions know nothing of it
        del data["kept"]
    return data


def _number(value: float) -> float | str:
    """JSON has neither infinities nor NaN; `float` reads both forms."""
    return float(value) if math.isfinite(value) else repr(float(value))


def _read(data: Mapping[str, Any]) -> SavedRun:
    return SavedRun(
        settings=dict(data["settings"]),
        history=tuple(read_step(step) for step in data["history"]),
        spent=tuple(Spending(**line) for line in data["spent"]),
        versions=dict(data["versions"]),
        delivery=data["delivery"],
        tensors=tuple(_read_held(held, data["format"]) for held in data["tensors"]),
        other_dtypes=dict(data["other_dtypes"]),
        extra_state=dict(data["extra_state"]),
        example=data["example"],
        program=data["program"],
        files={name: FileSum(**own) for name, own in data["files"].items()},
        format=data["format"],
    )


def read_step(data: Mapping[str, Any]) -> StepRecord:
    """What `step_as_json` made of one."""
    numbers: dict[str, Any] = {
        "scores": {g: ScoreSummary(*map(float, own)) for g, own in data["scores"].items()},
        "loss": None if data["loss"] is None else float(data["loss"]),
        "seconds": float(data["seconds"]),
    }
    return StepRecord(**(dict(data) | numbers))


def _read_held(data: Mapping[str, Any], number: int) -> Held:
    shape, strides = tuple(data["shape"]), data["strides"]
    held = Held(
        tuple(data["names"]),
        shape,
        data["dtype"],
        data["requires_grad"] is True,
        None if strides is None else tuple(strides),
        data["kept"] if number == MASKED else None,
    )
    if held.dtype not in DTYPES or not held.names:
        raise ValueError(f"a tensor {held.names} of type {held.dtype}")
    if held.strides is not None and not fills_memory(shape, held.strides):
        raise ValueError(f"strides {held.strides} of shape {shape}")
    if held.kept is not None and not (type(held.kept) is int and 0 <= held.kept < math.prod(shape)):
        raise ValueError(f"{held.kept} numbers of shape {shape}")
    return held
