"""A small training loop: one optimiser, one schedule, whole epochs.

Same model, batches, options and device give the same weights: what the model draws at random while training (dropout)
comes from `FitOptions.seed`, and the order of the data from the batches' own seed. The caller's random state,
train/eval flags and `requires_grad` stay; weights and norm statistics change, and gradients are cleared.
"""

import math
from collections.abc import Collection, Iterable, Sized
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from apoptosis.errors import ConfigError, DataError, ModelError, NonFiniteError
from apoptosis.modes import in_train_mode
from apoptosis.progress import track
from apoptosis.task import Batch, Task
from apoptosis.training.schedules import SCHEDULES

__all__ = ["Epoch", "FitOptions", "fit_"]

OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How to train. `momentum` is SGD's; `learning_rate` is the schedule's top."""

    epochs: int = 10
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 0.1
    schedule: Literal["cosine", "one-cycle"] = "one-cycle"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.epochs >= 0, f"epochs={self.epochs} is negative")
        _require(self.learning_rate > 0, f"learning_rate={self.learning_rate} is not above zero")
        _require(0 <= self.momentum < 1, f"momentum={self.momentum} is not in [0, 1)")
        _require(self.weight_decay >= 0, f"weight_decay={self.weight_decay} is negative")
        _require_one_of("optimizer", self.optimizer, OPTIMIZERS)
        _require_one_of("schedule", self.schedule, SCHEDULES)


@dataclass(frozen=True)
class Epoch:
    """Mean training loss of one pass over the data, taken while the weights moved, and the rate it began with."""

    loss: float
    learning_rate: float


def fit_(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    options: FitOptions | None = None,
) -> list[Epoch]:
    """Train `model` where it is; one record per epoch.

    Raises:
        DataError: an epoch without any batch.
        ModelError: no parameter requires grad.
        NonFiniteError: the loss became NaN or infinite.

    >>> model = nn.Linear(2, 2)
    >>> batch = torch.eye(2), torch.tensor([0, 1])
    >>> losses = [epoch.loss for epoch in fit_(model, [batch], options=FitOptions(epochs=20))]
    >>> losses[-1] < losses[0]
    True
    """
    task, options = task or Task.classification(), options or FitOptions()
    optimizer = _optimizer(model, options)
    num_steps = options.epochs * _num_batches(batches)
    curve = SCHEDULES[options.schedule]
    scheduler = LambdaLR(optimizer, lambda step: curve(step / max(1, num_steps - 1)))
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    history: list[Epoch] = []
    with torch.random.fork_rng(devices=devices), in_train_mode(model):
        torch.manual_seed(options.seed)
        for number in track(range(options.epochs), "training"):
            rate = float(scheduler.get_last_lr()[0])
            loss = _run_epoch(model, batches, task, optimizer, scheduler)
            if not math.isfinite(loss):
                raise NonFiniteError(
                    f"The training loss became {loss} in epoch {number + 1} of {options.epochs}. "
                    f"Lower the learning rate (it is {options.learning_rate:g}), or look for bad values in the data."
                )
            history.append(Epoch(loss, rate))
    optimizer.zero_grad()
    return history


def _run_epoch(
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task,
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
) -> float:
    total: Tensor | float = 0.0
    count = 0
    for batch in batches:
        args, kwargs = task.inputs(batch)
        loss = task.loss(task.outputs(model(*args, **kwargs)), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        size = task.count(batch)
        total = (
            total + loss.detach() * size
        )  # stays on the device: reading it each step would stall a GPU
        count += size
    if not count:
        raise DataError(
            "Asked to train and found no samples in an epoch: the batches are empty or were used up by an earlier "
            "loop. Give batches that can be iterated again, such as a list or a DataLoader."
        )
    return float(total) / count


def _optimizer(model: nn.Module, options: FitOptions) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ModelError(
            "Asked to train a model of which no parameter requires grad. Call model.requires_grad_() first."
        )
    rate, decay = options.learning_rate, options.weight_decay
    if options.optimizer == "adamw":
        return torch.optim.AdamW(parameters, rate, weight_decay=decay)
    nesterov = options.momentum > 0
    return torch.optim.SGD(
        parameters, rate, options.momentum, weight_decay=decay, nesterov=nesterov
    )


def _num_batches(batches: Iterable[Batch]) -> int:
    return len(batches) if isinstance(batches, Sized) else sum(1 for _ in batches)


def _require(holds: bool, found: str) -> None:  # noqa: FBT001 - reads as a sentence where it is used
    if not holds:
        raise ConfigError(f"FitOptions: {found}.")


def _require_one_of(option: str, value: str, allowed: Collection[str]) -> None:
    _require(value in allowed, f"{option}={value!r} is not one of {', '.join(allowed)}")
