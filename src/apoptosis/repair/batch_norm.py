"""Batch norms measure their statistics anew: what reaches them has changed with the cut.

The network runs over the data with its batch norms normalising by the batch, everything else in eval mode, and each
norm's mean and variance over *all* samples and positions become its running statistics:

    μ = Σx / n,    σ² = (Σx² − n μ²) / (n − 1)        per channel, in float64, whatever the batches' sizes.

Weights stay as they are, no labels are needed, and a norm that the network does not run in eval mode keeps what it had.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from apoptosis.errors import DataError, ModelError
from apoptosis.masks import MaskPlan
from apoptosis.modes import in_eval_mode, outside_inference_mode
from apoptosis.progress import track
from apoptosis.soundness import check_numbers
from apoptosis.structure import CutProgram, Plan, copy_with
from apoptosis.task import Batch, Task
from apoptosis.turns import one_at_a_time

__all__ = ["batch_norm", "check_has_batch_norms"]


@outside_inference_mode
@one_at_a_time
def batch_norm(
    dense: nn.Module,  # noqa: ARG001 - called like every repair
    small: nn.Module,
    plan: Plan | MaskPlan,  # noqa: ARG001
    batches: Iterable[Batch],
    task: Task | None = None,
) -> nn.Module:
    """A copy of `small` whose batch norms have the statistics of these data.

    Raises:
        DataError: there are no samples, or a batch holds too few to have a variance.
        NonFiniteError: NaN, infinity, or numbers too large reach a norm.
    """  # noqa: DOC502 - by `check_numbers`
    task = task or Task.classification()
    mended = copy_with(small, {})
    norms = check_has_batch_norms(mended)
    totals = [_Total() for _ in norms]
    with in_eval_mode(mended), torch.no_grad(), _measuring(norms, totals):
        for batch in track(batches, "measuring batch norms"):
            # On copies, for a forward may write to what it is given.
            args, kwargs = tree_map_only(Tensor, Tensor.clone, task.inputs(batch))
            mended(*args, **kwargs)
    if not any(total.count for total in totals):
        raise DataError(
            "Batch norms were to be measured anew and saw no samples: the batches are empty or were used up by an "
            "earlier loop. Give batches that can be iterated again, such as a list or a DataLoader."
        )
    for norm, total in zip(norms, totals, strict=True):
        if total.count:
            total.write_to_(norm)
    check_numbers(mended, "The network with batch norms measured anew", real=False)
    return mended


def check_has_batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Those with statistics.

    Raises:
        ModelError: there are none, or the model is a program, whose norms are no modules.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        is_program = isinstance(model, CutProgram)
        why = " It was delivered as a program, which has none." if is_program else ""
        raise ModelError(
            f"Statistics of batch norms were to be measured anew, and {type(model).__name__} has no such module.{why} "
            "Leave them as they are: without this repair, or with batch_norm='frozen'."
        )
    return norms


class _Total:
    """Sums over samples and positions, per channel."""

    def __init__(self) -> None:
        self.count = 0
        self.sum: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0

    def add(self, x: Tensor) -> None:
        by_channel = x.detach().transpose(0, 1).flatten(1).double()
        if by_channel.shape[1] < 2:
            raise DataError(
                f"A batch norm was to be measured on {by_channel.shape[1]} values per channel (its input has shape "
                f"{tuple(x.shape)}); a variance needs at least two. Give larger batches, and drop a last one of a "
                "single sample."
            )
        self.count += by_channel.shape[1]
        self.sum = self.sum + by_channel.sum(1)
        self.squares = self.squares + by_channel.square().sum(1)

    def write_to_(self, norm: _BatchNorm) -> None:
        mean = torch.as_tensor(self.sum) / self.count
        variance = (torch.as_tensor(self.squares) - self.count * mean.square()) / (self.count - 1)
        assert norm.running_mean is not None, "asked only of norms with statistics"
        assert norm.running_var is not None, "asked only of norms with statistics"
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance.clamp_min(0))


@contextmanager
def _measuring(norms: list[_BatchNorm], totals: list[_Total]) -> Iterator[None]:
    """Norms use the batch's statistics inside the block, their own are left alone, and inputs are added up."""

    def adding(total: _Total) -> Any:
        return lambda _module, args, kwargs: total.add(args[0] if args else kwargs["input"])

    handles = [
        norm.register_forward_pre_hook(adding(total), with_kwargs=True)
        for norm, total in zip(norms, totals, strict=True)
    ]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.training, norm.momentum = True, 0.0
    try:
        yield
    finally:
        for norm, momentum, handle in zip(norms, momenta, handles, strict=True):
            norm.momentum = momentum
            handle.remove()
