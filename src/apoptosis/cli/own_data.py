"""Data that a person's own function returns.

    batches                                            to score and to train on
    (batches, batches or None, Task)                   to score on, to evaluate on, what a batch is; the first suffices
    {"scoring": …, "training": …, "validation": …,     batches for each purpose, those that there are; `test` is
     "evaluation": …, "task": …}                       another word for `evaluation`

Batches can be read again and again: a list, a DataLoader. Scoring and training stand in for each other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from apoptosis.cli.functions import told
from apoptosis.cli.named_data import NamedData, Reading
from apoptosis.cli.names import nearest
from apoptosis.errors import ApoptosisError, DataError
from apoptosis.task import Batch, Task, batch_size, tensors_in

__all__ = ["own_data"]

PURPOSES = ("scoring", "training", "validation", "evaluation")
KEYS = (*PURPOSES, "test", "task")


def own_data(name: str, made: Any, reading: Reading) -> NamedData:
    """What a function returned, as data.

    Args:
        name: of the function, for errors.
        made: what it returned; see the module docstring.
        reading: how it is to be read.

    Raises:
        DataError: these are no batches, or not for these purposes.
    """
    given = _by_key(name, made) if isinstance(made, dict) else _by_place(name, made)
    task = given.pop("task", None) or Task.classification()
    if not isinstance(task, Task):
        raise DataError(
            f"What {name} gave as the task is a {type(task).__name__}. It is the Task, as "
            "apoptosis.Task.language_model()."
        )
    for purpose, batches in given.items():
        _check_batches(_told_name(name, purpose), batches)
    if not {"scoring", "training"} & given.keys():
        raise DataError(
            f"{name} gave nothing to score or train on; found {', '.join(given) or 'nothing'}. Add 'scoring', batches "
            "that are read in the same order each time."
        )

    def adapted(reading: Reading, *purposes: str) -> Any:
        """Batches for the first purpose that there are any for."""
        found = [purpose for purpose in purposes if purpose in given]
        if not found:
            return None
        return _adapted(_told_name(name, found[0]), given[found[0]], task, reading)

    # Smaller pieces would train another network.
    whole = replace(reading, batch_size=None)
    scoring = adapted(reading, "scoring", "training")
    if reading.samples is not None:
        scoring = list(_first_samples(scoring, reading.samples, task))
    data = NamedData(
        scoring=scoring,
        training=adapted(whole, "training", "scoring"),
        validation=adapted(reading, "validation"),
        evaluation=adapted(reading, "evaluation"),
        task=task,
    )
    for purpose in given:
        _check_first(_told_name(name, purpose), getattr(data, purpose))
    return data


def _by_place(name: str, made: Any) -> dict[str, Any]:
    parts: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3:
        raise DataError(
            f"{name} gave a tuple of {len(parts)}. A tuple holds batches to score on, batches to evaluate on and a "
            "Task, the last two if there are any; for more purposes, give a dict with "
            f"{', '.join(PURPOSES)}. Batches themselves come as a list or a DataLoader."
        )
    if len(parts) == 2 and isinstance(parts[1], Task):
        parts = (parts[0], None, parts[1])  # nothing to judge on
    scoring, *others = parts
    given = dict(zip(("evaluation", "task"), others, strict=False))
    return {"scoring": scoring, **{key: part for key, part in given.items() if part is not None}}


def _by_key(name: str, made: Mapping[Any, Any]) -> dict[str, Any]:
    for key in made:
        if key not in KEYS:
            raise DataError(
                f"{name} gave a dict with the key {key!r}.{nearest(str(key), KEYS)} Keys are {', '.join(KEYS)}, each "
                "with batches, but task with a Task. A single batch is given as a list with it alone."
            )
    given = {key: part for key, part in made.items() if part is not None}
    if {"test", "evaluation"} <= given.keys():
        raise DataError(
            f"{name} gave both 'test' and 'evaluation', which are two names of one thing. Keep one."
        )
    if "test" in given:
        given["evaluation"] = given.pop("test")
    return given


def _told_name(name: str, purpose: str) -> str:
    return name if purpose == "scoring" else f"{name}, {purpose}"


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

    def __getattr__(self, name: str) -> Any:
        # Only what their own batches have: whoever trains asks whether passes can be set.
        if name == "start_at" and "batches" in self.__dict__:
            return getattr(self.batches, name)
        raise AttributeError(name)


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
    if callable(start_at := getattr(batches, "start_at", None)):
        start_at(0)  # what was read here was no pass
    if batch is None:
        raise DataError(f"{name} has no batches. Give at least one.")
    if next(tensors_in(batch), None) is None:
        raise DataError(
            f"The first batch of {name} is a {type(batch).__name__} without any tensor. A batch is a pair (inputs, "
            "labels) or a dict of tensors."
        )
