"""Data as a person names them on the command line.

    digits                          the embedded digits: scored on training images, evaluated on test images
    package.module:make             a function without arguments, see below
    path/to/file.py:make            the same, in a file

The function returns batches that can be read again and again (a list, a DataLoader), or a tuple: batches to score on,
batches to evaluate on (None for none), and the `Task` that says what a batch is, if it is not classification.
"""

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from apoptosis.cli.functions import call_function, check_has_function, is_function_name, told
from apoptosis.cli.names import nearest
from apoptosis.data import Split, digits
from apoptosis.errors import ApoptosisError, DataError
from apoptosis.task import Batch, Task, batch_size, tensors_in

__all__ = ["NamedData", "Reading", "find_data"]

DIGITS_BATCH_SIZE = 400
TRAINING_BATCH_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How data are read: at most `samples` are scored, at most `batch_size` at once, on `device`.

    Training reads `training_batch_size` at once, which changes results.
    """

    samples: int | None = None
    batch_size: int | None = None
    training_batch_size: int | None = None
    device: torch.device = torch.device("cpu")
    seed: int = 0


@dataclass(frozen=True)
class NamedData:
    """Batches for each purpose, all on one device; None where there are none for it."""

    scoring: Iterable[Batch]
    evaluation: Iterable[Batch] | None
    training: Iterable[Batch] | None
    task: Task
    validation: Iterable[Batch] | None = None
    """Decides which epoch of a training is kept."""


def find_data(name: str, reading: Reading) -> NamedData:
    """The data of that name.

    Raises:
        ConfigError: the function cannot be called.
        DataError: there are no such data, or what the function gave are no batches.
    """
    if name == "digits":
        return _digits(reading)
    if not is_function_name(name):
        check_has_function(name)
        raise DataError(
            f"There are no data {name!r}.{nearest(name, ['digits'])} Known are digits, and module:function or "
            "file.py:function for your own: a function that returns batches, or a tuple (batches to score on, batches "
            "to evaluate on)."
        )
    return _own(name, call_function(name, "batches"), reading)


def _digits(reading: Reading) -> NamedData:
    data = digits(seed=reading.seed)
    scored = Split(data.train.images[: reading.samples], data.train.labels[: reading.samples])
    size = reading.batch_size or DIGITS_BATCH_SIZE
    return NamedData(
        scoring=scored.batches(size, device=reading.device),
        evaluation=None if data.test is None else data.test.batches(size, device=reading.device),
        training=data.train.batches(
            reading.training_batch_size or TRAINING_BATCH_SIZE,
            shuffle_seed=reading.seed,
            device=reading.device,
        ),
        task=Task.classification(),
        validation=None
        if data.validation is None
        else data.validation.batches(size, device=reading.device),
    )


def _own(name: str, made: Any, reading: Reading) -> NamedData:
    parts: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3:
        raise DataError(
            f"{name} gave a tuple of {len(parts)}. A tuple holds batches to score on, batches to evaluate on and a "
            "Task, the last two if there are any. Batches themselves come as a list or a DataLoader."
        )
    if len(parts) == 2 and isinstance(parts[1], Task):
        parts = (parts[0], None, parts[1])  # nothing to judge on
    scoring: Any
    scoring, evaluation, task = (*parts, None, None)[:3]
    if task is not None and not isinstance(task, Task):
        raise DataError(
            f"The third item that {name} gave is a {type(task).__name__}. It is the Task, as "
            "apoptosis.Task.language_model()."
        )
    task = task or Task.classification()
    _check_batches(name, scoring)
    training = _adapted(name, scoring, task, replace(reading, batch_size=None))
    batches: Iterable[Batch] = _adapted(name, scoring, task, reading)
    if reading.samples is not None:
        batches = list(_first_samples(batches, reading.samples, task))
    _check_first(name, batches)
    if evaluation is not None:
        _check_batches(f"{name}, evaluation", evaluation)
        evaluation = _adapted(f"{name}, evaluation", evaluation, task, reading)
        _check_first(f"{name}, evaluation", evaluation)
    return NamedData(batches, evaluation, training, task)


class _Adapted:
    """A person's batches on a device, in pieces that are not too large; what fails in them is told in words."""

    def __init__(self, name: str, batches: Iterable[Batch], task: Task, reading: Reading) -> None:
        self.name, self.batches, self.task, self.reading = name, batches, task, reading

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._read():
            moved = _on(batch, self.reading.device)
            if self.reading.batch_size is None:
                yield moved
            else:
                yield from self.task.split(moved, self.reading.batch_size)

    def _read(self) -> Iterator[Batch]:
        try:
            yield from self.batches
        except ApoptosisError:
            raise
        except Exception as error:
            raise DataError(told(f"Reading batches of {self.name}", error)) from error


class _SizedAdapted(_Adapted):
    """The same where their number is known, so that bars can show the time left."""

    def __len__(self) -> int:
        assert isinstance(self.batches, Sized), "only such are wrapped in this class"
        return len(self.batches)


def _adapted(name: str, batches: Iterable[Batch], task: Task, reading: Reading) -> _Adapted:
    sized = reading.batch_size is None and isinstance(batches, Sized) and _has_length(batches)
    return (_SizedAdapted if sized else _Adapted)(name, batches, task, reading)


def _has_length(batches: Sized) -> bool:
    try:
        len(batches)
    except TypeError:  # a DataLoader over a stream has the method and no length
        return False
    return True


def _first_samples(batches: Iterable[Batch], most: int, task: Task) -> Iterator[Batch]:
    """Held by the caller: read once, so that every step scores the same samples and loads nothing again."""
    left = most
    for batch in batches:
        size = batch_size(batch)
        yield batch if size <= left else next(iter(task.split(batch, left)))
        left -= size
        if left <= 0:
            return


def _on(batch: Batch, device: torch.device) -> Batch:
    if hasattr(batch, "to"):  # a tensor, or a tokenizer's dict
        return batch.to(device)
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)


def _check_batches(name: str, batches: Any) -> None:
    if batches is None:
        raise DataError(
            f"{name} returned nothing. End the function with `return batches`, a list or a DataLoader."
        )
    if isinstance(batches, (Tensor, Mapping, str, bytes)) or not hasattr(batches, "__iter__"):
        raise DataError(
            f"{name} gave a {type(batches).__name__} where batches were expected. Give a list of batches or a "
            "DataLoader; of a single batch, a list with it alone."
        )
    if iter(batches) is batches:
        raise DataError(
            f"{name} gave a {type(batches).__name__}, which can be read only once, and every step reads the batches "
            "again. Give a list or a DataLoader."
        )


def _check_first(name: str, batches: Iterable[Batch]) -> None:
    batch = next(iter(batches), None)
    if batch is None:
        raise DataError(f"{name} has no batches. Give at least one.")
    if next(tensors_in(batch), None) is None:
        raise DataError(
            f"The first batch of {name} is a {type(batch).__name__} without any tensor. A batch is a pair (inputs, "
            "labels) or a dict of tensors."
        )
