"""A network on its way: the run it was traced by, and what cuts have made of it since."""

from dataclasses import dataclass, replace
from inspect import Signature

from torch import nn

from apoptosis.structure.analysis import Analysis
from apoptosis.structure.attributes import Attribute
from apoptosis.structure.axes import Axis
from apoptosis.structure.plan import Plan
from apoptosis.structure.recording import Example

__all__ = ["Network", "Run"]


@dataclass(frozen=True, eq=False)
class Run:
    """What one run of the model left behind."""

    model: nn.Module
    example: Example
    """What it ran on."""
    signature: Signature
    analysis: Analysis
    batch: Axis | None = None
    """The batch, where it was doubled for the run because it was 1; its size now is among the network's sizes."""

    def as_run(self, sizes: dict[Axis, int]) -> dict[Axis, int]:
        """Sizes with the batch of the run."""
        return {axis: size for axis, size in sizes.items() if axis is not self.batch}

    @property
    def is_meta(self) -> bool:
        """Whether there are no numbers to run with."""
        return any(p.device.type == "meta" for p in self.model.parameters())


@dataclass(frozen=True, eq=False)
class Network:
    """The run, and sizes, attributes and skeleton as they are now."""

    run: Run
    sizes: dict[Axis, int]
    attributes: dict[Attribute, int]
    skeleton: nn.Module | None
    """The module on the meta device; None once a cut has been delivered as a program."""
    applied: Plan | None = None
    """All cuts so far as one plan."""
    turned: nn.Module | None = None
    """What plans are for where it is not the traced model: the same with heads turned."""

    def whole(self, plan: Plan) -> Plan:
        """From the traced model to what `plan` leads to, whatever the weights."""
        whole = plan if self.applied is None else self.applied.then(plan)
        return replace(whole, basis=None)
