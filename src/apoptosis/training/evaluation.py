"""Loss and metrics of a model over all samples of some batches, in eval mode, changing nothing."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from apoptosis.errors import DataError
from apoptosis.modes import in_eval_mode
from apoptosis.progress import track
from apoptosis.task import Batch, Task
from apoptosis.turns import one_at_a_time

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """Means over `count` samples (tokens for sequence losses)."""

    loss: float
    metrics: Mapping[str, float]
    count: int

    def as_data(self) -> dict[str, Any]:
        """Plain values, by the names of the fields."""
        return {"loss": self.loss, "metrics": dict(self.metrics), "count": self.count}


@one_at_a_time
def evaluate(model: nn.Module, batches: Iterable[Batch], task: Task | None = None) -> Evaluation:
    """Mean loss and metrics; classification unless `task` says otherwise.

    Raises:
        DataError: there is no sample to evaluate on.

    >>> batch = torch.eye(3), torch.tensor([0, 1, 1])
    >>> evaluate(nn.Identity(), [batch]).metrics["correct"]
    0.666...
    """
    task = task or Task.classification()
    loss, count = 0.0, 0
    sums: Counter[str] = Counter()
    with in_eval_mode(model), torch.no_grad():
        for batch in track(batches, "evaluating"):
            args, kwargs = task.inputs(batch)
            outputs = task.outputs(model(*args, **kwargs))
            size = task.count(batch)
            loss += float(task.loss(outputs, batch)) * size if size else 0.0
            count += size
            sums.update(task.metrics(outputs, batch))
    if not count:
        raise DataError(
            "Asked to evaluate and found no samples: the batches are empty or were used up by an earlier loop. "
            "Give batches that can be iterated again, such as a list or a DataLoader."
        )
    return Evaluation(loss / count, {name: total / count for name, total in sums.items()}, count)
