"""The last look at a network before it is given out: it runs on the user's own first batch, whole and as it is.

Plans are made on a sample of one. What else a batch has (more samples, tokens for other experts, numbers of another
type) is seen here for the first time where the criterion reads no data.
"""

from collections.abc import Iterable

from torch import nn

from apoptosis.errors import ModelError
from apoptosis.structure import Example, why_not_run
from apoptosis.task import Batch, Task
from apoptosis.training import at_pass
from apoptosis.workflow.arguments import as_arguments

__all__ = ["check_runs"]


def check_runs(small: nn.Module, model: nn.Module, batches: Iterable[Batch], task: Task) -> None:
    """Refuse a network that does not run on a batch on which the given one does.

    Raises:
        ModelError: it does not.
    """
    first = (b for b in at_pass(batches, 0) if next(iter(task.split(b, 1)), None) is not None)
    if small is model or (batch := next(first, None)) is None:
        return
    if because := why_not_run(small, model, Example.of(as_arguments(model, batch, task))):
        raise ModelError(
            "The network was made smaller and does not run on the first of your batches, on which "
            f"{type(model).__name__} does: {because}. Nothing was delivered. Pass this batch's inputs as "
            "`example_inputs`, so that the cut is planned for them; or leave the groups that this concerns whole: "
            'Selection(names=("!…",)).'
        )
