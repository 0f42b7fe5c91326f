"""How well scores rank units: against the true change of the loss when each unit is removed.

For a unit u of a group the truth is

    ΔL(u) = L(network with all slices of u set to zero) − L(network),

measured by one forward per unit over the data given. For an exact group that is what cutting the unit does. Spearman's
rank correlation with a score says how well the score puts units in the order in which they should go; it asks for the
order alone, so criteria in different units compare. Over all groups together it also says whether scores of different
groups compare with each other.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from apoptosis.errors import DataError
from apoptosis.modes import in_eval_mode
from apoptosis.progress import track
from apoptosis.structure import Group, Structure, copy_with, model_tensors
from apoptosis.task import Batch, Task

__all__ = ["spearman", "unit_truth"]


def unit_truth(
    model: nn.Module,
    structure: Structure,
    batches: Iterable[Batch],
    task: Task | None = None,
    *,
    groups: Iterable[str] | None = None,
) -> dict[str, Tensor]:
    """The change of the mean loss when one unit is zeroed, for every unit of every group.

    Args:
        model: the one that `structure` describes, evaluated in eval mode; a copy is changed, the model is not.
        structure: its groups.
        batches: bigger batches are faster, as every unit costs one forward per batch.
        task: what a batch is and what its loss is; classification unless said.
        groups: names of those to measure; all exact ones unless given.

    Returns:
        One float64 tensor `(units,)` per group, on the CPU. Negative where the loss falls without the unit.

    Raises:
        DataError: there are no samples.

    >>> from apoptosis.structure import trace
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> batches = [(torch.randn(8, 2), torch.zeros(8, dtype=torch.int64))]
    >>> unit_truth(model, trace(model, torch.zeros(1, 2)), batches)["0"].shape
    torch.Size([3])
    """
    task = task or Task.classification()
    names = list(groups) if groups is not None else [g.name for g in structure.groups if g.exact]
    twin = copy_with(model, {})
    held = list(batches)
    plain = _mean_loss(twin, held, task)
    truth = {name: torch.zeros(structure[name].size, dtype=torch.float64) for name in names}
    units = [(structure[name], unit) for name in names for unit in range(structure[name].size)]
    for group, unit in track(units, "removing each unit"):
        with _zeroed(twin, group, unit):
            truth[group.name][unit] = _mean_loss(twin, held, task) - plain
    return truth


def spearman(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation of two vectors; ties share their mean rank. NaN where one of them is constant.

    >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 4.0, 9.0]))
    1.0

    Raises:
        DataError: the two are not vectors of one length, or hold NaN.
    """
    if a.dim() != 1 or a.shape != b.shape:
        raise DataError(
            f"Rank correlation compares two vectors of one length; found shapes {tuple(a.shape)} and {tuple(b.shape)}."
        )
    if a.isnan().any() or b.isnan().any():
        raise DataError("Rank correlation of values with NaN among them; NaN has no rank.")
    x, y = _centred_ranks(a), _centred_ranks(b)
    scale = (x.square().sum() * y.square().sum()).sqrt()
    return float((x @ y) / scale)


def _centred_ranks(values: Tensor) -> Tensor:
    _, which, sizes = values.detach().cpu().unique(return_inverse=True, return_counts=True)
    last = sizes.cumsum(0).double()  # the highest rank in each tie
    ranks = (last - (sizes - 1) / 2)[which]
    return ranks - ranks.mean()


def _mean_loss(model: nn.Module, batches: list[Batch], task: Task) -> float:
    total, count = 0.0, 0
    with in_eval_mode(model), torch.no_grad():
        for batch in batches:
            args, kwargs = task.inputs(batch)
            size = task.count(batch)
            if size:
                total += float(task.loss(task.outputs(model(*args, **kwargs)), batch)) * size
                count += size
    if not count:
        raise DataError(
            "Asked for the loss change of removed units and found no samples: the batches are empty or were used up "
            "by an earlier loop. Give batches that can be iterated again, such as a list or a DataLoader."
        )
    return total / count


@contextmanager
def _zeroed(model: nn.Module, group: Group, unit: int) -> Iterator[None]:
    """All slices of one unit at zero inside the block, as they were afterwards."""
    tensors = model_tensors(model)
    saved: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for part in group.slices:
            tensor = tensors.get(part.tensor)
            spared = (part.tensor, part.dim) in group.spared
            if tensor is None or spared or not tensor.is_floating_point():
                continue
            entries = torch.as_tensor(part.indices[unit], device=tensor.device)
            saved.append((tensor, tensor.clone()))
            tensor.index_fill_(part.dim, entries, 0)
        try:
            yield
        finally:
            for tensor, before in reversed(saved):
                tensor.copy_(before)
