"""What `prune` is given, looked at before any work begins, and a first sample to trace a model with."""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from apoptosis.errors import ApoptosisError, ConfigError, DataError, ModelError
from apoptosis.modes import check_not_of_inference
from apoptosis.planning import Budget, Selection
from apoptosis.soundness import check_numbers
from apoptosis.task import Batch, Task, check_derivable

__all__ = [
    "as_arguments",
    "check_choices",
    "check_data",
    "check_material",
    "check_number",
    "check_task",
    "failures_explained",
    "first_batch",
    "first_sample",
]


def check_data(batches: Any) -> None:
    """Refuse what cannot be read once per step.

    Raises:
        DataError: it cannot.
    """
    if isinstance(batches, Tensor):
        raise DataError(
            f"The batches are one tensor of shape {tuple(batches.shape)}. Give a list of batches, each a pair (inputs, "
            "labels): [(images, labels)]."
        )
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise DataError(
            f"The batches are a {type(batches).__name__}; pass a list or a loader, anything that gives batches."
        )
    if hasattr(batches, "__next__"):
        raise DataError(
            f"The batches are a {type(batches).__name__} that can be read only once, and every step reads them. Give a "
            "list or a DataLoader."
        )


def check_material(model: Any, batches: Any) -> None:
    """Refuse batches that cannot be read once per step, and a network with numbers that nothing good can come of.

    Raises:
        DataError: the batches are such.
        ModelError: the network is no module, its weights are integers or complex, or a variance is below zero.
        NonFiniteError: there is NaN or infinity in it.
    """  # noqa: DOC502 - by the functions that are called
    check_data(batches)
    check_numbers(model, "The network to prune")
    check_not_of_inference(model)


def check_choices(  # noqa: PLR0913 - arguments of `prune`, one by one
    budget: Any, steps: Any, repair: Any, task: Any, selection: Any, *, align: Any = None
) -> None:
    """Refuse arguments of another kind than is meant, of which Python would say something else.

    Raises:
        ConfigError: one is.
    """
    if steps is not None:
        check_number("steps", steps)
    check_task(task)
    if not isinstance(budget, Budget):
        raise ConfigError(
            f"The budget is {budget!r}; say of what that share may stay: Budget(flops=0.5)."
        )
    if isinstance(repair, str):
        raise ConfigError(f"repair={repair!r} is one text; a list is meant: repair=[{repair!r}].")
    if repair is not None and not hasattr(repair, "__iter__"):
        raise ConfigError(f"repair={repair!r} was asked for; it is a list of repairs: repair=[…].")
    if selection is not None and not isinstance(selection, Selection):
        raise ConfigError(
            f"selection={selection!r} was asked for; make one: Selection(round_to=8)."
        )
    if align is not None and not isinstance(align, bool):
        raise ConfigError(f"align={align!r} was asked for; it is True or False, or not said.")


def check_number(what: str, value: Any) -> None:
    """Refuse what is no number of steps or stages.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{what}={value!r} was asked for; it is a whole number from 1 on.")


def check_task(task: Any) -> None:
    """Refuse what is no task.

    Raises:
        ConfigError: it is none.
    """
    if task is not None and not isinstance(task, Task):
        raise ConfigError(
            f"The task is a {type(task).__name__}; make one: Task.classification(), Task.language_model()."
        )


def first_sample(model: nn.Module, batches: Iterable[Batch], task: Task) -> Any:
    """The first sample of the batches, as arguments to trace a model with.

    Raises:
        DataError: there are no batches, or all are empty.
    """
    pieces = (piece for batch in batches for piece in task.split(batch, 1))
    return _first(model, pieces, batches, task)[1]


def first_batch(model: nn.Module, batches: Iterable[Batch], task: Task) -> tuple[Batch, Any]:
    """The first batch that is not empty, and its samples as arguments to trace a model with.

    Raises:
        DataError: there are no batches, or all are empty.
    """
    whole = (batch for batch in batches if next(iter(task.split(batch, 1)), None) is not None)
    return _first(model, whole, batches, task)


def _first(
    model: nn.Module, pieces: Iterator[Batch], batches: Iterable[Batch], task: Task
) -> tuple[Batch, Any]:
    """The first piece, and a copy of it as arguments."""
    if (piece := next(pieces, None)) is None:
        found = (
            "All batches are empty"
            if next(iter(batches), None) is not None
            else "There are no batches"
        )
        raise DataError(
            f"{found}. Give some, or `example_inputs` to trace the model with if the criterion reads none."
        )
    check_derivable(piece)
    return piece, as_arguments(model, tree_map_only(Tensor, Tensor.clone, piece), task)


def as_arguments(model: nn.Module, batch: Batch, task: Task) -> Any:
    """What a model is called with on a batch, all by place or all by name."""
    args, kwargs = task.inputs(batch)
    if args and kwargs:
        return _by_name(model, args, kwargs)
    return kwargs or args


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments as keywords."""
    signature = inspect.signature(model.forward)
    found = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= found.pop(parameter.name, {})
    return found


@contextmanager
def failures_explained(work: str) -> Iterator[None]:
    """An error of the model or the loss on the data, with what it is an error of.

    Raises:
        DataError: in the place of torch's and Python's own.
        ModelError: in that of torch's where the outputs have no derivative.

    What is ours already stays, and so does lack of memory.
    """  # noqa: DOC501 - those are raised again as they came
    try:
        yield
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        if isinstance(error, (ApoptosisError, torch.OutOfMemoryError)):
            raise
        first = (str(error).strip().splitlines() or ["no message"])[0]
        if "does not require grad" in first:
            raise ModelError(
                f"{work} needs derivatives, and the outputs of the model have none with respect to its weights. Were "
                "they detached, computed under no_grad, or turned into integers? Let the model return differentiable "
                "outputs while it is scored."
            ) from error
        raise DataError(
            f"{work} failed on the data: {type(error).__name__}: {first}. Labels must fit the outputs "
            "(one class index per sample, below the number of outputs), and the model must run on every batch; `task` "
            "says how a batch is read."
        ) from error
