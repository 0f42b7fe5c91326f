"""The training loop: one optimiser, one schedule, whole epochs; the best of them kept by validation data.

Same model, batches, options and device give the same weights. What an epoch draws at random (dropout, the order of a
DataLoader) comes from `FitOptions.seed` and the number of the epoch alone, and batches that can (`start_at`) are told
which pass it is. So an epoch is a function of the state before it, and a run that was killed goes on from the last one
that a journal noted to the same end, bit for bit on a CPU.

The caller's random state, train/eval flags and `requires_grad` stay; weights and norm statistics change, and gradients
are cleared.
"""

import math
import time
from collections.abc import Iterable, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.checkpoint import Journal
from apoptosis.errors import ConfigError, DataError, ModelError, NonFiniteError
from apoptosis.modes import check_not_of_inference, in_train_mode, outside_inference_mode
from apoptosis.progress import track
from apoptosis.soundness import check_numbers
from apoptosis.task import Batch, Task, check_derivable
from apoptosis.training.evaluation import Evaluation, evaluate
from apoptosis.training.layout import channels_last
from apoptosis.training.options import FitOptions
from apoptosis.training.progress_notes import FitState, Noted, noted_state, write_state
from apoptosis.turns import one_at_a_time

__all__ = ["Epoch", "Fit", "at_pass", "fit_"]

SEED_STRIDE = 1_000_003
"""Between the seeds of epochs, so that runs of neighbouring seeds share none."""


@dataclass(frozen=True)
class Epoch:
    """One pass over the data. The loss is its mean while the weights moved; the rate is that of the first step."""

    loss: float
    learning_rate: float
    seconds: float
    validation: Evaluation | None = None


@dataclass(frozen=True)
class Fit:
    """What a training run did: a record for each epoch, and which of them the weights are of.

    Epochs count from 1; 0 is the network as it was given, where that did best on validation data.
    """

    epochs: tuple[Epoch, ...]
    kept: int | None
    before: Evaluation | None = None
    """Of the network as it was given, where epochs are chosen by validation data."""


@outside_inference_mode
@one_at_a_time
def fit_(  # noqa: PLR0913 - three may be said, and none must be
    model: nn.Module,
    batches: Iterable[Batch],
    task: Task | None = None,
    options: FitOptions | None = None,
    *,
    validation: Iterable[Batch] | None = None,
    teacher: nn.Module | None = None,
    journal: Journal | None = None,
) -> Fit:
    """Train `model` where it is.

    Args:
        model: its parameters that require grad are trained.
        batches: read once per epoch.
        task: what a batch is and what its loss is; classification unless said.
        options: how.
        validation: judged before training and after every epoch; the weights that do best stay (`FitOptions.keep`),
            those that were given among them. By accuracy where the task has it, else by loss. Not for test data: what
            was chosen by them is no figure on them.
        teacher: what `FitOptions.distil` follows.
        journal: where notes are kept to go on from; those that are there are gone on from.

    Returns:
        A record of every epoch.

    Raises:
        ConfigError: a teacher that nobody follows, or none for who should follow one.
        DataError: an epoch without any batch.
        ModelError: no parameter requires grad.
        NonFiniteError: the loss became NaN or infinite.

    >>> model = nn.Linear(2, 2)
    >>> batch = torch.eye(2), torch.tensor([0, 1])
    >>> losses = [epoch.loss for epoch in fit_(model, [batch], options=FitOptions(epochs=20)).epochs]
    >>> losses[-1] < losses[0]
    True
    """
    task, options = task or Task.classification(), options or FitOptions()
    check_not_of_inference(model)
    aim = _aim(task, options, teacher)
    optimizer = _optimizer(model, options)
    num_batches = _num_batches(batches)
    rates = _Rates(options, options.epochs * num_batches)
    state = FitState(model, optimizer)
    noted = noted_state(state, journal)
    epochs = [_read_epoch(own) for own in noted.epochs]
    chooses = options.keep == "best" and validation is not None and options.epochs > 0
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    laid_out = channels_last(model) if options.channels_last else nullcontext()
    alone = torch.random.fork_rng(devices=devices)
    with alone, torch.enable_grad(), in_train_mode(model), laid_out:
        before = _read_judged(noted.before)
        if chooses and not epochs:
            with _autocast(model, options):
                before = evaluate(model, validation or (), task)
            state.keep()
        for number in track(range(options.epochs), "training"):
            if number < len(epochs):
                continue
            start = time.perf_counter()
            torch.manual_seed(options.seed + SEED_STRIDE * number)
            rate = rates.at(state.steps)
            own = track(at_pass(batches, number), f"epoch {number + 1}", num_batches)
            loss = _run_epoch(state, own, aim, rates)
            _check_finite(loss, number, options)
            check_numbers(model, f"After epoch {number + 1} the network", real=False)
            with _autocast(model, options):
                judged = None if validation is None else evaluate(model, validation, task)
            epochs.append(Epoch(loss, rate, time.perf_counter() - start, judged))
            if chooses and _best(before, epochs) == number + 1:
                state.keep()
            if journal is not None and (number + 1 == options.epochs or journal.is_due()):
                done = [_epoch_as_data(own) for own in epochs]
                write_state(
                    state, journal, Noted(done, None if before is None else before.as_data())
                )
    optimizer.zero_grad()
    if not epochs:
        return Fit((), None)
    kept = _best(before, epochs) if chooses else len(epochs)
    state.put_back_()
    return Fit(tuple(epochs), kept, before)


def _run_epoch(state: FitState, batches: Iterable[Batch], task: Task, rates: "_Rates") -> float:
    """The mean loss. Sums stay on the device: reading them each step would stall a GPU."""
    model, optimizer, options = state.model, state.optimizer, rates.options
    total: Tensor | float = 0.0
    count: Tensor | int = 0
    for batch in batches:
        check_derivable(batch)
        if options.channels_last:
            batch = _images_last(batch)  # noqa: PLW2901 - the same batch, laid out otherwise
        args, kwargs = task.inputs(batch)
        with _autocast(model, options):
            outputs = task.outputs(model(*args, **kwargs))
            loss = task.loss(outputs, batch)
        optimizer.zero_grad()
        if not loss.requires_grad:
            raise ModelError(
                "Asked to train, and the loss depends on no weight. Were the model's outputs detached, computed under "
                "no_grad, or turned into integers? Let it return differentiable outputs."
            )
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rates.at(state.steps)
        optimizer.step()
        state.steps += 1
        size = _num_predictions(task, outputs, batch)
        total, count = total + loss.detach() * size, count + size
    if not int(count):
        raise DataError(
            "Asked to train and found no samples in an epoch: the batches are empty or were used up by an earlier "
            "loop. Give batches that can be iterated again, such as a list or a DataLoader."
        )
    return float(total) / int(count)


@dataclass(frozen=True)
class _Rates:
    """The learning rate of every step of a run."""

    options: FitOptions
    num_steps: int

    def at(self, step: int) -> float:
        part = self.options.curve(step / max(1, self.num_steps - 1))
        return self.options.learning_rate * part


def _num_predictions(task: Task, outputs: Tensor, batch: Batch) -> Tensor | int:
    """As `task.count`, without waiting for the device where the task can say which rows count."""
    if task.rows is None:
        return task.count(batch)
    logits, counted = task.rows(outputs.detach(), batch)
    return len(logits) if counted is None else counted.sum()


def _aim(task: Task, options: FitOptions, teacher: nn.Module | None) -> Task:
    """The task as it is trained for."""
    if (teacher is None) != (options.distil == 0):
        raise ConfigError(
            "A teacher was given and distil is 0, so nobody would follow it. Say FitOptions(distil=0.5)."
            if teacher is not None
            else f"distil={options.distil} was asked for without a teacher. Give the network to follow: teacher=dense."
        )
    aim = task.smoothed(options.label_smoothing)
    if teacher is None:
        return aim
    return aim.distillation(teacher, weight=options.distil, temperature=options.temperature)


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


def at_pass(batches: Iterable[Batch], number: int) -> Iterable[Batch]:
    """The batches of one pass over the data, counted from 0, also where earlier ones were read in another life."""
    start_at = getattr(batches, "start_at", None)
    if callable(start_at):
        start_at(number)
    return batches


def _num_batches(batches: Iterable[Batch]) -> int:
    return len(batches) if isinstance(batches, Sized) else sum(1 for _ in batches)


def _autocast(model: nn.Module, options: FitOptions) -> AbstractContextManager[object]:
    if options.precision == "float32":
        return nullcontext()
    device = next(p.device.type for p in model.parameters())
    return torch.autocast(device, torch.bfloat16)


def _images_last(batch: Batch) -> Batch:
    return tree_map_only(
        Tensor,
        lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t,
        batch,
    )


def _best(before: Evaluation | None, epochs: list[Epoch]) -> int:
    """The first with the most correct, and among equals the least loss; by the loss alone where nothing is counted.

    Epochs count from 1, and 0 is what was there before them.
    """

    def worth(judged: Evaluation) -> tuple[float, float]:
        loss = judged.loss if math.isfinite(judged.loss) else math.inf
        return judged.metrics.get("correct", 0.0), -loss

    judged = {number: own.validation for number, own in enumerate(epochs, 1)}
    worths = {n: worth(own) for n, own in {0: before, **judged}.items() if own is not None}
    return max(worths, key=lambda number: worths[number])


def _check_finite(loss: float, number: int, options: FitOptions) -> None:
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"The training loss became {loss} in epoch {number + 1} of {options.epochs}. "
            f"Lower the learning rate (it is {options.learning_rate:g}), or look for bad values in the data."
        )


def _epoch_as_data(epoch: Epoch) -> dict[str, Any]:
    return {
        "loss": epoch.loss,
        "learning_rate": epoch.learning_rate,
        "seconds": epoch.seconds,
        "validation": None if epoch.validation is None else epoch.validation.as_data(),
    }


def _read_epoch(data: dict[str, Any]) -> Epoch:
    judged = _read_judged(data["validation"])
    return Epoch(data["loss"], data["learning_rate"], data["seconds"], judged)


def _read_judged(data: dict[str, Any] | None) -> Evaluation | None:
    return None if data is None else Evaluation(**data)
