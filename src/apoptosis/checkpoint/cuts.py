"""Format 1: a network whose units were cut. Its plan is `plan.json`; every number of the small network is stored."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from apoptosis.checkpoint.dense import in_saved_types
from apoptosis.checkpoint.programs import traced_again
from apoptosis.checkpoint.record import CUT, SavedRun
from apoptosis.checkpoint.weights import Held, held_tensors
from apoptosis.errors import CheckpointError
from apoptosis.structure import CutProgram, Plan, cut, fingerprint_of

__all__ = ["CutPart"]


@dataclass(frozen=True)
class CutPart:
    """The plan of a cut, as one part of a checkpoint; what the methods are for stands in `kinds.Part`."""

    plan: Plan
    format: ClassVar[int] = CUT
    file: ClassVar[str] = "plan.json"

    @staticmethod
    def from_bytes(data: bytes) -> "CutPart":
        """Read `plan.json`."""
        return CutPart(Plan.from_json(data.decode()))

    def to_bytes(self) -> bytes:
        """What `plan.json` holds."""
        return self.plan.to_json().encode()

    @property
    def delivery(self) -> str:
        """As a module or as a program."""
        return self.plan.delivery

    def tensors_of(self, model: nn.Module) -> dict[Held, Tensor]:
        """All of them, if the plan leads to this network."""
        tensors = held_tensors(model)
        _check_fits_plan(model, {name: h.shape for h in tensors for name in h.names}, self.plan)
        return tensors

    def kept(self, held: Held) -> Tensor:
        """Not asked for: nothing is left out."""
        raise AssertionError(f"no number of {held.names[0]} is left out")

    def check_agrees(self, run: SavedRun) -> None:
        """Whether the cut leads to the recorded shapes is seen when it is carried out."""

    def dense_shapes(self, run: SavedRun) -> dict[str, tuple[int, ...]]:
        """Those before the cut."""
        cuts = {name: cut.shape for cut in self.plan.tensors for name in cut.names}
        return {name: cuts.get(name, shape) for name, shape in run.shapes.items()}

    def carry_out(self, dense: nn.Module, run: SavedRun, example_inputs: Any) -> nn.Module:
        """Cut the dense network, whatever its numbers: all are replaced. A program is written anew."""
        plan = replace(self.plan, basis=None)
        if plan.delivery == "module":
            return cut(in_saved_types(dense, run), plan)
        return traced_again(dense, plan, run, example_inputs)

    def finish_(self, model: nn.Module) -> None:
        """The numbers are all there is."""


def _check_fits_plan(model: nn.Module, shapes: dict[str, tuple[int, ...]], plan: Plan) -> None:
    """The network is what the plan leads to; it would be noticed too late when somebody loads it."""
    remedy = (
        "Save the network that was cut, not a wrapper around it, with the plan that cut it (several cuts: "
        "`first.then(second)`). Nothing was written."
    )
    for own in plan.tensors:
        for name in own.names:
            if shapes.get(name, own.new_shape) != own.new_shape:
                raise CheckpointError(
                    f"The plan makes {name!r} {own.new_shape}, but the network's has shape {shapes[name]}: it is not "
                    f"what this plan leads to. {remedy}"
                )
    if fingerprint_of(shapes) != plan.fingerprint_after:
        raise CheckpointError(
            f"Names and shapes of the network's tensors are not those that the plan leads to: {type(model).__name__} "
            f"has {len(shapes)} tensors, the first is {next(iter(shapes), 'none')!r}. {remedy}"
        )
    if plan.delivery == "program" and not isinstance(model, CutProgram):
        raise CheckpointError(
            f"The plan is delivered as a program, and {type(model).__name__} is none. {remedy}"
        )
