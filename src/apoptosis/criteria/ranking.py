"""How well scores rank output channels: against the true change of the loss when each channel is masked.

For a channel c of a layer the truth is

    ΔL(c) = L(network with channel c of that layer's output set to zero) − L(network),

measured by one forward per channel over the same data the scores saw. What a score predicts is |Σ score| over the
parameters that make the channel: row c of the convolution's weight and bias and element c of its norm's. The sum is
signed because contributions of one channel cancel in the loss as well. Spearman's rank correlation between the two says
how well the score puts channels in the order in which they should go; it asks for the order alone, so criteria in
different units compare.

Masking happens at a module's *output*, after norm and activation: a norm's bias would fill a channel masked before it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from apoptosis.errors import ConfigError, DataError, ModelError
from apoptosis.modes import in_eval_mode
from apoptosis.progress import track
from apoptosis.task import Batch, Task

if TYPE_CHECKING:
    from apoptosis.criteria.scores import Scores

__all__ = ["channel_scores", "masking_truth", "spearman"]


def masking_truth(
    model: nn.Module, batches: Iterable[Batch], task: Task, sites: Sequence[str]
) -> dict[str, Tensor]:
    """The change of the mean loss when one channel is set to zero, for every channel of every site.

    Args:
        model: evaluated in eval mode; hooks and flags are as before afterwards.
        batches: read once; bigger batches are faster, as every channel costs one forward per batch.
        task: what a batch is and what its loss is.
        sites: names of modules whose output `(samples, channels, ...)` is masked.

    Returns:
        One float64 tensor `(channels,)` per site, on the CPU. Negative where the loss falls without the channel.

    Raises:
        DataError: there are no samples.
        ModelError: a site is no module of the model, or gives no channels.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> task = Task.classification(nn.functional.mse_loss)
    >>> truth = masking_truth(model, [(torch.randn(8, 2), torch.zeros(8, 1))], task, ["1"])
    >>> truth["1"].shape
    torch.Size([2])
    """
    modules = {site: _module(model, site) for site in sites}
    sums: dict[str, Tensor] = {}
    count = 0
    with in_eval_mode(model), torch.no_grad():
        for batch in track(batches, "masking each channel"):
            size = task.count(batch)
            count += size
            plain, channels = _plain_loss(model, batch, task, modules)
            for site, module in modules.items():
                changes = torch.zeros(channels[site], dtype=torch.float64)
                for channel in range(channels[site]):
                    with _masked(module, channel):
                        changes[channel] = _loss(model, batch, task) - plain
                sums[site] = sums.get(site, 0.0) + changes * size
    if not count:
        raise DataError(
            "Asked for the loss change of masked channels and found no samples: the batches are empty or were used up "
            "by an earlier loop. Give batches that can be iterated again, such as a list or a DataLoader."
        )
    return {site: total / count for site, total in sums.items()}


def channel_scores(scores: "Scores", producers: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """|signed sum of the scores| over the parameters that make each channel.

    Args:
        scores: by parameter name.
        producers: for each site the modules that make its channels, one row of their parameters per channel; for
            example `{"stem.act": ["stem.conv", "stem.norm"]}`.

    Returns:
        One float64 tensor `(channels,)` per site, on the CPU.

    Raises:
        ConfigError: a site's modules hold no scored parameter, or disagree on the number of channels.
    """
    predicted: dict[str, Tensor] = {}
    for site, modules in producers.items():
        rows = [
            value.detach().double().cpu().flatten(1).sum(1)
            if value.dim() > 1
            else value.detach().double().cpu()
            for name, value in scores.values.items()
            if name.rpartition(".")[0] in modules
        ]
        if not rows or len({len(row) for row in rows}) != 1:
            raise ConfigError(
                f"The channels of {site!r} were said to be made by {', '.join(modules)}. Found "
                f"{sorted({len(row) for row in rows}) or 'no'} scored rows there; name modules that all have one row "
                "of parameters per channel."
            )
        predicted[site] = torch.stack(rows).sum(0).abs()
    return predicted


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


def _module(model: nn.Module, site: str) -> nn.Module:
    try:
        return model.get_submodule(site)
    except AttributeError as cause:
        known = ", ".join(name for name, _ in model.named_modules() if name)
        raise ModelError(
            f"Asked to mask the output of {site!r}, which is no module of the model. Its modules: {known}."
        ) from cause


def _loss(model: nn.Module, batch: Batch, task: Task) -> float:
    args, kwargs = task.inputs(batch)
    return float(task.loss(task.outputs(model(*args, **kwargs)), batch))


def _plain_loss(
    model: nn.Module, batch: Batch, task: Task, modules: Mapping[str, nn.Module]
) -> tuple[float, dict[str, int]]:
    """The loss with nothing masked, and how many channels each site turned out to have."""
    channels: dict[str, int] = {}

    def note(site: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.dim() > 1:
                channels[site] = output.shape[1]

        return hook

    handles = [module.register_forward_hook(note(site)) for site, module in modules.items()]
    try:
        loss = _loss(model, batch, task)
    finally:
        for handle in handles:
            handle.remove()
    if silent := sorted(modules.keys() - channels.keys()):
        raise ModelError(
            f"Asked to mask channels at the output of {', '.join(silent)} and saw no tensor (samples, channels, ...) "
            "come out there. Name modules that run in the forward and return one tensor."
        )
    return loss, channels


@contextmanager
def _masked(module: nn.Module, channel: int) -> Iterator[None]:
    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        masked = output.clone()
        masked[:, channel] = 0
        return masked

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
