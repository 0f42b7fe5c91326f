"""The one place where kinds of plans are told apart: by their class when saving, by the format number when loading."""

from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from apoptosis.checkpoint.cuts import CutPart
from apoptosis.checkpoint.masked import MaskPart
from apoptosis.checkpoint.record import SavedRun
from apoptosis.checkpoint.weights import Held
from apoptosis.errors import ApoptosisError, CheckpointError
from apoptosis.masks import MaskPlan
from apoptosis.structure import Plan

__all__ = ["KINDS", "AnyPlan", "Part", "part_of", "read_part"]

AnyPlan = Plan | MaskPlan


class Part(Protocol):
    """A plan as one part of a checkpoint: what saving and loading do differently for each kind."""

    format: ClassVar[int]
    """The number of `run.json`."""
    file: ClassVar[str]
    """Where the plan stands."""

    @property
    def plan(self) -> AnyPlan:
        """From the dense network to the saved one."""
        ...

    @property
    def delivery(self) -> str:
        """What `run.json` says of it."""
        ...

    def to_bytes(self) -> bytes:
        """The file."""
        ...

    def tensors_of(self, model: nn.Module) -> dict[Held, Tensor]:
        """What is saved of a network; a CheckpointError if the plan does not lead to it."""
        ...

    def kept(self, held: Held) -> Tensor:
        """True where a number is stored, as one row, for tensors with `Held.kept`."""
        ...

    def check_agrees(self, run: SavedRun) -> None:
        """A ValueError if plan and record were not written together."""
        ...

    def dense_shapes(self, run: SavedRun) -> dict[str, tuple[int, ...]]:
        """Of the network to load into, by name."""
        ...

    def carry_out(self, dense: nn.Module, run: SavedRun, example_inputs: Any) -> nn.Module:
        """The network whose numbers are then replaced by the saved ones."""
        ...

    def finish_(self, model: nn.Module) -> None:
        """What is left to do once the numbers are in place."""
        ...


def part_of(plan: AnyPlan) -> Part:
    """How a plan is saved.

    Raises:
        CheckpointError: it is no plan.
    """
    if isinstance(plan, Plan):
        return CutPart(plan)
    if isinstance(plan, MaskPlan):  # pyright: ignore[reportUnnecessaryIsInstance]
        return MaskPart(plan)
    raise CheckpointError(
        f"The plan of the outcome is a {type(plan).__name__}. A checkpoint holds what leads from the dense network to "
        "the small one: a Plan, as `prune` gives it, or a MaskPlan, as `sparsify` does."
    )


def read_part(data: bytes, run: SavedRun) -> Part:
    """The plan of a checkpoint, from its file.

    Raises:
        CheckpointError: it is no plan, or not the one of this record.
    """
    kind = KINDS[run.format]
    try:
        part = kind.from_bytes(data)
    except (ApoptosisError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{kind.file} cannot be read. {error}") from error
    try:
        part.check_agrees(run)
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{kind.file} does not fit what run.json says: {str(error)[:300]} The files were not written together; "
            "save the checkpoint again."
        ) from error
    return part


KINDS: dict[int, type[CutPart] | type[MaskPart]] = {
    kind.format: kind for kind in (CutPart, MaskPart)
}
"""By format number."""
