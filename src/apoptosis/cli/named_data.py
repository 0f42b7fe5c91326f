"""Batches for each purpose of a command, and how they are to be read."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from apoptosis.task import Batch, Task

__all__ = ["NamedData", "Reading"]


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
    """Of orders."""
    split_seed: int = 0
    """Of which images are for training, for choosing and for judging."""


@dataclass(frozen=True, kw_only=True)
class NamedData:
    """Batches for each purpose, all on one device; None where there are none for it."""

    scoring: Iterable[Batch]
    training: Iterable[Batch] | None = None
    validation: Iterable[Batch] | None = None
    """Decides which epoch of a training is kept."""
    evaluation: Iterable[Batch] | None = None
    task: Task
    num_classes: int | None = None
    """Labels are below it, where that is known of all."""
