"""Choose what MACs are counted for: one sample, or the first batch where their number is not linear in it.

Every sample costs as much as any other where code does not look at values, and one tells all. In a mixture of experts
the router does: one sample visits some experts only, each for as many tokens as it happens to send there, so a budget
met for it is missed on others. Where a network looks at values, the first batch is traced as well; if any module costs
another multiple of one sample than there are samples, the batch is what is counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from apoptosis.errors import TraceError
from apoptosis.structure import Structure, trace
from apoptosis.task import Batch, Task, batch_size
from apoptosis.workflow.arguments import first_batch, first_sample

__all__ = ["Priced", "traced_for_costs"]


@dataclass(frozen=True)
class Priced:
    """A traced network, what it was traced with, and what its MACs are therefore those of."""

    structure: Structure
    example: Any
    counted_for: str


def traced_for_costs(
    model: nn.Module, batches: Iterable[Batch], task: Task, example_inputs: Any = None
) -> Priced:
    """The structure to plan with.

    Args:
        model: the network.
        batches: read as far as the first that is not empty.
        task: what a batch is.
        example_inputs: what to count for, if it was said.

    Raises:
        DataError: there are no batches, or all are empty.
    """
    if example_inputs is not None:
        return Priced(trace(model, example_inputs), example_inputs, "the example inputs")
    sample = first_sample(model, batches, task)
    one = Priced(trace(model, sample), sample, "one sample")
    if not one.structure.looks_at_values:
        return one
    batch, inputs = first_batch(model, batches, task)
    num = batch_size(batch)
    if num == 1:
        return one
    try:
        many = trace(model, inputs)
    except TraceError:  # one sample at a time is all it takes
        return one
    if _is_linear(one.structure, many, num):
        return one
    return Priced(many, inputs, f"the first batch of {num} samples, routed as by the dense network")


def _is_linear(one: Structure, many: Structure, num: int) -> bool:
    """True if every module costs as often as much as there are samples."""
    single, whole = one.macs_by_module(), many.macs_by_module()
    return all(whole.get(name, 0) == num * single.get(name, 0) for name in {*single, *whole})
